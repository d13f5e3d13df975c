// Something to see in the timeline when nobody else is there: requests that come one after another
// and end one after another, and one with a long prompt.

import { element, request, servedModel } from "./server.js";

const beginnings = ["Once upon a time", "The weather today", "A loom is", "My favourite book", "In the year 1850",
  "To bake bread", "The river", "Far away"];
let controller = null, underWay = 0;

function show() {
  const busy = underWay > 0;
  if (!busy && document.activeElement === element("demo-stop")) element("demo-short").focus();
  element("demo-stop").hidden = !busy;
}

async function send(fields) {
  controller ??= new AbortController();
  ++underWay;
  show();
  try {
    const model = await servedModel();
    const body = { model: model.id, ignore_eos: true, ...fields(model) };
    await (await request("v1/completions", { body, signal: controller.signal })).text();
    element("demo-state").textContent = "";
  } catch (error) {
    if (error.name !== "AbortError") element("demo-state").textContent = error.message;
  }
  if (--underWay === 0) controller = null;
  show();
}

// Two prompts in a call: a browser has few connections.
element("demo-short").addEventListener("click", async () => {
  for (let i = 0; i < beginnings.length; i += 2) {
    send(() => ({ prompt: beginnings.slice(i, i + 2), max_tokens: 48 + 24 * (i % 3) }));
    await new Promise((resolve) => setTimeout(resolve, 400));
  }
});

// About four tokens for each repetition; half of the context.
element("demo-long").addEventListener("click", () => send((model) => ({
  prompt: "and so on, ".repeat(Math.min(2000, model.max_model_len / 2) / 4), max_tokens: 16,
})));

element("demo-stop").addEventListener("click", () => controller?.abort());
