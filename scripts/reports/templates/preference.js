"use strict";
const { study, pairs, sizes, criteria } = JSON.parse(document.getElementById("study").textContent);
const at = (id) => document.getElementById(id);
const questions = [...document.querySelectorAll(".question")];
let rater = "", order = [], votes = {}, place = 0, asked = 0;

// A rater's own order of pairs and sides, the same whenever the page is opened again.
function generatorOf(text) {
  let state = 2166136261;
  for (const letter of text) state = Math.imul(state ^ letter.codePointAt(0), 16777619);
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}
function shuffled(list, random) {
  const copy = [...list];
  for (let i = copy.length - 1; i > 0; i -= 1) {
    const j = Math.floor(random() * (i + 1));
    [copy[i], copy[j]] = [copy[j], copy[i]];
  }
  return copy;
}

// Votes survive a reload where the browser keeps them. Their own count says which is the later: a clock may be set back.
const store = () => `preference-${study}-${rater}`;
function remember() {
  try { localStorage.setItem(store(), JSON.stringify(votes)); at("unkept").hidden = true; } catch { at("unkept").hidden = false; }
}
function recall() {
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem(store())) || {}; } catch { /* the browser keeps nothing */ }
  for (const [key, vote] of Object.entries(kept)) if (!votes[key] || votes[key].count < vote.count) votes[key] = vote; // of another tab
}

const keyOf = (pair, criterion) => `${pair.pair} ${criterion}`;
const isJudged = (pair) => criteria.every((criterion) => votes[keyOf(pair, criterion)]);

function begin(name) {
  rater = name;
  const random = generatorOf(study + rater);
  order = shuffled(pairs, random).map((pair) => ({ ...pair, videos: shuffled(pair.videos, random) }));
  votes = {};
  recall();
  remember();
  place = Math.max(0, order.findIndex((pair) => !isJudged(pair)));
  at("welcome").hidden = true;
  show();
}

function show() {
  const done = place >= order.length;
  at("vote").hidden = done;
  at("done").hidden = !done;
  if (done) {
    const judged = order.filter(isJudged).length;
    at("summary").textContent = `You judged ${judged} of ${order.length} pairs.`;
    at("back").textContent = judged < order.length ? "To the first open pair" : "Back to the last pair";
    return;
  }
  const pair = order[place];
  at("prompt").textContent = pair.prompt;
  at("prompt").classList.add("open");
  ["left", "right"].forEach((side, i) => at(side).replaceChildren(playerOf(pair.videos[i], side)));
  asked = Math.max(0, criteria.findIndex((criterion) => !votes[keyOf(pair, criterion)]));
  paint();
  again();
}

function playerOf(name, side) {
  const video = document.createElement("video");
  Object.assign(video, { muted: true, loop: true, playsInline: true, preload: "auto", src: `videos/${name}.mp4` });
  if (sizes[name]) Object.assign(video, { poster: `videos/${name}.jpg`, width: sizes[name][0], height: sizes[name][1] });
  video.setAttribute("aria-label", `${side} video`);
  video.addEventListener("error", () => {
    const box = document.createElement("div");
    box.className = "no-video";
    box.textContent = "This video cannot be played. Go on to the next pair.";
    video.replaceWith(box);
  });
  return video;
}

function again() { playTogether(document.querySelectorAll(".pair video")); }

const choiceOf = (pair, side) => ({ left: pair.videos[0], right: pair.videos[1], tie: "tie" })[side];

function paint() {
  const pair = order[place];
  questions.forEach((question, i) => {
    const vote = votes[keyOf(pair, criteria[i])];
    question.classList.toggle("asked", i === asked);
    for (const button of question.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(Boolean(vote) && vote.choice === choiceOf(pair, button.dataset.side)));
    }
  });
  at("progress").value = order.filter(isJudged).length;
  at("count").textContent = `Pair ${place + 1} of ${order.length}`;
  at("previous").disabled = place === 0;
}

function answer(number, side) {
  const pair = order[place];
  recall();
  const count = 1 + Math.max(0, ...Object.values(votes).map((vote) => vote.count));
  votes[keyOf(pair, criteria[number])] = { study, rater, pair: pair.pair, criterion: criteria[number], choice: choiceOf(pair, side), count };
  remember();
  asked = Math.min(number + 1, criteria.length - 1);
  paint();
  at("announce").textContent = `${questions[number].getAttribute("aria-label")}: ${side === "tie" ? "no difference" : side}`;
}

// A button used with the mouse would take the keys meant for the next pair.
function leaveButton() { if (at("vote").contains(document.activeElement)) document.activeElement.blur(); }
at("vote").addEventListener("click", (event) => { if (event.detail) leaveButton(); });

function move(by) { if (at("questions").contains(document.activeElement)) leaveButton(); place = Math.max(0, Math.min(order.length, place + by)); show(); }

function save() {
  recall();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ votes: Object.values(votes) }, null, 1)], { type: "application/json" }));
  link.download = `votes-${rater.replace(/[^\p{L}\p{N}_-]+/gu, "-")}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

at("start").addEventListener("submit", (event) => { event.preventDefault(); const name = at("rater").value.trim(); if (name) begin(name); });
questions.forEach((question, i) => question.addEventListener("click", (event) => { const side = event.target.dataset.side; if (side) answer(i, side); }));
at("previous").addEventListener("click", () => move(-1));
at("back").addEventListener("click", () => {
  const open = order.findIndex((pair) => !isJudged(pair));
  place = open < 0 ? order.length - 1 : open;
  show();
});
at("next").addEventListener("click", () => move(1));
at("again").addEventListener("click", again);
at("save").addEventListener("click", save);
at("save-done").addEventListener("click", save);
at("save-unkept").addEventListener("click", save);
document.addEventListener("keydown", (event) => {
  if (at("vote").hidden || event.ctrlKey || event.metaKey || event.altKey) return;
  const onButton = event.target.closest("button");
  const action = {
    ArrowLeft: () => answer(asked, "left"),
    ArrowRight: () => answer(asked, "right"),
    ArrowDown: () => answer(asked, "tie"),
    ArrowUp: () => { asked = Math.max(0, asked - 1); paint(); },
    Backspace: () => move(-1),
    Enter: onButton ? null : () => move(1),
    " ": onButton ? null : again,
  }[event.key];
  if (!action) return;
  event.preventDefault();
  if (!event.repeat) action();
});
