// The live view: asks /live once a second while the page is seen, and draws the last minute.

import { element, milliseconds } from "./pieces.js";
import { getJson } from "./stream.js";

const PERIOD = 1000; // milliseconds between two questions
const SHOWN = 60; // points of a sparkline
const WINDOW = 10; // seconds over which first tokens and prefix hits are averaged
const WIDTH = 120;
const HEIGHT = 28;

const STATES = {
  starting: "loading",
  ready: "ready",
  draining: "shutting down",
  restarting: "engine down, restarting",
  dead: "engine down",
};

const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => (value < 0.0995 ? (100 * value).toFixed(1) : (100 * value).toFixed(0));

// Each gives a number, or null where there is none. `now` and `before` are snapshots one step apart,
// `past` one from WINDOW seconds ago.
const TILES = [
  { name: "Running", of: ({ now }) => now.engine.running, show: whole, unit: "requests" },
  { name: "Waiting", of: ({ now }) => now.engine.waiting, show: whole, unit: "requests" },
  {
    name: "Output",
    of: ({ now, before }) => rate(now, before, (one) => one.engine.output_tokens),
    show: (value) => (value < 99.95 ? value.toFixed(1) : whole(value)),
    unit: "tokens/s",
  },
  {
    name: "First token",
    of: ({ now, past }) => {
      const count = now.first_tokens - past.first_tokens;
      return count ? (1e3 * (now.first_token_seconds - past.first_token_seconds)) / count : null;
    },
    show: (value) => milliseconds(value).split(" ")[0],
    unit: (value) => milliseconds(value).split(" ")[1],
  },
  {
    name: "KV cache",
    of: ({ now }) => now.engine.blocks_used / Math.max(now.engine.blocks_total, 1),
    show: percent,
    unit: "% used",
    top: 1,
  },
  {
    name: "Prefix hits",
    of: ({ now, past }) => {
      const asked = now.engine.prefix_queries - past.engine.prefix_queries;
      return asked ? (now.engine.prefix_hits - past.engine.prefix_hits) / asked : null;
    },
    show: percent,
    unit: "% of tokens",
    top: 1,
  },
];

function rate(now, before, of) {
  const seconds = now.clock - before.clock;
  return seconds > 0 ? (of(now) - of(before)) / seconds : null;
}

class Tile {
  constructor({ name, of, show, unit, top }) {
    Object.assign(this, { of, show, unit, top });
    this.points = [];
    this.box = element("div", "tile");
    this.value = element("span", "value", "–");
    this.unitText = element("span", "unit", typeof unit === "string" ? unit : "");
    const number = element("dd", "number");
    number.append(this.value, " ", this.unitText);
    this.graph = graph();
    this.box.append(element("dt", "", name), number, this.graph.svg);
    this.box.dataset.name = name;
  }

  add(value) {
    this.points.push(value);
    if (this.points.length > SHOWN) this.points.shift();
    this.value.textContent = value === null ? "–" : this.show(value);
    if (typeof this.unit === "function") this.unitText.textContent = value === null ? "" : this.unit(value);
    this.draw();
  }

  draw() {
    const top = this.top ?? Math.max(1, ...this.points.map((value) => value ?? 0));
    const from = SHOWN - this.points.length;
    const lines = [];
    let line = [];
    this.points.forEach((value, number) => {
      if (value === null) {
        lines.push(line);
        line = [];
      } else {
        const x = ((from + number) * WIDTH) / (SHOWN - 1);
        const y = HEIGHT - 1.5 - (HEIGHT - 3) * Math.min(value / top, 1);
        line.push(`${x.toFixed(1)} ${y.toFixed(1)}`);
      }
    });
    lines.push(line);
    const path = lines.filter((one) => one.length).map((one) => `M${one.join("L")}${one.length === 1 ? "h.1" : ""}`);
    this.graph.line.setAttribute("d", path.join(""));
  }
}

function graph() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("spark");
  const line = document.createElementNS(svg.namespaceURI, "path");
  svg.append(line);
  return { svg, line };
}

export class LiveView {
  constructor({ tiles, notice, status, modelName, stateText, key }) {
    Object.assign(this, { notice, status, modelName, stateText, key });
    this.tiles = TILES.map((tile) => new Tile(tile));
    tiles.append(...this.tiles.map((tile) => tile.box));
    this.history = [];
    document.addEventListener("visibilitychange", () => (document.hidden ? this.pause() : this.resume()));
    if (!document.hidden) this.resume();
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.stopped = true;
  }

  resume() {
    this.stopped = false;
    this.history = []; // rates over the time unseen would be drawn as if of one second
    this.ask();
  }

  // Ask at once, for what was changed by the reader.
  refresh() {
    if (!this.stopped) {
      clearTimeout(this.timer);
      this.ask();
    }
  }

  async ask() {
    const turn = (this.turn = Symbol("turn"));
    try {
      const now = await getJson("/live", this.key(), AbortSignal.timeout(5000));
      if (this.turn === turn) this.show(now);
    } catch (error) {
      if (this.turn === turn) this.lose(error);
    }
    if (this.turn === turn && !this.stopped) this.timer = setTimeout(() => this.ask(), PERIOD);
  }

  show(now) {
    this.modelName.textContent = now.model;
    this.stateText.textContent = STATES[now.state] ?? now.state;
    this.status.dataset.state = now.engine ? now.state : now.state === "starting" ? "starting" : "down";
    this.say(now.engine ? "" : now.trouble ?? STATES[now.state]);
    if (!now.engine) {
      this.history = [];
      this.tiles.forEach((tile) => tile.add(null));
      return;
    }
    const restarted = this.history.length && now.engine.output_tokens < this.history.at(-1).engine.output_tokens;
    if (restarted) this.history = [];
    const before = this.history.at(-1) ?? now;
    this.history.push(now);
    while (this.history[0].clock < now.clock - WINDOW) this.history.shift();
    const past = this.history[0];
    for (const tile of this.tiles) tile.add(tile.of({ now, before, past }));
  }

  lose(error) {
    const key = error.status === 401;
    this.status.dataset.state = key ? "starting" : "down";
    this.stateText.textContent = key ? "wants an API key" : "no answer";
    this.history = [];
    this.say(error.status ? error.message : "The server can't be reached.");
    this.tiles.forEach((tile) => tile.add(null));
  }

  say(text) {
    this.notice.hidden = !text;
    if (this.notice.textContent !== text) this.notice.textContent = text;
  }
}
