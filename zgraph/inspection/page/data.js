// The data block, unpacked, and programs as the views ask for them. Its form is that of zgraph/inspection/page/data.py.

/** Unpack the block. Rejects where the browser can't. */
async function readData() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser has no DecompressionStream");
  const letters = atob(byId("data").textContent);
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/** [first, how many, first, how many, …] as numbers. */
function expanded(runs) {
  let count = 0;
  for (let at = 1; at < runs.length; at += 2) count += runs[at];
  const found = new Int32Array(count);
  let next = 0;
  for (let at = 0; at < runs.length; at += 2) {
    for (let i = 0; i < runs[at + 1]; i++) found[next++] = runs[at] + i;
  }
  return found;
}

const SEARCHED = ["name", "operator", "type", "module", "param", "bucket", "group", "copy_of", "source"];

class Report {
  constructor(data) {
    this.strings = data.strings;
    this.rows = data.rows;
    this.held = data.held;
    this.main = data.main;
    this.programs = new Map(data.programs.map(program => [program.name, new Program(this, program)]));
    this.searched = []; // what a search looks through, by row, made when it is needed
  }

  /** A text of a row: its "name", "module", … */
  text(row, column) {
    return this.strings[this.rows[column][row]];
  }

  /** A text's place among the strings; undefined for one that no row has. */
  number(text) {
    this.numbers ??= new Map(this.strings.map((string, at) => [string, at]));
    return this.numbers.get(text);
  }

  /** All that a node can be found by, in small letters. */
  searchable(row) {
    this.searched[row] ??= SEARCHED.map(column => this.text(row, column)).join(" ").toLowerCase();
    return this.searched[row];
  }
}

/** A program with its passes; `finished` is what its last pass left, of which time and memory are known. */
class Program {
  constructor(report, data) {
    Object.assign(this, {report, name: data.name, kind: data.kind, held: data.held, passes: data.passes, remarks: data.remarks});
    this.parameters = data.parameters;
    this.data = data;
    this.graphs = new Map();
  }

  /** The program after a pass, by its place in the pipeline. */
  graph(at) {
    if (!this.graphs.has(at)) this.graphs.set(at, new Graph(this.report, expanded(this.passes[at].rows)));
    return this.graphs.get(at);
  }

  get last() {
    return this.passes.length - 1;
  }

  /** The finished program's nodes by their place in it, as rows; the output, which has no line, is the last. */
  get order() {
    return (this.ordered ??= expanded(this.data.order));
  }

  /** The place of a node in the finished program, by its name's number. */
  get places() {
    return (this.placed ??= new Map(Array.from(this.order, (row, at) => [this.report.rows.name[row], at])));
  }

  get run() {
    return (this.ran ??= new Run(this));
  }

  get memory() {
    return (this.remembered ??= new Memory(this));
  }

  remarksOf(node) {
    return this.remarks.filter(remark => remark.node === node);
  }
}

/** A program after one pass: its lines as rows, of which those of nodes are `nodes`. */
class Graph {
  constructor(report, lines) {
    this.report = report;
    this.lines = lines;
    this.nodes = lines.filter(row => report.rows.name[row]);
    this.byName = new Map(Array.from(this.nodes, row => [report.rows.name[row], row]));
  }

  /** The row of a node by its name, or undefined. */
  find(name) {
    return this.byName.get(this.report.number(name));
  }

  operands(row) {
    return this.report.rows.operands[row].map(name => this.byName.get(name)).filter(found => found !== undefined);
  }

  readers(row) {
    if (!this.reading) {
      this.reading = new Map();
      for (const reader of this.nodes) {
        for (const name of this.report.rows.operands[reader]) {
          if (!this.reading.has(name)) this.reading.set(name, []);
          this.reading.get(name).push(reader);
        }
      }
    }
    return this.reading.get(this.report.rows.name[row]) || [];
  }
}

/** The simulated run of a finished program. `clock` is when the device is done with each node, `spans` are what occupies a lane. */
class Run {
  constructor(program) {
    const {forecast} = program.data;
    const [nodes, lanes, starts, takes] = forecast.spans;
    let now = 0;
    this.clock = forecast.clock.map(step => (now += step));
    this.lanes = forecast.lanes;
    this.seconds = forecast.seconds;
    this.spans = nodes.map((node, at) => ({node, lane: lanes[at], start: starts[at], takes: takes[at]}));
    this.stalls = forecast.stalls.map(([node, role, takes]) => ({node, role, takes, start: this.clock[node] - takes}));
    this.byNode = new Map();
    for (const span of this.spans) {
      if (!this.byNode.has(span.node)) this.byNode.set(span.node, []);
      this.byNode.get(span.node).push(span);
    }
  }

  /** What a node takes of all lanes, in nanoseconds. */
  takes(node) {
    return (this.byNode.get(node) || []).reduce((sum, span) => sum + span.takes, 0);
  }
}

/** What lies in the device's memory at each node of a finished program, by category; what is held besides is the first. */
class Memory {
  constructor(program) {
    const {categories, lives} = program.data.memory, count = program.order.length;
    this.names = [...(program.held ? [program.report.held] : []), ...categories];
    const base = program.held ? 1 : 0;
    const [nodes, kinds, sizes, born, gone] = lives;
    this.lives = nodes.map((node, at) => ({node, category: kinds[at] + base, bytes: sizes[at], born: born[at], gone: gone[at]}));
    this.byNode = new Map(this.lives.map(life => [life.node, life]));
    this.curves = this.names.map(() => new Float64Array(count));
    if (base) this.curves[0].fill(program.held);
    for (const life of this.lives) this.change(life, count);
    for (let kind = base; kind < this.curves.length; kind++) accumulate(this.curves[kind]);
    this.total = Float64Array.from({length: count}, (_, at) => this.curves.reduce((sum, curve) => sum + curve[at], 0));
    this.peak = this.total.reduce((best, size, at) => (size > this.total[best] ? at : best), 0);
  }

  change(life, count) {
    const curve = this.curves[life.category];
    if (life.born < count) curve[life.born] += life.bytes;
    if (life.gone < count) curve[life.gone] -= life.bytes;
  }

  /** The largest values that are there at a node. */
  largest(at, count) {
    const there = this.lives.filter(life => life.born <= at && at < life.gone);
    return there.sort((a, b) => b.bytes - a.bytes).slice(0, count);
  }
}

function accumulate(curve) {
  for (let at = 1; at < curve.length; at++) curve[at] += curve[at - 1];
}
