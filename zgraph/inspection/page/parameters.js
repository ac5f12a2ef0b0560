// The table of parameters: how each is laid out, how often it is gathered, how its gradient is reduced, where it is used.

const COLUMNS = [
  {key: "name", title: "parameter"},
  {key: "shape", title: "shape", text: row => `[${row.shape.join(", ")}]`, order: row => row.elements, number: true},
  {key: "dtype", title: "dtype", text: row => (row.compute === row.dtype ? row.dtype : `${row.dtype}, computes in ${row.compute}`)},
  {key: "layout", title: "layout"},
  {key: "rows", title: "rows", text: row => row.rows ?? "–", order: row => row.rows ?? -1, number: true},
  {key: "bytes", title: "rank's bytes", text: row => bytesText(row.bytes), number: true},
  {key: "gradient", title: "gradient", text: row => (row.gradient ? bytesText(row.gradient) : "–"), number: true},
  {key: "states", title: "states", text: row => (row.states ? bytesText(row.states) : "–"), number: true},
  {key: "home", title: "home"},
  {key: "forward", title: "gathers fwd", number: true},
  {key: "backward", title: "gathers bwd", number: true},
  {key: "fetches", title: "fetches", number: true},
  {key: "between", title: "between uses"},
  {key: "reduction", title: "gradient's reduction"},
  {key: "first", title: "first used", node: true},
  {key: "last", title: "last used", node: true},
];

class ParameterTable {
  constructor(app) {
    this.app = app;
    this.by = null;
    this.falls = false;
    byId("parameter-search").addEventListener("input", onceAFrame(() => this.drawRows()));
    this.heads = COLUMNS.map(column => element("th", {scope: "col", class: column.number && "number"}, element("button", {type: "button", onclick: () => this.sort(column)}, column.title)));
    byId("parameter-table").tHead.replaceChildren(element("tr", {}, this.heads));
  }

  draw(changed) {
    if (changed.has("program") || changed.has("parameter")) this.drawRows();
  }

  /** By a column, numbers from the largest on; once more the other way round. */
  sort(column) {
    this.falls = this.by === column ? !this.falls : Boolean(column.number);
    this.by = column;
    this.heads.forEach((head, at) => {
      if (COLUMNS[at] === column) head.setAttribute("aria-sort", this.falls ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.drawRows();
  }

  drawRows() {
    const all = this.app.program.parameters, words = byId("parameter-search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = all.filter(row => words.every(word => COLUMNS.some(column => String(cellText(column, row)).toLowerCase().includes(word))));
    if (this.by) rows.sort(this.compare());
    const size = rows.reduce((sum, row) => sum + row.bytes, 0), elements = rows.reduce((sum, row) => sum + row.elements, 0);
    const counted = rows.length === all.length ? countText(all.length, "parameter") : `${rows.length} of ${countText(all.length, "parameter")}`;
    byId("parameter-count").textContent = `${counted}, ${countText(elements, "element")}, ${bytesText(size)} on each rank`;
    byId("parameter-table").tBodies[0].replaceChildren(...rows.map(row => this.row(row)));
  }

  compare() {
    const {by} = this, order = by.order || (row => row[by.key]), way = this.falls ? -1 : 1;
    return (a, b) => {
      const [x, y] = [order(a), order(b)];
      return way * (typeof x === "number" ? x - y : x.localeCompare(y, "en", {numeric: true}));
    };
  }

  row(row) {
    const cells = COLUMNS.map(column => {
      const text = cellText(column, row);
      const shown = column.node && text ? element("a", {class: "mono", href: this.app.address({node: text, finished: true})}, text) : String(text);
      return element("td", {class: column.number ? "number" : column.key === "name" && "mono"}, shown);
    });
    return element("tr", {class: row.name === this.app.parameter && "chosen"}, cells);
  }
}

function cellText(column, row) {
  return column.text ? column.text(row) : row[column.key];
}
