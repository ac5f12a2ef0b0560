// What the two charts share: a canvas that is as sharp as the screen, a box beside the pointer, and ticks.

class Chart {
  /** `redraw` is called whenever the canvas has to be painted anew: it was resized, or the colours are others. */
  constructor(canvas, tip, redraw) {
    this.canvas = canvas;
    this.tip = tip;
    this.redraw = onceAFrame(redraw);
    new ResizeObserver(this.redraw).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.redraw);
  }

  /** An empty canvas: {pen, width, height} in the page's pixels, or null while it has no size. */
  begin() {
    const {canvas} = this, width = canvas.clientWidth, height = canvas.clientHeight, sharp = devicePixelRatio || 1;
    if (!width || !height) return null;
    canvas.width = Math.round(width * sharp);
    canvas.height = Math.round(height * sharp);
    const pen = canvas.getContext("2d");
    pen.scale(sharp, sharp);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return {pen, width, height};
  }

  /** Show the box beside a point of the canvas, inside of it. */
  point(x, y, content) {
    const {tip, canvas} = this;
    tip.replaceChildren(...content);
    tip.hidden = false;
    const left = x + 16 + tip.offsetWidth > canvas.clientWidth ? x - 16 - tip.offsetWidth : x + 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 12, canvas.clientHeight - tip.offsetHeight - 4))}px`;
  }

  leave() {
    this.tip.hidden = true;
  }
}

/** Round steps between two numbers, some `count` of them. */
function ticks(from, to, count) {
  const raw = (to - from) / count, power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].find(times => times * power >= raw) * power;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

/** A round number of bytes for ticks: a power of two, so that axes read 128, 256, 384 MiB. */
function byteTicks(most, count) {
  let step = 2 ** Math.ceil(Math.log2(Math.max(most, 1) / count));
  const found = [];
  for (let at = 0; at <= most; at += step) found.push(at);
  return found;
}

function byteTick(size) {
  for (const [unit, name] of UNITS) if (size >= unit) return `${Number((size / unit).toFixed(2))} ${name}`;
  return `${size} B`;
}

/** The name of a node and what stands below it in a box. */
function tipRows(head, note, rows, caption) {
  const cells = rows.map(([name, figure]) => element("tr", {}, element("td", {}, name), element("td", {class: "number"}, figure)));
  const table = rows.length ? element("table", {}, caption ? element("caption", {}, caption) : null, element("tbody", {}, cells)) : null;
  return [element("strong", {}, head), note ? element("div", {class: "note"}, note) : "", table].filter(Boolean);
}
