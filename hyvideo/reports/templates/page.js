"use strict";
// Charts: the point nearest to the pointer, or to the arrow keys, shows its values.
for (const figure of document.querySelectorAll(".chart")) {
  const lines = JSON.parse(figure.dataset.lines).filter((line) => line.px.length);
  const [plot, area, cursor, tip] = [".plot", ".area", ".cursor", ".tip"].map((name) => figure.querySelector(name));
  const places = [...new Set(lines.flatMap((line) => line.px))].sort((a, b) => a - b);
  let shown = -1;
  const nearest = (list, place) => list.reduce((best, p, i) => (Math.abs(p - place) < Math.abs(list[best] - place) ? i : best), 0);
  const show = (index) => {
    shown = Math.max(0, Math.min(places.length - 1, index));
    const place = places[shown];
    const there = lines.find((line) => line.px.includes(place));
    const x = there.x[there.px.indexOf(place)];
    tip.replaceChildren(`${figure.dataset.x} ${x}`);
    for (const line of lines) {
      const at = nearest(line.px, place);
      const row = document.createElement("div");
      row.className = `c${line.colour}`;
      const value = document.createElement("b");
      value.textContent = line.x[at] === x ? line.y[at] : `${line.y[at]} (at ${line.x[at]})`;
      const name = document.createElement("bdi");
      name.textContent = line.label;
      row.append(name, line.label ? " " : "", value);
      tip.append(row);
    }
    cursor.hidden = tip.hidden = false;
    cursor.style.left = `${place / 10}%`;
    tip.style.left = place < 500 ? `calc(${place / 10}% + 10px)` : "auto";
    tip.style.right = place < 500 ? "auto" : `calc(${100 - place / 10}% + 10px)`;
  };
  const hide = () => { cursor.hidden = tip.hidden = true; shown = -1; };
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    show(nearest(places, ((event.clientX - box.left) / box.width) * 1000));
  });
  area.addEventListener("pointerdown", (event) => area.dispatchEvent(new PointerEvent("pointermove", event)));
  area.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(shown < 0 ? (move > 0 ? 0 : places.length - 1) : shown + move);
  });
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
