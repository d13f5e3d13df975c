// Follows /timeline while the page can be seen: the canvas, the gauges beside it, and what is told
// of the cell under the pointer.

import "./demo.js";
import { element, linesOf, request } from "./server.js";
import { kColumns, kRows, Phase, Timeline } from "./timeline.js";
import { TimelineView } from "./timeline_view.js";

const kFirstPause = 500, kLongestPause = 8000;  // milliseconds between two attempts
const kGaugesEvery = 250;

const canvas = element("canvas");
const timeline = new Timeline();
const view = new TimelineView(canvas, timeline);
let feed = "connecting";  // "live" while records come; else why none do
let cursor = null;  // {x, y} of the pointer, or {column, row} of the keyboard
let frame = 0, gaugesAt = 0;

// -- what is shown --------------------------------------------------------------------------------

function show(id, text) {
  const shown = element(id);
  if (shown.textContent !== text) shown.textContent = text;
}

function setMeter(id, value, most) {
  const meter = element(id);
  meter.hidden = !(most > 0);
  meter.max = most;
  meter.value = value;
}

const whole = (number) => Math.round(number).toLocaleString("en");

const gauges = ["running", "waiting", "cache", "decode-rate", "prompt-rate", "iteration-rate"];

function showGauges() {
  if (feed !== "live" || timeline.limits.running_limit === 0) {  // nobody says what is
    for (const id of gauges) show(id, "–");
    for (const meter of document.querySelectorAll("meter")) meter.hidden = true;
    return;
  }
  const { now, limits } = timeline, rates = timeline.rates();
  show("running", `${now.running} of ${limits.running_limit}`);
  setMeter("running-meter", now.running, limits.running_limit);
  show("waiting", `${now.waiting}`);
  setMeter("waiting-meter", now.waiting, limits.queue_limit);
  show("cache", now.pages > 0 ? `${Math.round((100 * now.usedPages) / now.pages)} %` : "–");
  setMeter("cache-meter", now.usedPages / Math.max(now.pages, 1), 1);
  show("decode-rate", whole(rates.decode));
  show("prompt-rate", whole(rates.prompt));
  show("iteration-rate", whole(rates.iterations));
}

const doing = {
  [Phase.waiting]: () => "waiting",
  [Phase.prompt]: (tokens, of) => `prompt, ${tokens}${of ? ` of its ${of}` : ""} tokens`,
  [Phase.decode]: (tokens) => `decode, ${tokens} token${tokens === 1 ? "" : "s"}`,
  [Phase.held]: () => "running, not in this iteration",
};

function describe({ column, row }) {
  if (column < 0 || column >= timeline.count || column < timeline.count - kColumns) return "";
  const at = column % kColumns, cell = at * kRows + row;
  const tokens = timeline.promptTokens[at] + timeline.decodeTokens[at];
  let text = `Iteration ${timeline.iteration[at]}: ${timeline.milliseconds[at].toFixed(1)} ms, ${tokens} tokens ` +
    `(${timeline.promptTokens[at]} of prompts), ${timeline.running[at]} running, ${timeline.waiting[at]} waiting`;
  if (timeline.lost[at] > 0) text += `; ${timeline.lost[at]} iterations before it were missed`;
  const phase = row >= 0 && row < kRows ? timeline.phase[cell] : Phase.none;
  if ((phase & Phase.mask) === Phase.none) return text;
  const number = timeline.request[cell], whose = timeline.own.has(number) ? " (yours)" : "";
  const what = doing[phase & Phase.mask](timeline.tokens[cell], timeline.promptTokensOf(number));
  text += `. Request ${number}${whose}: ${what}`;
  const end = timeline.endOf(number);
  if (!end) return text;
  const cached = end.cached_tokens > 0 ? ` (${end.cached_tokens} from the prefix cache)` : "";
  return `${text}. In all ${end.prompt_tokens}${cached} + ${end.output_tokens} tokens, ${end.queued.toFixed(2)} s queued, ` +
    `first token after ${end.first_token.toFixed(2)} s, over after ${end.total.toFixed(2)} s (${end.reason})`;
}

const marker = document.createElement("div");
marker.className = "marker";
marker.hidden = true;
canvas.parentElement.append(marker);

const kKeys = element("probe").textContent;

function showCursor() {
  const cell = cursor && ("column" in cursor ? cursor : view.cellAt(cursor.x, cursor.y));
  const text = cell ? describe(cell) : "";
  marker.hidden = text === "";
  show("probe", text || kKeys);
  if (text === "") return;
  const { x, y, width, height } = view.placeOf(cell);
  marker.style.transform = `translate(${x}px, ${y}px)`;
  marker.style.width = `${Math.max(width, 2)}px`;
  marker.style.height = `${height}px`;
}

function paint(time) {
  frame = 0;
  element("idle").hidden = timeline.count > 0;
  view.draw();
  if (cursor) showCursor();
  if (time - gaugesAt < kGaugesEvery) return;
  gaugesAt = time;
  showGauges();
}

function repaint() {
  frame ||= requestAnimationFrame(paint);
}

// -- what the user does ---------------------------------------------------------------------------

function hideCursor() {
  cursor = null;
  showCursor();
}

function showState() {
  show("state", view.paused && feed === "live" ? "paused: requests go on" : feed);
  showGauges();
}

function setFeed(state) {
  const back = state === "live" && feed !== "connecting" && feed !== state;
  feed = state;
  showState();
  if (back) document.dispatchEvent(new Event("back"));
}

/** Marks a request as this page's own. */
export function markOwn(number) {
  timeline.addOwn(number);
  reset();
}

function pause(on) {
  if (!on) hideCursor();
  view.paused = on;
  element("pause").setAttribute("aria-pressed", on);
  show("pause", on ? "Resume" : "Pause");
  showState();
  repaint();
}

function widen(by) {
  view.widen(by);
  repaint();
}

element("pause").addEventListener("click", () => pause(!view.paused));
element("narrower").addEventListener("click", () => widen(-1));
element("wider").addEventListener("click", () => widen(1));

canvas.addEventListener("pointermove", (event) => {
  cursor = { x: event.offsetX, y: event.offsetY };
  repaint();
});
canvas.addEventListener("pointerleave", hideCursor);

const kMoves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const move = kMoves[event.key];
  if (move) {
    pause(true);
    const from = cursor && "column" in cursor ? cursor : { column: view.last, row: 0 };
    const oldest = Math.max(0, timeline.count - kColumns, view.last - view.columns);
    cursor = {
      column: Math.min(Math.max(from.column + move[0], oldest), view.last - 1),
      row: Math.min(Math.max(from.row + move[1], 0), kRows - 1),
    };
    showCursor();
  } else if (event.key === " ") {
    pause(!view.paused);
  } else if (event.key === "+" || event.key === "-") {
    widen(event.key === "+" ? 1 : -1);
  } else {
    return;
  }
  event.preventDefault();
  repaint();
});

function reset() {
  view.reset();
  repaint();
}
new ResizeObserver(reset).observe(canvas);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", reset);

// -- the feed -------------------------------------------------------------------------------------

/** Until the stream ends, fails, or the page is hidden. */
async function follow(signal) {
  const response = await request("timeline", { signal });
  setFeed("live");
  for await (const line of linesOf(response)) {
    timeline.add(JSON.parse(line));
    repaint();
  }
}

const event = (name) => new Promise((resolve) => document.addEventListener(name, resolve, { once: true }));

async function watch() {
  for (let pauseFor = kFirstPause; ;) {
    if (document.hidden) {  // a browser has few connections to one server, in all tabs together
      await event("visibilitychange");
      continue;
    }
    const hidden = new AbortController();
    const onChange = () => document.hidden && hidden.abort();
    document.addEventListener("visibilitychange", onChange);
    const began = performance.now();
    let trouble = null;
    try {
      await follow(hidden.signal);
      trouble = "the server closed the feed";
    } catch (error) {
      if (error.name !== "AbortError") trouble = error.message;
      if (error.status === 401) {  // the user was asked, and had no key
        setFeed("no API key: the next message asks for one");
        await event("newkey");
        continue;
      }
    } finally {
      document.removeEventListener("visibilitychange", onChange);
    }
    if (performance.now() - began > kLongestPause) pauseFor = kFirstPause;
    if (trouble) setFeed(`${trouble}; next try in ${pauseFor / 1000} s`);
    if (!hidden.signal.aborted) await new Promise((resolve) => setTimeout(resolve, pauseFor));
    pauseFor = Math.min(2 * pauseFor, kLongestPause);
  }
}

watch();
