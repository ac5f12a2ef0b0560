// The browser of a program's nodes: search, filters, order, and a list of any length.

const FILTERS = ["phase", "role", "made_by"];

class GraphBrowser {
  constructor(app) {
    this.app = app;
    this.rows = [];
    this.list = new VirtualList(byId("nodes"), 26, at => this.row(at));
    const refilter = onceAFrame(() => this.filter());
    for (const id of ["search", "filter-module"]) byId(id).addEventListener("input", refilter);
    for (const id of [...FILTERS.map(column => `filter-${column}`), "order"]) byId(id).addEventListener("change", refilter);
    byId("clear").addEventListener("click", () => this.clear());
    byId("nodes").addEventListener("click", event => this.click(event));
    byId("nodes").addEventListener("keydown", event => this.key(event));
  }

  draw(changed) {
    if (changed.has("program") || changed.has("pass")) {
      this.graph = this.app.graph;
      this.drawFilters();
      this.filter();
    }
    const at = this.rows.findIndex(row => this.app.report.text(row, "name") === this.app.node);
    this.list.redraw();
    if (at >= 0) this.list.reveal(at);
  }

  drawFilters() {
    const {program, pass, report} = this.app;
    const finished = pass === program.last;
    byId("graph-lead").textContent = `${program.name} ${finished ? "as the last pass left it" : `after ${program.passes[pass].name}`}${finished ? "" : "; times and lives are those that nodes have when it is finished"}.`;
    for (const column of FILTERS) {
      const select = byId(`filter-${column}`), before = select.value;
      const found = countsOf(this.graph.nodes, row => report.text(row, column));
      const options = [...found].filter(([name]) => name).map(([name, count]) => element("option", {value: name}, `${name} (${count.toLocaleString("en")})`));
      select.replaceChildren(element("option", {value: ""}, "any"), ...options);
      select.value = found.has(before) ? before : "";
    }
    byId("modules").replaceChildren(...prefixes(this.graph.nodes, report).map(path => element("option", {value: path})));
  }

  clear() {
    for (const id of ["search", "filter-module", ...FILTERS.map(column => `filter-${column}`)]) byId(id).value = "";
    byId("order").value = "position";
    this.filter();
  }

  filter() {
    if (!this.graph) return;
    const {report, program} = this.app;
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = FILTERS.map(column => [column, byId(`filter-${column}`).value]).filter(([, value]) => value);
    const prefix = byId("filter-module").value.trim().replace(/\.$/, "");
    const fits = row =>
      wanted.every(([column, value]) => report.text(row, column) === value) &&
      (!prefix || within(ownerOf(report, row), prefix)) &&
      words.every(word => report.searchable(row).includes(word));
    this.rows = Array.from(this.graph.nodes.filter(fits));
    this.sort(program);
    const all = this.graph.nodes.length;
    byId("node-count").textContent = this.rows.length === all ? countText(all, "node") : `${this.rows.length.toLocaleString("en")} of ${countText(all, "node")}`;
    this.list.show(this.rows.length);
  }

  sort(program) {
    const by = byId("order").value, {report} = this.app;
    if (by === "bytes") this.rows.sort((a, b) => report.rows.bytes[b] - report.rows.bytes[a]);
    if (by !== "time") return;
    const takes = new Map(this.rows.map(row => [row, program.run.takes(program.places.get(report.rows.name[row]))]));
    this.rows.sort((a, b) => takes.get(b) - takes.get(a));
  }

  row(at) {
    const row = this.rows[at], {report, program, node} = this.app;
    const name = report.text(row, "name"), place = program.places.get(report.rows.name[row]);
    const takes = place === undefined ? 0 : program.run.takes(place);
    const size = report.rows.bytes[row], kind = kindOf(report, row), role = report.text(row, "role");
    const dot = coloured("dot", kind);
    const cells = [
      element("span", {class: "dim"}, place === undefined ? "–" : String(place)),
      element("span", {class: "name", title: name}, dot, shortened(name, this.letters)),
      element("span", {title: report.text(row, "operator")}, report.text(row, "operator")),
      element("span", {class: "dim", title: report.text(row, "type")}, report.text(row, "type")),
      element("span", {class: "number"}, size ? bytesText(size) : "–"),
      element("span", {class: "number"}, takes ? nanosText(takes) : "–"),
      element("span", {class: "dim"}, role === "compute" ? report.text(row, "phase") : role),
      element("span", {class: "dim end", title: ownerOf(report, row)}, element("bdi", {}, ownerOf(report, row))),
    ];
    return element("div", {class: "node", role: "option", "data-at": at, "data-node": name, "aria-selected": String(name === node)}, cells);
  }

  /** How many letters a name has room for. */
  get letters() {
    return Math.floor((document.querySelector(".node.head :nth-child(2)").clientWidth - 14) / 7.3);
  }

  click(event) {
    const row = event.target.closest(".node");
    if (row) this.choose(Number(row.dataset.at));
  }

  key(event) {
    const step = {ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12}[event.key];
    if (!step || !this.rows.length) return;
    event.preventDefault();
    const now = this.rows.findIndex(row => this.app.report.text(row, "name") === this.app.node);
    this.choose(Math.max(0, Math.min(this.rows.length - 1, now < 0 ? 0 : now + step)));
  }

  choose(at) {
    this.app.chooseNode(this.app.report.text(this.rows[at], "name"));
  }
}

/** The module or the parameter that a node belongs to. */
function ownerOf(report, row) {
  return report.text(row, "param") || report.text(row, "module");
}

const within = (path, prefix) => path === prefix || path.startsWith(`${prefix}.`);

/** What colours a node: its role, or, of what computes, its phase. */
function kindOf(report, row) {
  const role = report.text(row, "role");
  if (["gather", "reduce", "fetch", "store", "wait"].includes(role)) return role;
  return `compute-${report.text(row, "phase") || "forward"}`;
}

function countsOf(rows, key) {
  const found = new Map();
  for (const row of rows) found.set(key(row), (found.get(key(row)) || 0) + 1);
  return found;
}

/** Every module's path, and those that it lies in. */
function prefixes(rows, report) {
  const found = new Set();
  for (const path of new Set(Array.from(rows, row => ownerOf(report, row)))) {
    const parts = path.split(".");
    for (let count = 1; path && count <= parts.length; count++) found.add(parts.slice(0, count).join("."));
  }
  return [...found].sort((a, b) => a.localeCompare(b, "en", {numeric: true}));
}
