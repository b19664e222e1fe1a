"use strict";
// A run in progress: a newer page is looked for, but not while someone watches a video.
const reload = document.querySelector("[data-reload]");
if (reload) {
  setInterval(() => {
    if (![...document.querySelectorAll("video")].some((video) => !video.paused && !video.closest(".together"))) location.reload();
  }, 1000 * Number(reload.dataset.reload));
}

// Videos: those near the screen are loaded and show a frame, others give their player back: browsers refuse more than
// some 1000 in a page, on phones 40. What cannot be played says so.
const near = new Set();
const sources = new Map(); // of videos that have been near
const nearScreen = new IntersectionObserver((entries) => {
  for (const { target: video, isIntersecting } of entries) {
    if (isIntersecting) {
      near.add(video);
      video.preload = "auto";
      if (sources.has(video)) video.src = sources.get(video);
    } else if (near.delete(video)) {
      sources.set(video, video.getAttribute("src"));
      video.removeAttribute("src");
      video.load(); // with a source it would load again, whatever preload says
    }
  }
}, { rootMargin: "400px" });
function onPress(element, action) {
  element.addEventListener("click", action);
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    action();
  });
}
for (const video of document.querySelectorAll("video")) {
  video.controls = false; // they would hide most of a small video: a click or a key plays it
  video.tabIndex = 0;
  video.title = "Click to play or pause, double-click for full screen";
  const toggle = () => {
    const starts = video.paused;
    for (const one of video.closest(".together .pair")?.querySelectorAll("video") ?? [video]) {
      if (starts) one.play().catch(() => {}); else one.pause();
    }
  };
  onPress(video, toggle);
  video.addEventListener("dblclick", () => video.requestFullscreen());
  if (!video.width) video.addEventListener("loadedmetadata", () => { video.style.aspectRatio = `${video.videoWidth} / ${video.videoHeight}`; }); // kept without a player
  video.addEventListener("error", () => {
    const box = document.createElement("div");
    box.className = "no-video";
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", `Video that cannot be played: ${video.getAttribute("aria-label")}`);
    const [title, file] = [document.createElement("b"), document.createElement("code")];
    title.textContent = "Video cannot be played";
    file.textContent = video.dataset.file;
    box.append(title, file);
    near.delete(video);
    video.replaceWith(box);
  });
  nearScreen.observe(video);
}

// Videos of one prompt keep to the time of the first: a shorter one repeats.
const MOST_DRIFT = 0.08;
function keepInStep(videos, leader) {
  for (const video of videos) {
    const wanted = leader.currentTime % video.duration;
    const drift = Math.abs(video.currentTime - wanted);
    if (Math.min(drift, video.duration - drift) > MOST_DRIFT) video.currentTime = wanted;
  }
}
setInterval(() => {
  for (const group of document.querySelectorAll(".together")) {
    const videos = [...group.querySelectorAll("video")].filter((video) => near.has(video) && video.readyState > 1 && !video.paused);
    if (videos.length) keepInStep(videos, videos[0]);
  }
}, 200);

// Videos that play together, from their start.
function playTogether(videos) {
  for (const video of videos) { video.currentTime = 0; video.play().catch(() => {}); }
}
const isOnScreen = (video) => { const box = video.getBoundingClientRect(); return box.bottom > 0 && box.top < innerHeight && box.height > 0; };
for (const button of document.querySelectorAll(".play-all")) {
  const group = document.getElementById(button.dataset.group);
  let playing = false;
  button.addEventListener("click", () => {
    playing = !playing;
    const videos = [...near].filter((video) => group.contains(video));
    if (playing) playTogether(videos);
    else videos.forEach((video) => video.pause());
    button.textContent = playing ? "Pause all" : "Play all";
  });
  if (group.matches(".together") && !matchMedia("(prefers-reduced-motion: reduce)").matches) button.click();
  group.addEventListener("loadeddata", (event) => { if (playing) event.target.play().catch(() => {}); }, true); // came near
}

// Prompts that are cut off open at a click or a key.
function offerWholePrompts() {
  const prompts = [...document.querySelectorAll(".prompt:not(.long, .open)")];
  for (const prompt of prompts.filter((prompt) => prompt.scrollHeight > prompt.clientHeight + 2)) {
    prompt.classList.add("long");
    prompt.tabIndex = 0;
    prompt.setAttribute("role", "button");
    prompt.setAttribute("aria-expanded", "false");
    prompt.title = "Show the whole prompt";
    const toggle = () => prompt.setAttribute("aria-expanded", String(prompt.classList.toggle("open")));
    onPress(prompt, toggle);
  }
}
offerWholePrompts();
addEventListener("resize", offerWholePrompts);
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", offerWholePrompts);

// Tables whose heads sort their rows: by text, or by number where the head is one of numbers.
for (const table of document.querySelectorAll("table.sortable")) {
  const [heads, body] = [[...table.tHead.rows[0].cells], table.tBodies[0]];
  for (const [place, head] of heads.entries()) {
    const sort = () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[place].textContent.replace("\u2212", "-");
      const compare = (a, b) => head.matches(".num") ? Number(key(a)) - Number(key(b)) : key(b).localeCompare(key(a));
      body.append(...[...body.rows].sort((a, b) => (down ? -1 : 1) * compare(a, b)));
    };
    head.tabIndex = 0;
    onPress(head, sort);
  }
}
