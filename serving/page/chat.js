// The conversation: what was said, what is asked next, and the answer that is coming.

import { AnswerView, userMessage } from "./message.js";
import { milliseconds } from "./pieces.js";
import { streamChat } from "./stream.js";

const ENDS = {
  length: "stopped at the token limit",
  tool_calls: "calls a tool",
  content_filter: "filtered",
  abort: "ended by the server",
};

export class Chat {
  constructor({ log, scroll, changed, settings }) {
    this.log = log;
    this.scroll = scroll;
    this.changed = changed; // called whenever `busy` or the conversation changes
    this.settings = settings; // gives {fields, system, key}; throws in words
    this.clear();
  }

  get busy() {
    return Boolean(this.abort);
  }

  get empty() {
    return this.messages.length === 0;
  }

  // The tool call that waits for its result: the next message is that result.
  get openCall() {
    const answered = new Set(this.messages.map((message) => message.tool_call_id));
    const calls = this.messages.flatMap((message) => message.tool_calls ?? []);
    return calls.find((call) => !answered.has(call.id));
  }

  clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren();
    this.changed();
  }

  // The answer ends a moment later, by itself.
  stop() {
    this.abort?.abort();
  }

  async say(text) {
    // What got no answer is on the page, but no model expects two questions in a row.
    while (this.messages.at(-1)?.role === "user") this.messages.pop();
    const call = this.openCall;
    const message = call
      ? { role: "tool", tool_call_id: call.id, content: text }
      : { role: "user", content: text };
    this.messages.push(message);
    const label = call ? `Result of ${call.function.name}` : "You";
    this.log.append(userMessage(text, label));
    this.toEnd(true);
    if (this.openCall) this.changed(); // one more result is wanted first
    else await this.answer();
  }

  async answer() {
    const abort = new AbortController();
    const asked = [...this.messages];
    const view = new AnswerView(() => this.again(asked, view));
    this.abort = abort;
    this.log.append(view.item);
    this.toEnd(true);
    this.changed();
    const answer = new Answer(view, () => this.toEnd());
    try {
      const { fields, system, key } = this.settings();
      const opening = system ? [{ role: "system", content: system }] : [];
      const body = { ...fields, messages: [...opening, ...asked] };
      await answer.read(streamChat(body, key, abort.signal));
    } catch (error) {
      if (error.name === "AbortError") answer.end = "stopped";
      else view.fail(error.message);
    }
    view.finish(answer.facts());
    this.abort = null;
    // What a stopped or broken answer had so far is part of the conversation, unless that is over.
    const message = answer.message();
    if (message && view.item.isConnected) this.messages = [...asked, message];
    this.toEnd();
    this.changed();
  }

  again(asked, view) {
    if (this.busy) return;
    this.messages = [...asked];
    while (view.item.nextSibling) view.item.nextSibling.remove();
    view.item.remove();
    this.answer();
  }

  // Follow the text, unless the reader has scrolled up.
  toEnd(always = false) {
    const { scrollHeight, scrollTop, clientHeight } = this.scroll;
    if (always || scrollHeight - scrollTop - clientHeight < 120) this.scroll.scrollTop = scrollHeight;
  }
}

// One answer: its parts, and how fast they came.
class Answer {
  constructor(view, grown) {
    this.view = view;
    this.grown = grown;
    this.began = performance.now();
    this.text = "";
    this.calls = [];
    this.chunks = 0;
    this.end = "";
  }

  async read(chunks) {
    for await (const chunk of chunks) {
      if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
      for (const choice of chunk.choices ?? []) this.take(choice);
    }
  }

  take({ delta, finish_reason: reason }) {
    const thought = delta.reasoning_content ?? delta.reasoning;
    const calls = delta.tool_calls ?? [];
    if (thought) this.view.addReasoning(thought);
    if (delta.content) {
      this.text += delta.content;
      this.view.addText(delta.content);
    }
    for (const call of calls) this.takeCall(call);
    if (thought || delta.content || calls.length) {
      this.last = performance.now();
      this.first ??= this.last;
      this.chunks += 1;
      this.grown();
    }
    if (reason) this.end = ENDS[reason] ?? "";
  }

  takeCall({ index, id, function: { name = "", arguments: text = "" } = {} }) {
    this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    this.calls[index].function.name += name ?? "";
    this.calls[index].function.arguments += text ?? "";
    this.view.addCall(index, name, text);
  }

  message() {
    const calls = this.calls.filter(Boolean);
    if (!this.text && !calls.length) return null;
    const message = { role: "assistant", content: this.text };
    if (calls.length && this.end === ENDS.tool_calls) message.tool_calls = calls;
    return message;
  }

  facts() {
    const found = [];
    const tokens = this.tokens ?? this.chunks;
    if (this.first !== undefined) {
      found.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
      const seconds = (this.last - this.first) / 1e3;
      // Two pieces or fewer, such as a tool call that came whole, say nothing of the speed.
      if (this.chunks > 2 && seconds > 0) found.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
      found.push(`first after ${milliseconds(this.first - this.began)}`);
    }
    if (this.end) found.push(this.end);
    return found;
  }
}
