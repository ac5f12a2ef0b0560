// Elements and formats that every view uses. Texts become text nodes, never markup: names are the user's and may hold anything.

const byId = id => document.getElementById(id);

/** An element. Attributes that begin with "on" are listeners, "class" and others are set as they are, false ones left out. */
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  return fill(made, attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== ""));
  return made;
}

/** Pairs of a term and what is said of it (a text, or elements), as a list; pairs without anything said are left out. */
function pairs(items) {
  const said = items.filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  return element("dl", {class: "pairs"}, said.map(([term, value]) => [element("dt", {}, term), element("dd", {}, value)]));
}

function coloured(kind, name) {
  const made = element("i", {class: kind});
  made.style.background = `var(--${name})`;
  return made;
}

// -- numbers as people read them ---------------------------------------------------------------------------------------
const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function bytesText(size) {
  for (const [unit, name] of UNITS) if (Math.abs(size) >= unit) return `${(size / unit).toFixed(2)} ${name}`;
  return `${size} B`;
}

function nanosText(nanos) {
  if (Math.abs(nanos) >= 1e5) return `${(nanos / 1e6).toFixed(3)} ms`;
  return nanos === 0 ? "0 ms" : `${(nanos / 1e3).toFixed(2)} µs`;
}

const secondsText = seconds => nanosText(seconds * 1e9);
const countText = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;

function signed(amount, text) {
  return `${amount < 0 ? "−" : "+"}${text(Math.abs(amount))}`;
}

/** The value that a colour of the style sheet has now, for canvases. */
const colourOf = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888";

/** The first index in [0, count) for which `holds`, which stays true once it is, by halving; count where it never is. */
function firstWhere(count, holds) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** A name in so many letters at most; what is left out of a long one is its middle, for its end tells more. */
function shortened(name, letters) {
  if (name.length <= letters) return name;
  const start = Math.floor((letters - 1) / 3);
  return `${name.slice(0, start)}…${name.slice(name.length - (letters - 1 - start))}`;
}

/** Calls that come faster than the screen is drawn become one. */
function onceAFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}
