// What every part of the page needs to speak to the server: its API key, its errors, its streams.

const kKey = "treadle-api-key";  // in this tab's session storage

export const element = (id) => document.getElementById(id);

/** What the server refused, in its own words. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function errorOf(response) {
  try {
    return new ServerError(response.status, (await response.json()).error.message);
  } catch {
    return new ServerError(response.status, `the server answered ${response.status} ${response.statusText}`);
  }
}

export const apiKey = () => sessionStorage.getItem(kKey);

let asking = null;  // several requests may miss the key at once

/** Asks the user for a key; true if there is a new one. */
function askForKey(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = element("key");
    element("key-reason").textContent = `The server says: ${reason}.`;
    element("key-value").value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      if (dialog.returnValue === "use") {
        sessionStorage.setItem(kKey, element("key-value").value.trim());
        document.dispatchEvent(new Event("newkey"));
      }
      element("prompt").blur();  // Chromium 156 gives the focus back, and what is typed then goes nowhere
      element("prompt").focus();
      resolve(dialog.returnValue === "use");
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** What came of `asked`; ServerError where a browser says only that it had no connection. */
async function reached(asked, message) {
  try {
    return await asked;
  } catch (error) {
    throw error instanceof TypeError ? new ServerError(0, message) : error;
  }
}

/**
 * GET, or POST of `body` as JSON. Gives a response that is ok; throws ServerError else, and AbortError.
 * Asks for an API key if the server does.
 */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const key = apiKey();
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (body) headers["Content-Type"] = "application/json";
    const response = await reached(fetch(path, {
      method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body), cache: "no-store",
    }), "the server does not answer");
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    if (key === apiKey() && !(await askForKey(error.message))) throw error;
  }
}

/** The lines of a response, as they come. */
export async function* linesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reached(reader.read(), "the connection to the server broke");
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
}

/** The JSON events of a stream of /v1; throws ServerError for one that is an error. */
export async function* eventsOf(response) {
  for await (const line of linesOf(response)) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const event = JSON.parse(line.slice(6));
    if (event.error) throw new ServerError(200, event.error.message);
    yield event;
  }
}

/** What /v1/models says of the one model; `again`: now, not earlier. */
let model = null;
export function servedModel(again) {
  if (again) model = null;
  model ??= request("v1/models").then(async (response) => (await response.json()).data[0]);
  model.catch(() => { model = null; });
  return model;
}
