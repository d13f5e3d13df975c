// The conversation: sends it with every question, shows the answer as it streams, and how fast.

import { copyText, Markdown } from "./markdown.js";
import { apiKey, element, eventsOf, request, servedModel } from "./server.js";
import { markOwn } from "./watch.js";

let turns = [];  // {role, content}, as the next request repeats them
let running = null;  // AbortController of the answer that streams

// -- what is asked --------------------------------------------------------------------------------

/** Path and body of the request for `turns`. */
function question(model) {
  const body = { model: model.id };
  const system = element("system").value.trim();
  if (model.has_chat_template) {
    body.messages = system ? [{ role: "system", content: system }, ...turns] : [...turns];
  } else {
    body.prompt = system + turns.map((turn) => turn.content).join("");
  }
  for (const input of document.querySelectorAll("[data-field]")) {
    if (input.value !== "") body[input.dataset.field] = Number(input.value);
  }
  return {
    path: model.has_chat_template ? "v1/chat/completions" : "v1/completions",
    body: { ...body, stream: true, stream_options: { include_usage: true } },
  };
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curlOf({ path, body }) {
  const key = apiKey() ? ` \\\n  -H "Authorization: Bearer $TREADLE_API_KEY"` : "";
  return `curl -N ${quoted(new URL(path, document.baseURI).href)}${key} \\\n` +
    `  -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify(body))}`;
}

function showCurl(asked) {
  element("curl-text").textContent = curlOf(asked);
  element("curl-copied").textContent = "";
  element("curl").showModal();
}

element("curl-copy").addEventListener("click", async () => {
  const shown = element("curl-text");
  element("curl-copied").textContent = `${await copyText(shown.textContent, shown)}.`;
});

// -- what is shown --------------------------------------------------------------------------------

const messages = element("messages");

function add(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function addMessage(role) {
  element("hint").hidden = true;
  const message = add("article", `message ${role}`, "");
  message.append(add("h3", "who", role === "user" ? "You" : "Model"));
  const text = add("div", "text", "");
  message.append(text);
  messages.append(message);
  messages.scrollTop = messages.scrollHeight;
  return { message, text };
}

function fail(message, error) {
  const shown = add("p", "error", error.message);
  shown.setAttribute("role", "alert");
  message.append(shown);
}

/** One line of numbers about an answer, with the button for its request. */
function addNumbers(message, asked, { began, number, first, last, pieces, usage, finish }) {
  const numbers = [];
  if (number) numbers.push(`request ${number}`);
  if (usage) numbers.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  if (first) {
    numbers.push(`first after ${Math.round(first - began)} ms`);
    const tokens = usage ? usage.completion_tokens : pieces;
    const rate = (tokens - 1) / ((last - first) / 1000);
    if (tokens > 1 && last > first) numbers.push(`${usage ? "" : "about "}${rate.toFixed(1)} tokens/s`);
  }
  numbers.push({ stop: "complete", length: "max tokens" }[finish] ?? finish ?? "stopped");
  const line = add("p", "numbers", "");
  line.append(add("span", "", numbers.join(" · ")));
  const curl = add("button", "", "curl");
  curl.type = "button";
  curl.setAttribute("aria-label", "Show this request as curl");
  curl.addEventListener("click", () => showCurl(asked));
  line.append(curl);
  message.append(line);
  element("said").textContent = `Answer ${numbers.at(-1)}.`;
}

function setRunning(controller) {
  running = controller;
  const stop = element("stop"), send = element("send");
  const focused = document.activeElement === stop || document.activeElement === send;
  stop.hidden = !controller;
  send.hidden = Boolean(controller);
  if (focused) (controller ? stop : send).focus();
}

// -- an answer ------------------------------------------------------------------------------------

/** An answer on its way: its reasoning, folded, and what it says, as Markdown unless it continues a text. */
class Shown {
  said = "";
  thought = "";

  #text;
  #markdown;  // null: plain text
  #fold = null;  // the element of what was thought
  #due = 0;

  constructor(text, isChat) {
    this.#text = text;
    this.#markdown = isChat ? new Markdown(text) : null;
  }

  add(said, thought) {
    this.said += said ?? "";
    this.thought += thought ?? "";
    this.#due ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.#due);
    this.#due = 0;
    const atEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 40;
    if (this.thought) this.#drawThought();
    if (this.#markdown) this.#markdown.show(this.said);
    else this.#text.textContent = this.said;
    if (atEnd) messages.scrollTop = messages.scrollHeight;
  }

  #drawThought() {
    if (!this.#fold) {
      this.#fold = add("details", "thought", "");
      this.#fold.append(add("summary", "", ""), add("div", "", ""));
      this.#text.before(this.#fold);
    }
    this.#fold.firstChild.textContent = this.said ? "Reasoning" : "Reasoning …";
    this.#fold.lastChild.textContent = this.thought;
  }
}

async function answer() {
  const own = turns;  // "New chat" begins others
  const { message, text } = addMessage("assistant");
  message.setAttribute("aria-busy", "true");  // to be read when it is whole
  const controller = new AbortController();
  setRunning(controller);
  const numbers = { began: performance.now(), pieces: 0 };
  let asked = null, shown = null;
  try {
    const model = await servedModel();
    shown = new Shown(text, model.has_chat_template);
    asked = question(model);
    const response = await request(asked.path, { body: asked.body, signal: controller.signal });
    numbers.number = Number(response.headers.get("X-Request-Number"));
    if (numbers.number) markOwn(numbers.number);
    for await (const event of eventsOf(response)) {
      if (event.usage) numbers.usage = event.usage;
      const choice = event.choices[0];
      if (!choice) continue;
      numbers.finish = choice.finish_reason ?? numbers.finish;
      const piece = choice.delta ? choice.delta.content : choice.text, thought = choice.delta?.reasoning_content;
      if (!piece && !thought) continue;
      numbers.last = performance.now();
      numbers.first ??= numbers.last;
      ++numbers.pieces;
      shown.add(piece, thought);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      numbers.finish = "failed";
      fail(message, error);
    }
  }
  shown?.draw();
  message.removeAttribute("aria-busy");
  if (shown?.said) {
    own.push({ role: "assistant", content: shown.said });
  } else {  // the question can be sent again
    const { content } = own.pop();
    if (own === turns) element("prompt").value ||= content;
  }
  if (asked) addNumbers(message, asked, numbers);
  messages.scrollTop = messages.scrollHeight;
  if (running === controller) setRunning(null);
}

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = element("prompt");
  if (running || prompt.value.trim() === "") return;
  turns.push({ role: "user", content: prompt.value });
  addMessage("user").text.textContent = prompt.value;
  prompt.value = "";
  answer();
});

// The browser points at a number that it does not take, if it can be seen.
element("ask").addEventListener("invalid", () => { element("parameters").open = true; }, true);

element("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("ask").requestSubmit();
});

for (const example of document.querySelectorAll("#hint button")) {
  example.addEventListener("click", () => {
    element("prompt").value = example.textContent;
    element("ask").requestSubmit();
  });
}

element("stop").addEventListener("click", () => running?.abort());
element("chat").addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

element("clear").addEventListener("click", () => {
  running?.abort();
  turns = [];
  for (const message of messages.querySelectorAll(".message")) message.remove();
  element("hint").hidden = false;
  element("prompt").focus();
});

/** What the model's authors recommend stands in the place of what nobody has entered. */
function showDefaults(defaults) {
  for (const input of document.querySelectorAll("[data-field]")) {
    const recommended = defaults[input.dataset.field];
    if (recommended !== undefined) input.placeholder = String(recommended);
    if (input.value === input.defaultValue) input.value = "";
  }
}

async function showModel(again) {
  try {
    const model = await servedModel(again);
    element("model").textContent = model.id;
    if (model.sampling_defaults) showDefaults(model.sampling_defaults);
    document.title = `Treadle: ${model.id}`;
    if (!model.has_chat_template) {
      element("hint").replaceChildren("This model has no chat template: it continues the text that you give.");
    }
  } catch (error) {
    element("model").textContent = error.message;
  }
}

showModel();
// A server that was away may have come back with another model; and one that asks for a key says nothing before.
for (const name of ["back", "newkey"]) document.addEventListener(name, () => showModel(true));
