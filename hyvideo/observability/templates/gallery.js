"use strict";
// All videos on the screen play in sync; the first of a row leads, the others follow.
const FRAME = 1 / 24;
const MOST_DRIFT = 0.08;
const [play, restart, seek, speed, find] = ["play", "restart", "seek", "speed", "find"].map((id) => document.getElementById(id));
const rows = [...document.querySelectorAll(".gallery .strip")];
const videosOf = (row) => [...row.querySelectorAll("video")];
const allVideos = () => rows.flatMap(videosOf);
let playing = false;

// A click plays or pauses all, not just one.
document.querySelector(".gallery").addEventListener("click", (event) => {
  if (event.target.tagName !== "VIDEO") return;
  event.stopImmediatePropagation();
  setPlaying(!playing);
}, true);

function setPlaying(wanted) {
  playing = wanted;
  play.textContent = playing ? "Pause" : "Play";
  follow();
}

function follow() {
  for (const row of rows) {
    const videos = videosOf(row);
    const active = playing && videos.some(isOnScreen);
    for (const video of videos) {
      video.playbackRate = Number(speed.value);
      if (active && video.paused) video.play().catch(() => {});
      if (!active && !video.paused) video.pause();
    }
    const leader = videos.find((video) => video.readyState > 1);
    if (!leader) continue;
    for (const video of videos) {
      const drift = Math.abs(video.currentTime - leader.currentTime);
      if (video.readyState > 1 && Math.min(drift, Math.abs(drift - video.duration)) > MOST_DRIFT) video.currentTime = leader.currentTime;
    }
  }
  const first = allVideos().find((video) => video.readyState > 0 && isOnScreen(video));
  if (playing && first) seek.value = (1000 * first.currentTime) / first.duration;
}
setInterval(follow, 200);

function moveTo(place) {
  for (const video of allVideos()) if (video.readyState > 0) video.currentTime = place(video);
}
function step(frames) {
  setPlaying(false);
  moveTo((video) => Math.min(Math.max(video.currentTime + frames * FRAME, 0), video.duration));
}
play.addEventListener("click", () => setPlaying(!playing));
restart.addEventListener("click", () => moveTo(() => 0));
seek.addEventListener("input", () => { setPlaying(false); moveTo((video) => (seek.value / 1000) * video.duration); });
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
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, button, [role=button]") || event.ctrlKey || event.metaKey || event.altKey) return;
  const action = { " ": () => setPlaying(!playing), r: () => moveTo(() => 0), ",": () => step(-1), ".": () => step(1) }[event.key.toLowerCase()];
  if (!action) return;
  event.preventDefault();
  action();
});
