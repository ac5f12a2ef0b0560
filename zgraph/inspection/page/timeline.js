// The streams of a finished program's simulated run, to zoom and pan in.

const LANE = 34, LANE_GAP = 8, LANE_TOP = 30, LANE_LEFT = 110, LANE_RIGHT = 12;
const WAITS = "waits";

class Timeline {
  constructor(app) {
    this.app = app;
    this.lanes = [];
    const canvas = byId("timeline-chart");
    this.chart = new Chart(canvas, byId("timeline-tip"), () => this.paint());
    canvas.addEventListener("pointerdown", event => this.press(event));
    canvas.addEventListener("pointermove", event => this.move(event));
    canvas.addEventListener("pointerup", event => this.release(event));
    canvas.addEventListener("pointerleave", () => this.chart.leave());
    canvas.addEventListener("dblclick", event => this.zoom(0.4, event.offsetX));
    canvas.addEventListener("wheel", event => this.wheel(event), {passive: false});
    canvas.addEventListener("keydown", event => this.key(event));
    byId("zoom-in").addEventListener("click", () => this.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.zoom(2));
    byId("zoom-all").addEventListener("click", () => this.whole());
  }

  draw(changed) {
    if (changed.has("program")) {
      this.program = this.app.program;
      this.lanes = lanesOf(this.program);
      this.chart.canvas.style.height = `${LANE_TOP + this.lanes.length * (LANE + LANE_GAP) + 8}px`;
      this.legend();
      this.whole();
    }
    if (changed.has("node") && this.app.place !== undefined) this.reveal(this.app.place);
    this.chart.redraw();
  }

  legend() {
    const kinds = new Set(this.lanes.flatMap(lane => lane.bars.map(bar => this.kind(lane, bar))));
    byId("timeline-legend").replaceChildren(...[...kinds].map(kind => element("b", {}, coloured("", kind), kind.replace("compute-", ""))));
  }

  kind(lane, bar) {
    return lane.name === WAITS ? "wait" : kindOf(this.app.report, this.program.order[bar.node]);
  }

  // -- what part of the run is seen ---------------------------------------------------------------------------------------
  whole() {
    const bars = this.lanes.flatMap(lane => lane.bars);
    const ends = bars.reduce(([from, to], bar) => [Math.min(from, bar.start), Math.max(to, bar.start + bar.takes)], [0, 0]);
    this.all = [ends[0], Math.max(ends[1], ends[0] + 1)];
    this.look(...this.all);
  }

  /** Show from one nanosecond to another, as far as the run goes. */
  look(from, to) {
    const [first, last] = this.all;
    const width = Math.min(Math.max(to - from, 100), last - first);
    this.from = Math.max(first, Math.min(from, last - width));
    this.to = this.from + width;
    byId("timeline-range").textContent = `${nanosText(this.from)} to ${nanosText(this.to)}`;
    this.chart.redraw();
  }

  zoom(by, x = (LANE_LEFT + this.chart.canvas.clientWidth) / 2) {
    if (!this.program) return;
    const at = this.nanos(x);
    this.look(at - (at - this.from) * by, at + (this.to - at) * by);
  }

  pan(pixels) {
    const by = (pixels / this.inner) * (this.to - this.from);
    this.look(this.from + by, this.to + by);
  }

  /** Bring a node's work into view, without another zoom. */
  reveal(place) {
    const span = this.program.run.byNode.get(place)?.[0];
    if (!span || (span.start >= this.from && span.start <= this.to)) return;
    const half = (this.to - this.from) / 2;
    this.look(span.start - half, span.start + half);
  }

  get inner() {
    return this.chart.canvas.clientWidth - LANE_LEFT - LANE_RIGHT;
  }

  x(nanos) {
    return LANE_LEFT + ((nanos - this.from) / (this.to - this.from)) * this.inner;
  }

  nanos(x) {
    return this.from + ((x - LANE_LEFT) / this.inner) * (this.to - this.from);
  }

  // -- painting -----------------------------------------------------------------------------------------------------------
  paint() {
    if (!this.program) return;
    const sheet = this.chart.begin();
    if (!sheet) return;
    this.paintTicks(sheet);
    this.lanes.forEach((lane, at) => this.paintLane(sheet, lane, LANE_TOP + at * (LANE + LANE_GAP)));
  }

  paintTicks({pen, width, height}) {
    pen.textAlign = "center";
    pen.strokeStyle = colourOf("line");
    pen.fillStyle = colourOf("soft");
    for (const at of ticks(this.from, this.to, 8)) {
      line(pen, this.x(at), LANE_TOP - 8, this.x(at), height);
      pen.fillText(nanosText(at), Math.min(this.x(at), width - 28), 12);
    }
  }

  paintLane({pen, width}, lane, top) {
    pen.textAlign = "left";
    pen.fillStyle = colourOf("sunken");
    pen.fillRect(LANE_LEFT, top, width - LANE_LEFT - LANE_RIGHT, LANE);
    pen.fillStyle = colourOf("ink");
    pen.fillText(lane.name, 12, top + LANE / 2 - 7);
    pen.fillStyle = colourOf("soft");
    pen.fillText(nanosText(lane.busy), 12, top + LANE / 2 + 8);
    pen.save();
    pen.beginPath();
    pen.rect(LANE_LEFT, top, width - LANE_LEFT - LANE_RIGHT, LANE);
    pen.clip();
    this.paintBars(pen, lane, top);
    pen.restore();
  }

  paintBars(pen, lane, top) {
    const colours = new Map(), {report, place} = this.app, chosen = [];
    let painted = -1;
    for (let at = this.firstIn(lane); at < lane.bars.length && lane.bars[at].start <= this.to; at++) {
      const bar = lane.bars[at], from = this.x(bar.start), to = this.x(bar.start + bar.takes);
      if (bar.node === place) chosen.push([from, to]);
      if (to <= painted) continue; // (less than a pixel, and one is there already)
      const kind = this.kind(lane, bar);
      if (!colours.has(kind)) colours.set(kind, colourOf(kind));
      const wide = Math.max(1, to - from - (to - from > 3 ? 1 : 0));
      pen.fillStyle = colours.get(kind);
      pen.fillRect(from, top + 3, wide, LANE - 6);
      painted = Math.floor(from) + 1;
      if (wide > 44) label(pen, report.text(this.program.order[bar.node], "name"), from, wide, top + LANE / 2);
    }
    pen.strokeStyle = colourOf("ink");
    for (const [from, to] of chosen) {
      pen.lineWidth = 2;
      pen.strokeRect(from - 1, top + 2, Math.max(3, to - from), LANE - 4);
    }
  }

  /** The first bar of a lane that may be seen: bars of a lane do not overlap. */
  firstIn(lane) {
    return firstWhere(lane.bars.length, at => lane.bars[at].start + lane.bars[at].takes >= this.from);
  }

  // -- pointing -----------------------------------------------------------------------------------------------------------
  /** The bar at a point, or the nearest one within three pixels. */
  barAt(x, y) {
    const lane = this.lanes[Math.floor((y - LANE_TOP) / (LANE + LANE_GAP))];
    if (!lane || x < LANE_LEFT) return null;
    const at = this.nanos(x), slack = (3 / this.inner) * (this.to - this.from);
    const first = firstWhere(lane.bars.length, i => lane.bars[i].start + lane.bars[i].takes >= at - slack);
    const near = lane.bars.slice(first, first + 3).filter(bar => bar.start <= at + slack);
    near.sort((a, b) => distance(a, at) - distance(b, at));
    return near.length ? {lane, bar: near[0]} : null;
  }

  press(event) {
    this.held = {x: event.offsetX, moved: false};
    this.chart.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.program) return;
    if (this.held) {
      const by = this.held.x - event.offsetX;
      this.held.moved ||= Math.abs(by) > 3;
      if (!this.held.moved) return;
      this.pan(by);
      this.held.x = event.offsetX;
      this.chart.leave();
      return;
    }
    const found = this.barAt(event.offsetX, event.offsetY);
    if (found) this.chart.point(event.offsetX, event.offsetY, this.about(found));
    else this.chart.leave();
  }

  release(event) {
    const {held} = this;
    this.held = null;
    const found = held && !held.moved && this.barAt(event.offsetX, event.offsetY);
    if (found) this.app.chooseNode(this.app.report.text(this.program.order[found.bar.node], "name"), {finished: true});
  }

  about({lane, bar}) {
    const {report} = this.app, row = this.program.order[bar.node], text = column => report.text(row, column);
    const rows = [["takes", nanosText(bar.takes)], ["from", nanosText(bar.start)], ["operator", text("operator")], ["type", text("type")], ["bucket", text("bucket")], ["of", ownerOf(report, row)]];
    const what = lane.name === WAITS ? `compute waits for ${bar.role}` : `${lane.name}, ${text("phase")}`;
    return tipRows(text("name"), what, rows.filter(([, value]) => value));
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // (the wheel alone scrolls the page)
    event.preventDefault();
    this.zoom(1.0018 ** event.deltaY, event.offsetX);
  }

  key(event) {
    const does = {
      ArrowLeft: () => this.pan(-80), ArrowRight: () => this.pan(80), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.whole(),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }
}

/** A program's lanes with what occupies them, in order; compute is the first, and what it waits for the second. */
function lanesOf(program) {
  const {run} = program;
  const lanes = run.lanes.map(name => ({name, bars: []}));
  for (const span of run.spans) lanes[span.lane].bars.push(span);
  if (run.stalls.length) lanes.push({name: WAITS, bars: run.stalls});
  const order = ["compute", WAITS];
  const rank = lane => (order.includes(lane.name) ? order.indexOf(lane.name) : order.length);
  for (const lane of lanes) {
    lane.bars = [...lane.bars].sort((a, b) => a.start - b.start);
    lane.busy = lane.bars.reduce((sum, bar) => sum + bar.takes, 0);
  }
  return lanes.sort((a, b) => rank(a) - rank(b));
}

function distance(bar, at) {
  return Math.max(bar.start - at, at - bar.start - bar.takes, 0);
}

/** A name inside of its bar, as much of it as there is room for. */
function label(pen, name, x, width, y) {
  pen.fillStyle = "#fff";
  pen.textAlign = "left";
  pen.fillText(shortened(name, Math.floor((width - 8) / 6.2)), x + 5, y);
}
