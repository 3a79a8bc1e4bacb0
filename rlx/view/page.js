"use strict";
// All text of samples is written with textContent, never as HTML.
const ROW = 52; // px, as in page.css
const byId = (id) => document.getElementById(id);
const chosen = { sample: -1, colour: "advantage" };
const cache = new Map(); // block -> its rows
let index, all, shown = [], current = null;

async function unpack(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (c) => c.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(plain).text());
}

function make(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function shape(kind, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

const swatch = (background) => { const made = make("span", "swatch"); made.style.backgroundColor = background; return made; };

// Characters that would not be seen or would turn the text around, and halves of characters, are written as their numbers.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const visible = (text) => String(text).replace(HIDDEN, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
const number = (value) => (value === null || value === undefined ? "–" : String(value));
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const fork = (i) => (all.branch[i] ? `, fork ${all.branch[i]}` : "");
const total = (of, rows = shown) => rows.reduce((sum, i) => sum + (Number(all[of][i]) || 0), 0);

// The list ---------------------------------------------------------------------------------------------------------

function select() {
  const step = byId("step").value, words = byId("find").value.toLowerCase(), sort = byId("sort").value;
  shown = [];
  for (let i = 0; i < all.step.length; i++) {
    if (step !== "" && all.step[i] !== Number(step)) continue;
    if (words && !`${all.title[i]} ${all.reason[i]} ${all.source[i]}`.toLowerCase().includes(words)) continue;
    shown.push(i);
  }
  if (sort !== "order") {
    const by = sort.replace("-", ""), sign = sort.startsWith("-") ? 1 : -1;
    shown.sort((a, b) => sign * ((Number(all[by][a]) || 0) - (Number(all[by][b]) || 0)) || a - b);
  }
  // The rows of a conversation that forked are one sample with one reward.
  const ones = [...new Map(shown.map((i) => [`${all.step[i]} ${all.group[i]} ${all.sample[i]}`, i])).values()];
  const tokens = total("tokens"), count = Math.max(1, ones.length);
  byId("summary").textContent = `${plural(ones.length, "sample")}: reward ${(total("reward", ones) / count).toPrecision(3)}, ` +
    `${(total("turns") / count).toPrecision(2)} turns, ${plural(total("calls"), "call")} (${total("failed").toLocaleString("en")} failed), ` +
    `${((100 * total("trained")) / Math.max(1, tokens)).toFixed(0)} % of ${plural(tokens, "token")} in the loss`;
  byId("rows").style.height = `${shown.length * ROW}px`;
  byId("list").scrollTop = 0;
  draw();
}

// Only the rows in sight exist.
function draw() {
  const list = byId("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
  const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ROW) + 10);
  byId("rows").replaceChildren(...shown.slice(first, last).map((i, k) => {
    const row = make("button", i === chosen.sample ? "row chosen" : "row");
    const failed = all.failed[i] ? `, ${all.failed[i]} failed` : "";
    const calls = all.calls[i] ? ` · ${plural(all.calls[i], "call")}${failed}` : "";
    row.append(make("span", "", `reward ${number(all.reward[i])} · step ${all.step[i]} · group ${all.group[i]}.${all.sample[i]}${fork(i)} · ` +
      `${plural(all.turns[i], "turn")}${calls}`));
    row.append(make("span", "title", visible(`${all.reason[i] ? `[${all.reason[i]}] ` : ""}${all.title[i]}`)));
    row.style.top = `${(first + k) * ROW}px`;
    row.dataset.sample = i;
    return row;
  }));
}

function move(by) {
  const at = shown.indexOf(chosen.sample) + by;
  if (at < 0 || at >= shown.length) return;
  reveal(shown[at]);
  open(shown[at]);
}

function reveal(i) {
  const list = byId("list"), top = shown.indexOf(i) * ROW;
  if (top < list.scrollTop || top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top - list.clientHeight / 2;
}

// The sample -------------------------------------------------------------------------------------------------------

async function open(i) {
  chosen.sample = i;
  remember();
  draw();
  const block = all.block[i];
  if (block >= 0 && !cache.has(block)) {
    const rows = await unpack(`block${block}`);
    if (cache.size > 8) cache.clear();
    cache.set(block, rows);
  }
  if (chosen.sample !== i) return; // another was chosen meanwhile
  const article = byId("sample");
  article.replaceChildren(make("h2", "", `Step ${all.step[i]}, group ${all.group[i]}, sample ${all.sample[i]}${fork(i)}`));
  article.append(make("p", "", visible(`reward ${number(all.reward[i])} · ${all.source[i]} · ${plural(all.tokens[i], "token")}, ` +
    `${all.trained[i].toLocaleString("en")} in the loss${all.reason[i] ? ` · ended: ${all.reason[i]}` : ""}`)));
  current = block < 0 ? null : cache.get(block)[all.at[i]];
  if (current && current.numbers) article.append(make("p", "", visible(current.numbers)));
  if (current && current.traceback) article.append(make("p", "tokens", visible(current.traceback)));
  if (current) article.append(...segments(current).map(card));
  else article.append(make("p", "failed", `Its tokens are not in this page, which would be too large; they are in transcripts/${all.file[i]}.`));
  paint();
}

// Turns, and tokens between them: the prompt, and what a template writes.
function segments(sample) {
  const found = [], end = sample.tokens.length;
  let at = 0;
  for (const turn of [...sample.turns].sort((a, b) => a.start - b.start)) {
    if (turn.start > at) found.push({ role: at ? "template" : "prompt", start: at, end: turn.start, calls: [] });
    found.push(turn);
    at = Math.max(at, turn.end);
  }
  if (at < end) found.push({ role: at ? "template" : "prompt", start: at, end, calls: [] });
  return found;
}

function card(turn) {
  const box = make("section", `turn ${turn.role === "assistant" ? "assistant" : "other"}`), head = make("div");
  const facts = [`tokens ${turn.start}–${turn.end - 1}`];
  if (turn.reward !== null && turn.reward !== undefined) facts.push(`reward ${turn.reward}`);
  if (turn.seconds) facts.push(`${turn.seconds} s`);
  if (turn.finish_reason) facts.push(`ended by ${turn.finish_reason}`);
  head.append(make("b", "", visible(turn.role)), ` · ${visible(facts.join(" · "))}`);
  for (const call of turn.calls || []) {
    const name = call && call.name !== undefined ? String(call.name) : JSON.stringify(call), failed = Boolean(call && call.error);
    const seconds = call && Number(call.seconds) ? ` ${Number(call.seconds).toPrecision(2)} s` : "";
    head.append(" · ", make("span", failed ? "failed" : "", visible(`call ${name}${seconds}${failed ? " failed" : ""}`)));
  }
  const tokens = make("p", "tokens");
  for (let k = turn.start; k < Math.min(turn.end, current.tokens.length); k++) {
    const piece = make("span", "", visible(current.tokens[k]).replace(/\n/g, "↵\n") || "∅");
    piece.dataset.token = k;
    tokens.append(piece);
  }
  box.append(head, tokens);
  return box;
}

// Colours ----------------------------------------------------------------------------------------------------------

const signed = (value, scale) => {
  if (value === null || value === 0) return "";
  const size = Math.min(1, Math.abs(Number(value)) / scale);
  return `rgba(var(--${Number(value) > 0 ? "blue" : "orange"}), ${(0.1 + 0.65 * (Number.isNaN(size) ? 1 : size)).toFixed(3)})`;
};
const COLOURS = {
  advantage: (k) => signed(current.advantages[k], index.scale.advantage),
  gap: (k) => signed(current.gaps[k], index.scale.gap),
  mask: (k) => (current.mask[k] ? "rgba(var(--green), 0.35)" : ""),
};

function paint() {
  const colour = COLOURS[chosen.colour], legend = byId("legend");
  if (current) for (const piece of byId("sample").querySelectorAll("[data-token]")) piece.style.backgroundColor = colour(Number(piece.dataset.token));
  if (chosen.colour === "mask") legend.replaceChildren(swatch("rgba(var(--green), 0.35)"), "in the loss");
  else {
    const scale = index.scale[chosen.colour], what = chosen.colour === "gap" ? " nats (trainer − sampler)" : "";
    legend.replaceChildren(swatch(signed(-scale, scale)), `−${scale}`, swatch(signed(scale, scale)), `+${scale}${what}`);
  }
}

function tell(event) {
  const k = event.target.dataset ? event.target.dataset.token : undefined;
  if (k === undefined || !current) return;
  byId("token").textContent = `token ${k}: “${visible(current.tokens[k]).replace(/\n/g, "↵")}” · id ${current.ids[k]} · advantage ` +
    `${number(current.advantages[k])} · log-prob gap ${number(current.gaps[k])} · ${current.mask[k] ? "in the loss" : "not in the loss"}`;
}

// Metrics ----------------------------------------------------------------------------------------------------------

function chart() {
  const name = byId("metric").value, points = [];
  for (const [step, row] of Object.entries(index.metrics)) if (typeof row[name] === "number") points.push([Number(step), row[name]]);
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const low = [Math.min(...xs), Math.min(...ys)], high = [Math.max(...xs), Math.max(...ys)];
  const place = ([x, y]) => [4 + (312 * (x - low[0])) / (high[0] - low[0] || 1), 44 - (40 * (y - low[1])) / (high[1] - low[1] || 1)];
  const svg = byId("chart");
  svg.setAttribute("viewBox", "0 0 320 48");
  svg.replaceChildren(shape("polyline", { points: points.map((p) => place(p).map((v) => v.toFixed(1)).join(",")).join(" ") }));
  const step = byId("step").value, now = points.find((p) => String(p[0]) === step) || points[points.length - 1];
  if (now) {
    const [cx, cy] = place(now);
    svg.append(shape("circle", { cx, cy, r: 3 }));
  }
  byId("metric-now").textContent = now ? `step ${now[0]}: ${now[1]}` : "";
  svg.onclick = (event) => {
    const box = svg.getBoundingClientRect(), x = low[0] + ((event.clientX - box.left) / box.width) * (high[0] - low[0]);
    const options = [...byId("step").options].filter((o) => o.value !== "");
    if (!options.length) return; // timelines alone
    const nearest = options.reduce((a, b) => (Math.abs(b.value - x) < Math.abs(a.value - x) ? b : a));
    byId("step").value = nearest.value;
    changed();
  };
}

// Timeline ---------------------------------------------------------------------------------------------------------

function timeline() {
  const [seconds, rows] = index.timeline[byId("timeline-step").value], axis = make("div", "lane"), ends = make("div");
  const phases = new Map(rows.phases.map(([, , , color, name]) => [name, color]));
  byId("timeline-legend").replaceChildren(...[...phases].flatMap(([name, color]) => [swatch(color), visible(name)]));
  byId("timeline").replaceChildren(...Object.entries(rows).map(([label, bars]) => {
    const row = make("div", "lane"), svg = shape("svg", { viewBox: `0 0 ${seconds || 1} 1`, preserveAspectRatio: "none" });
    row.append(make("span", "", visible(label)), svg);
    for (const [start, end, height, fill, name] of bars) {
      const bar = shape("rect", { x: start, y: 1 - height, width: Math.max(0, end - start), height, fill });
      bar.append(shape("title", {}, visible(`${name}, ${start} to ${end} s`)));
      svg.append(bar);
    }
    return row;
  }), axis);
  ends.append(make("span", "", "0"), make("span", "", `${seconds} s`));
  axis.append(make("span"), ends);
}

// State in the address, so that a view can be kept: #step=3&sample=17&colour=gap -----------------------------------

function remember() {
  location.replace(`#step=${byId("step").value}&sample=${chosen.sample}&colour=${chosen.colour}`);
}

function changed() {
  select();
  chart();
  if (shown.length) open(shown[0]);
  else { current = null; byId("sample").replaceChildren(); }
}

async function start() {
  try {
    index = await unpack("index");
  } catch (error) {
    byId("note").textContent = `This browser cannot unpack the page's data (${error.message}); it needs DecompressionStream, as browsers since 2023 have.`;
    return;
  }
  all = index.samples;
  const asked = new URLSearchParams(location.hash.slice(1)), steps = [...new Set(all.step)];
  byId("step").append(new Option("all", ""), ...steps.map((s) => new Option(s, s)));
  byId("step").value = steps.includes(Number(asked.get("step"))) && asked.get("step") ? asked.get("step") : "";
  const names = [...new Set(Object.values(index.metrics).flatMap(Object.keys))].sort();
  byId("metric").append(...names.map((n) => new Option(n, n)));
  if (names.includes("reward/mean")) byId("metric").value = "reward/mean";
  byId("chart-box").hidden = names.length === 0;
  const titles = Object.keys(index.timeline);
  byId("timeline-box").hidden = titles.length === 0;
  byId("timeline-box").open = all.step.length === 0;
  byId("timeline-step").append(...titles.map((title) => new Option(title)));
  byId("timeline-step").addEventListener("input", timeline);
  if (titles.length) timeline();
  const without = index.left_out ? ` ${plural(index.left_out, "sample")} ${index.left_out === 1 ? "is" : "are"} listed without tokens, because the page would be too large.` : "";
  byId("note").textContent = `${plural(steps.length, "step")}, ${plural(all.step.length, "sample")}.${without}${all.step.length ? "" : " Set trainer.transcripts=True to keep samples."}`;
  if (asked.get("colour") in COLOURS) chosen.colour = asked.get("colour");
  document.querySelector(`[name=colour][value=${chosen.colour}]`).checked = true;
  for (const id of ["step", "sort", "find"]) byId(id).addEventListener("input", changed);
  byId("metric").addEventListener("input", chart);
  byId("list").addEventListener("scroll", () => requestAnimationFrame(draw));
  window.addEventListener("resize", draw);
  byId("rows").addEventListener("click", (event) => { const row = event.target.closest(".row"); if (row) open(Number(row.dataset.sample)); });
  byId("list").addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) { event.preventDefault(); move(by); }
  });
  byId("colour").addEventListener("input", (event) => { chosen.colour = event.target.value; remember(); paint(); });
  byId("sample").addEventListener("mouseover", tell);
  const sample = Number(asked.get("sample")), isThere = asked.get("sample") && sample in all.step;
  if (isThere && byId("step").value !== "") byId("step").value = all.step[sample]; // of an address whose step is another one
  select();
  chart();
  if (isThere) reveal(sample);
  if (all.step.length) await open(isThere ? sample : shown[0]);
  document.body.dataset.ready = "yes";
}

start();
