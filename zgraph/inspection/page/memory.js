// The memory of a finished program: live bytes by category, over its nodes or over time.

const MEMORY_EDGE = {left: 74, right: 14, top: 16, bottom: 26};

class MemoryChart {
  constructor(app) {
    this.app = app;
    this.at = null; // the node that is pointed at
    const canvas = byId("memory-chart");
    this.chart = new Chart(canvas, byId("memory-tip"), () => this.paint());
    canvas.addEventListener("pointermove", event => this.point(this.placeOf(event.offsetX), event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("click", event => this.choose(this.placeOf(event.offsetX)));
    canvas.addEventListener("keydown", event => this.key(event));
    for (const button of document.getElementsByName("axis")) button.addEventListener("change", () => this.chart.redraw());
  }

  draw(changed) {
    if (changed.has("program")) {
      this.program = this.app.program;
      this.memory = this.program.memory;
      this.legend();
      this.leave();
    }
    this.chart.redraw();
  }

  legend() {
    const {memory} = this, most = memory.curves.map(curve => curve.reduce((a, b) => Math.max(a, b), 0));
    byId("memory-legend").replaceChildren(...memory.names.map((name, at) =>
      element("b", {title: `at most ${bytesText(most[at])}`}, coloured("", colourName(name)), `${name} ${bytesText(memory.curves[at][memory.peak])}`)));
    byId("memory-chart").setAttribute("aria-label", `Live bytes by category; the peak is ${bytesText(memory.total[memory.peak])} at ${this.name(memory.peak)}`);
  }

  get overTime() {
    return document.querySelector("input[name=axis]:checked").value === "time";
  }

  name(at) {
    return this.app.report.text(this.program.order[at], "name");
  }

  // -- places -----------------------------------------------------------------------------------------------------------
  get inner() {
    return this.chart.canvas.clientWidth - MEMORY_EDGE.left - MEMORY_EDGE.right;
  }

  /** Where a node stands, from 0 to 1. */
  share(at) {
    const {clock} = this.program.run, count = this.memory.total.length;
    return this.overTime ? clock[at] / (clock[count - 1] || 1) : at / Math.max(1, count - 1);
  }

  x(at) {
    return MEMORY_EDGE.left + this.share(at) * this.inner;
  }

  placeOf(x) {
    const wanted = (x - MEMORY_EDGE.left) / this.inner, count = this.memory.total.length;
    if (!this.overTime) return Math.max(0, Math.min(count - 1, Math.round(wanted * (count - 1))));
    return Math.min(count - 1, firstWhere(count, at => this.share(at) >= wanted));
  }

  // -- painting ---------------------------------------------------------------------------------------------------------
  paint() {
    if (!this.memory) return;
    const sheet = this.chart.begin();
    if (!sheet) return;
    const {left, right, top, bottom} = MEMORY_EDGE, most = this.memory.total[this.memory.peak] * 1.04 || 1;
    const area = {...sheet, most, y: size => sheet.height - bottom - (size / most) * (sheet.height - top - bottom), end: sheet.width - right, left};
    this.paintGrid(area);
    this.paintAreas(area);
    this.paintPeak(area);
    this.paintNode(area);
    if (this.at !== null) this.paintCursor(area, this.at, colourOf("ink"));
  }

  paintGrid({pen, most, y, left, end, height}) {
    pen.strokeStyle = colourOf("line");
    pen.fillStyle = colourOf("soft");
    pen.textAlign = "right";
    for (const size of byteTicks(most, 5)) {
      pen.fillText(byteTick(size), left - 8, y(size));
      line(pen, left, y(size), end, y(size));
    }
    pen.textAlign = "center";
    const {clock} = this.program.run, count = this.memory.total.length, last = this.overTime ? clock[count - 1] : count - 1;
    for (const at of ticks(0, last || 1, 8)) {
      const x = left + (at / (last || 1)) * (end - left);
      pen.fillText(this.overTime ? nanosText(at) : String(at), Math.min(x, end - 18), height - 12);
    }
  }

  /** One column of pixels shows the fullest of the nodes in it: no peak is lost, however many there are. */
  columns() {
    const count = this.memory.total.length, {total} = this.memory, found = [];
    let last = -1;
    for (let at = 0; at < count; at++) {
      const x = Math.round(this.x(at));
      if (x !== last) found.push({x, at});
      else if (total[at] > total[found.at(-1).at]) found.at(-1).at = at;
      last = x;
    }
    return found;
  }

  paintAreas({pen, y, end}) {
    const columns = this.columns(), {curves, names} = this.memory, floor = new Float64Array(columns.length);
    curves.forEach((curve, kind) => {
      pen.fillStyle = colourOf(colourName(names[kind]));
      pen.beginPath();
      // Steps, not slopes: what a node leaves stays until the next one.
      columns.forEach(({x, at}, i) => steps(pen, x, columns[i + 1]?.x ?? end, y(floor[i] + curve[at])));
      for (let i = columns.length - 1; i >= 0; i--) steps(pen, columns[i + 1]?.x ?? end, columns[i].x, y(floor[i]));
      pen.fill();
      columns.forEach(({at}, i) => (floor[i] += curve[at]));
    });
  }

  paintPeak({pen, y, left, end}) {
    const {total, peak} = this.memory, text = `peak ${bytesText(total[peak])}`, x = this.x(peak);
    pen.strokeStyle = pen.fillStyle = colourOf("ink");
    pen.setLineDash([4, 4]);
    line(pen, left, y(total[peak]), end, y(total[peak]));
    pen.setLineDash([]);
    pen.beginPath();
    pen.arc(x, y(total[peak]), 3, 0, 7);
    pen.fill();
    pen.textAlign = x > (left + end) / 2 ? "right" : "left";
    pen.fillText(text, x + (pen.textAlign === "right" ? -8 : 8), y(total[peak]) - 9);
  }

  /** The chosen node, and while it lives. */
  paintNode(area) {
    const place = this.app.place;
    if (place === undefined) return;
    const life = this.memory.byNode.get(place), {pen, height} = area, {bottom} = MEMORY_EDGE;
    if (life) {
      const from = this.x(life.born), to = this.x(Math.min(life.gone, this.memory.total.length - 1));
      pen.fillStyle = colourOf("accent");
      pen.fillRect(from, height - bottom, Math.max(2, to - from), 4);
    }
    this.paintCursor(area, place, colourOf("accent"));
  }

  paintCursor({pen, height}, at, colour) {
    pen.strokeStyle = colour;
    line(pen, this.x(at), MEMORY_EDGE.top, this.x(at), height - MEMORY_EDGE.bottom);
  }

  // -- pointing ---------------------------------------------------------------------------------------------------------
  point(at, x, y) {
    if (!this.memory || !this.memory.total.length) return;
    this.at = at;
    const {memory} = this;
    const kinds = memory.names.map((name, kind) => [name, memory.curves[kind][at]]).filter(([, size]) => size).sort((a, b) => b[1] - a[1]);
    const rows = kinds.map(([name, size]) => [[coloured("swatch", colourName(name)), name], bytesText(size)]);
    const largest = memory.largest(at, 6).map(life => [[coloured("swatch", colourName(memory.names[life.category])), this.name(life.node)], bytesText(life.bytes)]);
    const note = `node ${at}, ${nanosText(this.program.run.clock[at])}: ${bytesText(memory.total[at])}`;
    this.chart.point(x, y, [...tipRows(this.name(at), note, rows), ...tipRows("", "", largest, "largest").slice(1)]);
    this.chart.redraw();
  }

  leave() {
    this.at = null;
    this.chart.leave();
    this.chart.redraw();
  }

  choose(at) {
    this.app.chooseNode(this.name(at), {finished: true});
  }

  key(event) {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (event.key === "Enter" && this.at !== null) this.choose(this.at);
    if (!step) return;
    event.preventDefault();
    const from = this.at ?? this.app.place ?? this.memory.peak;
    const at = Math.max(0, Math.min(this.memory.total.length - 1, from + step * (event.shiftKey ? 20 : 1)));
    this.point(at, this.x(at), 40);
  }
}

function line(pen, x, y, toX, toY) {
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(toX, toY);
  pen.stroke();
}

function steps(pen, from, to, y) {
  pen.lineTo(from, y);
  pen.lineTo(to, y);
}
