"use strict";
// Charts are drawn already. The point nearest to the pointer, or to the arrow keys, shows its values; the controls smooth
// otherwise or count hours, and a drag zooms.
const DRAWN_SMOOTHING = 0.1;
const controls = document.getElementById("controls");
const clocks = controls ? JSON.parse(controls.dataset.clocks) : {};
const view = { smoothing: DRAWN_SMOOTHING, axis: "update" };
const redrawers = [];
const nearest = (list, place) => list.reduce((best, p, i) => (Math.abs(p - place) < Math.abs(list[best] - place) ? i : best), 0);
const brief = (value) => String(Number(value.toPrecision(3))).replace("-", "−");
function interpolate(x, xs, ys) {
  const after = xs.findIndex((value) => value >= x);
  if (after <= 0) return ys[after < 0 ? ys.length - 1 : 0];
  return ys[after - 1] + ((ys[after] - ys[after - 1]) * (x - xs[after - 1])) / (xs[after] - xs[after - 1]);
}
function roundValues(low, high, least) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 5));
  const step = Math.max(least, [1, 2, 5, 10].map((f) => f * power).find((s) => s >= (high - low) / 5));
  const first = Math.ceil(low / step), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(0, count) }, (_, i) => Number(((first + i) * step).toPrecision(6)));
}
function smoothedPlaces(points, share) { // a moving average taken twice, as the page was drawn
  const half = Math.round((points.length * share) / 4);
  let ys = points.map((point) => point[1]);
  for (let pass = 0; pass < 2; pass += 1) {
    ys = ys.map((_, i) => { const part = ys.slice(Math.max(0, i - half), i + half + 1); return part.reduce((a, b) => a + b) / part.length; });
  }
  return points.map((point, i) => [point[0], ys[i]]);
}
for (const figure of document.querySelectorAll(".chart")) {
  const drawn = JSON.parse(figure.dataset.lines), ends = JSON.parse(figure.dataset.ends);
  const lines = drawn.filter((line) => line.px.length);
  const [plot, area, svg, cursor, tip, axis, axisName] = [".plot", ".area", ".area svg", ".cursor", ".tip", ".plot .x", ".x-label"].map((name) => figure.querySelector(name));
  const paths = [...svg.querySelectorAll("[data-line]")].map((path) => ({ path, line: drawn[path.dataset.line], data: path.getAttribute("d") }));
  const ticks = [...axis.children];
  let shown = -1, zoom = [0, 1000], places = [], timed = false, xEnds = ends.x;
  const valueAt = (py) => { const v = ends.y[1] - (py / 1000) * (ends.y[1] - ends.y[0]); return "logarithmic" in figure.dataset ? 10 ** v : v; };
  const redraw = () => {
    timed = view.axis === "hours" && figure.dataset.x === "update" && lines.every((line) => clocks[line.label]);
    const hours = (line, px) => interpolate(ends.x[0] + (px / 1000) * (ends.x[1] - ends.x[0]), ...clocks[line.label]);
    const reached = timed ? lines.flatMap((line) => [hours(line, line.px[0]), hours(line, line.px.at(-1))]) : ends.x;
    xEnds = [Math.min(...reached), Math.max(...reached)];
    const moved = (line, px) => (timed ? ((hours(line, px) - xEnds[0]) / (xEnds[1] - xEnds[0] || 1)) * 1000 : px);
    for (const line of lines) {
      line.places = line.px.map((px) => moved(line, px));
      line.smoothed = line.means && view.smoothing !== DRAWN_SMOOTHING ? smoothedPlaces(line.means, view.smoothing) : null;
    }
    for (const { path, line, data } of paths) {
      const anew = path.classList.contains("line") && line.smoothed;
      const source = anew ? line.smoothed.map(([x, y], i) => `${i ? "L" : "M"}${x} ${y.toFixed(1)}`).join("") : data;
      path.setAttribute("d", timed ? source.replace(/([MLH])(-?[\d.]+)/g, (_, letter, x) => letter + moved(line, Number(x)).toFixed(1)) : source);
    }
    places = [...new Set(lines.flatMap((line) => line.places))].sort((a, b) => a - b).filter((p) => p >= zoom[0] && p <= zoom[1]);
    const whole = zoom[0] === 0 && zoom[1] === 1000;
    svg.setAttribute("viewBox", `${zoom[0]} 0 ${zoom[1] - zoom[0]} 1000`);
    figure.classList.toggle("zoomed", !whole);
    axisName.textContent = timed ? "hours of training" : figure.dataset.x;
    const [low, high] = zoom.map((place) => xEnds[0] + (place / 1000) * (xEnds[1] - xEnds[0]));
    axis.replaceChildren(...(whole && !timed ? ticks : roundValues(low, high, timed ? 0 : 1).map((value) => {
      const tick = document.createElement("span");
      tick.textContent = brief(value);
      tick.style.left = `${((value - low) / (high - low || 1)) * 100}%`;
      return tick;
    })));
    hide();
  };
  const wordsAt = (line, at) => {
    if (!line.logged) return line.y[at];
    const smooth = line.smoothed ? brief(valueAt(interpolate(line.px[at], line.smoothed.map((p) => p[0]), line.smoothed.map((p) => p[1])))) : line.y[at];
    return `${smooth} smoothed, ${line.logged[at]} logged`;
  };
  const show = (index) => {
    if (!places.length) return;
    shown = Math.max(0, Math.min(places.length - 1, index));
    const place = places[shown];
    const there = lines.find((line) => line.places.includes(place));
    const x = there.x[there.places.indexOf(place)];
    const left = ((place - zoom[0]) / (zoom[1] - zoom[0])) * 100;
    tip.replaceChildren(`${figure.dataset.x} ${x}${timed ? `, ${brief(xEnds[0] + (place / 1000) * (xEnds[1] - xEnds[0]))} h` : ""}`);
    if (figure.dataset.of) tip.append(Object.assign(document.createElement("p"), { className: "muted", textContent: figure.dataset.of }));
    for (const line of lines) {
      const at = nearest(line.places, place);
      const row = document.createElement("div");
      row.className = `c${line.colour}`;
      const value = document.createElement("b");
      value.textContent = line.x[at] === x ? wordsAt(line, at) : `${wordsAt(line, at)} (at ${line.x[at]})`;
      const name = document.createElement("bdi");
      name.textContent = line.label;
      row.append(name, line.label ? " " : "", value);
      tip.append(row);
    }
    cursor.hidden = tip.hidden = false;
    cursor.style.left = `${left}%`;
    tip.style.left = left < 50 ? `calc(${left}% + 10px)` : "auto";
    tip.style.right = left < 50 ? "auto" : `calc(${100 - left}% + 10px)`;
  };
  const hide = () => { cursor.hidden = tip.hidden = true; shown = -1; };
  const shareAt = (event) => { const box = area.getBoundingClientRect(); return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)); };
  const selected = document.createElement("i");
  selected.className = "selected";
  selected.hidden = true;
  area.append(selected);
  let from = null;
  area.addEventListener("pointermove", (event) => {
    const share = shareAt(event);
    show(nearest(places, zoom[0] + share * (zoom[1] - zoom[0])));
    if (from === null) return;
    selected.hidden = false;
    selected.style.left = `${Math.min(from, share) * 100}%`;
    selected.style.width = `${Math.abs(share - from) * 100}%`;
  });
  area.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse") { from = shareAt(event); event.preventDefault(); plot.focus(); } // a finger scrolls
    area.dispatchEvent(new PointerEvent("pointermove", event));
  });
  addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [first, last] = [from, shareAt(event)].sort((a, b) => a - b).map((share) => zoom[0] + share * (zoom[1] - zoom[0]));
    from = null;
    selected.hidden = true;
    if (last - first < 0.03 * (zoom[1] - zoom[0])) return;
    zoom = [first, last];
    redraw();
  });
  area.addEventListener("dblclick", () => { zoom = [0, 1000]; redraw(); });
  area.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") { zoom = [0, 1000]; redraw(); }
    if (!move) return;
    event.preventDefault();
    show(shown < 0 ? (move > 0 ? 0 : places.length - 1) : shown + move);
  });
  redraw();
  redrawers.push(() => { zoom = [0, 1000]; redraw(); });
}
if (controls) {
  controls.hidden = false;
  const [smoothing, axis, output] = ["#smoothing", "#axis", "output"].map((name) => controls.querySelector(name));
  const apply = () => {
    view.smoothing = Number(smoothing.value) / 100;
    view.axis = axis.value;
    output.textContent = `${smoothing.value} %`;
    for (const redraw of redrawers) redraw();
  };
  for (const control of [smoothing, axis]) control.addEventListener("input", apply);
}

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
