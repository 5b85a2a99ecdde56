// What the parts of the page share: making elements, and saying times.

// Text goes in as text, whatever it holds.
export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function milliseconds(time) {
  return time < 995 ? `${Math.round(time)} ms` : `${(time / 1e3).toPrecision(3)} s`;
}
