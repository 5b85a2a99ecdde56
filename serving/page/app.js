// Ties the page together: settings, keys, views, the conversation and the live view.

import { Chat } from "./chat.js";
import { LiveView } from "./live.js";

const $ = (id) => document.getElementById(id);
const form = $("settings");
const prompt = $("prompt");
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const STORE = "ropeway";

function restore() {
  const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
  for (const [name, value] of Object.entries(kept)) {
    if (form.elements[name]) form.elements[name].value = value;
  }
}

function store() {
  const values = Object.fromEntries(new FormData(form));
  sessionStorage.setItem(STORE, JSON.stringify(values));
}

const key = () => form.elements.key.value.trim();

// The settings as a request wants them; throws, in words, what can't be sent.
function settings() {
  const fields = { stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    const input = form.elements[name];
    if (!input.validity.valid) throw new Error(`${input.labels[0].firstChild.data.trim()}: ${input.validationMessage}`);
    if (input.value !== "") fields[name] = Number(input.value);
  }
  const tools = form.elements.tools.value.trim();
  if (tools) fields.tools = parsedTools(tools);
  return { fields, system: form.elements.system.value.trim(), key: key() };
}

function parsedTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("Tools: must be a JSON array of functions.");
  return tools;
}

function changed() {
  $("send").hidden = chat?.busy ?? false;
  $("stop").hidden = !$("send").hidden;
  $("welcome").hidden = !(chat?.empty ?? true);
  $("new-chat").disabled = chat?.empty ?? true;
  const call = chat?.openCall;
  prompt.placeholder = call ? `Result of ${call.function.name}` : "Message";
}

let chat = null;
chat = new Chat({ log: $("log"), scroll: $("scroll"), changed, settings });
restore();

const live = new LiveView({
  tiles: $("tiles"),
  notice: $("live-notice"),
  status: $("status"),
  modelName: $("model-name"),
  stateText: $("state-text"),
  key,
});

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function send(text) {
  if (chat.busy || !text.trim()) return;
  prompt.value = "";
  fit();
  chat.say(text.trim());
}

form.addEventListener("input", store);
form.addEventListener("submit", (event) => event.preventDefault());
form.elements.key.addEventListener("change", () => live.refresh());

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(prompt.value);
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(prompt.value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.busy) chat.stop();
});
$("stop").addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});
$("new-chat").addEventListener("click", () => {
  chat.clear();
  show("chat");
  prompt.focus();
});
for (const idea of document.querySelectorAll(".idea")) {
  idea.addEventListener("click", () => send(idea.textContent));
}

// On a narrow screen one view is shown at a time.
function show(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("[data-show]")) {
    button.setAttribute("aria-pressed", String(button.dataset.show === view));
  }
}
for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => show(button.dataset.show));
}
prompt.focus();
