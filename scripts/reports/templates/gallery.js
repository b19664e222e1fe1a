"use strict";
// All videos on the screen play in sync; the first of a row leads, the others follow.
const FRAME = 1 / 24;
const [play, restart, seek, speed, find] = ["play", "restart", "seek", "speed", "find"].map((id) => document.getElementById(id));
const rows = [...document.querySelectorAll(".gallery .strip")];
const videosOf = (row) => [...row.querySelectorAll("video")].filter((video) => near.has(video));
const gallery = document.querySelector(".gallery");
let playing = false;
let place = 0; // of all videos, as a share of their length
const placed = new WeakSet(); // the others may have data already, yet stand where they were loaded
const canLead = (video) => placed.has(video) && video.readyState > 1;

// A click on a video, or its key, plays or pauses all, not just one.
for (const kind of ["click", "keydown"]) {
  gallery.addEventListener(kind, (event) => {
    if (event.target.tagName !== "VIDEO" || (event.key && event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    setPlaying(!playing);
  }, true);
}

// A video that comes near the screen takes the place of its row, the first of a row that of all.
gallery.addEventListener("loadedmetadata", (event) => {
  const other = videosOf(event.target.closest(".strip")).find((video) => video !== event.target && placed.has(video)); // even one that is still seeking
  const wanted = other ? other.currentTime : place * event.target.duration;
  if (wanted !== event.target.currentTime) event.target.currentTime = wanted; // a seek would take the picture away
  placed.add(event.target);
}, true);
gallery.addEventListener("emptied", (event) => placed.delete(event.target), true);

function setPlaying(wanted) {
  playing = wanted;
  play.textContent = playing ? "Pause" : "Play";
  follow();
}

function follow() {
  for (const row of new Set([...near].map((video) => video.closest(".strip")))) {
    const videos = videosOf(row);
    const active = playing && videos.some(isOnScreen);
    for (const video of videos) {
      video.playbackRate = Number(speed.value);
      if (active && video.paused) video.play().catch(() => {});
      if (!active && !video.paused) video.pause();
    }
    const leader = videos.find(canLead);
    if (!leader) continue;
    keepInStep(videos.filter(canLead), leader);
  }
  if (playing) showPlace();
}
setInterval(follow, 200);

function showPlace() {
  const first = [...near].find((video) => placed.has(video) && isOnScreen(video));
  if (!first) return;
  place = first.currentTime / first.duration;
  seek.value = 1000 * place;
}
function moveTo(timeOf) {
  for (const video of near) if (video.readyState > 0) video.currentTime = timeOf(video);
  showPlace();
}
function step(frames) {
  setPlaying(false);
  moveTo((video) => Math.min(Math.max(video.currentTime + frames * FRAME, 0), video.duration));
}
play.addEventListener("click", () => setPlaying(!playing));
restart.addEventListener("click", () => moveTo(() => 0));
seek.addEventListener("input", () => { setPlaying(false); place = seek.value / 1000; moveTo((video) => place * video.duration); });
speed.addEventListener("change", follow);
find.addEventListener("input", () => {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const row of rows) {
    const text = row.querySelector(".prompt").textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    found += !row.hidden;
  }
  document.getElementById("none-found").hidden = found > 0;
});
document.getElementById("order")?.addEventListener("change", (event) => {
  const by = { index: (row) => Number(row.dataset.index), best: (row) => -row.dataset.gain, worst: (row) => Number(row.dataset.gain) }[event.target.value];
  document.getElementById("none-found").before(...rows.toSorted((a, b) => by(a) - by(b)));
});
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input:not([type=range]), select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " " && event.target.closest("button, [role=button]")) return;
  const action = { " ": () => setPlaying(!playing), r: () => moveTo(() => 0), ",": () => step(-1), ".": () => step(1) }[event.key.toLowerCase()];
  if (!action) return;
  event.preventDefault();
  action();
});
