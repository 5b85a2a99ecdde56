// One message of the conversation on the page.

import { element, milliseconds } from "./pieces.js";

export function userMessage(text, label = "You") {
  const item = element("article", "message user");
  item.append(element("span", "hidden", `${label}: `), element("p", "text", text));
  return item;
}

// An answer that grows. `again` is called when the reader wants another one.
export class AnswerView {
  constructor(again) {
    this.item = element("article", "message answer");
    this.item.setAttribute("aria-busy", "true");
    this.item.append(element("span", "hidden", "Answer: "));
    this.waiting = element("p", "waiting");
    this.waiting.append(element("span", "pulse"), element("span", "hidden", "waiting"));
    this.item.append(this.waiting);
    this.calls = new Map();
    this.again = again;
  }

  addReasoning(text) {
    if (!this.reasoning) {
      this.thinkingSince = performance.now();
      this.reasoning = element("details", "reasoning");
      this.reasoningTitle = element("summary", "", "Thinking");
      this.reasoningText = element("p", "text");
      this.reasoning.append(this.reasoningTitle, this.reasoningText);
      this.insert(this.reasoning);
    }
    append(this.reasoningText, text);
  }

  endReasoning() {
    if (this.thinkingSince === undefined) return;
    this.reasoningTitle.textContent = `Thought for ${milliseconds(performance.now() - this.thinkingSince)}`;
    this.thinkingSince = undefined;
  }

  addText(text) {
    if (!this.content) {
      this.endReasoning();
      this.content = element("p", "text");
      this.insert(this.content);
    }
    append(this.content, text);
  }

  // A piece of a tool call, as chunks bring them: the name comes first, then its arguments.
  addCall(index, name, text) {
    if (!this.calls.has(index)) {
      const block = element("figure", "call");
      const title = element("figcaption", "call-name");
      const code = element("pre", "call-arguments");
      block.append(title, code);
      this.insert(block);
      this.calls.set(index, { title, code });
    }
    const call = this.calls.get(index);
    if (name) append(call.title, name);
    if (text) append(call.code, text);
  }

  insert(node) {
    this.waiting.remove();
    this.item.append(node);
  }

  fail(message) {
    this.error = element("p", "error", message);
    this.error.setAttribute("role", "alert");
    this.insert(this.error);
  }

  // The last line: what it took, and a button for another answer.
  finish(facts) {
    this.item.removeAttribute("aria-busy");
    this.endReasoning();
    for (const { code } of this.calls.values()) code.textContent = indented(code.textContent);
    const foot = element("p", "foot");
    for (const fact of facts) foot.append(element("span", "fact", fact));
    const button = element("button", "link", "Try again");
    button.type = "button";
    button.addEventListener("click", this.again);
    foot.append(button);
    this.insert(foot);
  }
}

function append(node, text) {
  if (node.lastChild) node.lastChild.appendData(text);
  else node.append(document.createTextNode(text));
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // what the model wrote isn't JSON, or not yet
  }
}
