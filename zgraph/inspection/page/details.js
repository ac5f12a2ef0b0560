// All that is known of one node, with links to its operands and readers, and a drawing of these.

const LINKS = 30; // operands or readers that are named before "and … more"
const NEIGHBOURS = 7; // in the drawing, on each side

class Details {
  constructor(app) {
    this.app = app;
    this.panel = byId("details");
  }

  draw() {
    const {app, panel} = this;
    const row = app.node ? app.graph.find(app.node) : undefined;
    panel.hidden = !app.node;
    if (!app.node) return;
    const title = element("div", {class: "top"}, element("h2", {}, app.node), element("button", {type: "button", "aria-label": "Close", onclick: () => app.chooseNode("")}, "×"));
    if (row === undefined) panel.replaceChildren(title, element("p", {class: "note"}, `There is no such node in ${app.program.name} after ${app.pass_.name}.`));
    else panel.replaceChildren(title, ...this.parts(row));
    panel.scrollTop = 0;
  }

  parts(row) {
    const {app} = this, {report, graph} = app;
    const operands = [...new Set(graph.operands(row))], readers = graph.readers(row);
    return [
      pairs(this.facts(row)),
      pairs(this.taken(row)),
      ...this.remarks(row),
      element("h3", {}, "Neighbourhood"), this.neighbourhood(row, operands, readers),
      element("h3", {}, countText(operands.length, "operand")), this.links(operands),
      element("h3", {}, countText(readers.length, "reader")), this.links(readers),
      element("h3", {}, "Line"), element("div", {class: "source"}, report.rows.text[row].trim()),
    ];
  }

  facts(row) {
    const {report} = this.app, text = column => report.text(row, column), size = report.rows.bytes[row];
    return [
      ["operator", element("code", {}, text("operator"))],
      ["type", element("code", {}, text("type"))],
      ["bytes", size ? `${bytesText(size)} (${size.toLocaleString("en")})` : ""],
      ["phase", text("phase")], ["role", text("role")],
      ["module", text("module")], ["source", text("source") && element("span", {title: text("source")}, tail(text("source")))], ["parameter", text("param") && this.parameter(text("param"))],
      ["mesh dimension", text("mesh_dim")], ["bucket", text("bucket")], ["group", text("group")],
      ["ahead", report.rows.ahead[row] && "runs before the forward"], ["lies in", text("home")],
      ["again", text("copy_of") && this.link(text("copy_of"))], ["made by", this.maker(text("made_by"))],
    ];
  }

  /** Time and memory of the node in the finished program. */
  taken(row) {
    const {program, report} = this.app, place = program.places.get(report.rows.name[row]);
    if (place === undefined) return [["finished", "not in the finished program"]];
    const life = program.memory.byNode.get(place);
    const stalls = program.run.stalls.filter(stall => stall.node === place);
    return [
      ["place", `${place} of ${program.order.length}`],
      ...this.spans(row, place).map(([span, whose]) => [program.run.lanes[span.lane], `${nanosText(span.takes)} from ${nanosText(span.start)} on${whose}`]),
      ...stalls.map(stall => ["waits", `${nanosText(stall.takes)} for ${stall.role}`]),
      ["life", life ? this.life(life) : "takes no memory of its own"],
    ];
  }

  /** What occupies a lane for this node: of one in a bucket, the bucket's transfer. */
  spans(row, place) {
    const {program, report} = this.app, bucket = report.rows.bucket[row];
    const own = program.run.byNode.get(place);
    if (own || !bucket) return (own || []).map(span => [span, ""]);
    const first = program.run.spans.filter(span => report.rows.bucket[program.order[span.node]] === bucket);
    return first.map(span => [span, ", with its bucket"]);
  }

  life(life) {
    const {program, report} = this.app, name = at => report.text(program.order[at], "name");
    const last = life.gone - 1; // (`gone` is the first place at which it is not there any more)
    const end = life.gone < program.order.length ? [this.link(name(last)), ` (${last})`] : ["the end"];
    const kind = element("span", {}, coloured("swatch", colourName(program.memory.names[life.category])), program.memory.names[life.category]);
    return [kind, `, ${bytesText(life.bytes)}, from `, this.link(name(life.born)), ` (${life.born}) to `, ...end];
  }

  remarks(row) {
    const found = this.app.program.remarksOf(this.app.report.text(row, "name"));
    if (!found.length) return [];
    return [element("h3", {}, "Missed here"), ...found.map(remark => element("div", {class: "remark"}, `${remark.made_by}: ${remark.text}`))];
  }

  links(rows) {
    const {report} = this.app, shown = rows.slice(0, LINKS).map(row => this.link(report.text(row, "name")));
    const more = rows.length > LINKS ? element("span", {class: "note"}, `and ${rows.length - LINKS} more`) : null;
    return element("div", {class: "links"}, rows.length ? [shown, more] : element("span", {class: "note"}, "none"));
  }

  link(name) {
    return element("a", {href: this.app.address({node: name}), class: "mono"}, name);
  }

  parameter(name) {
    return element("a", {href: "#parameters", onclick: () => this.app.chooseParameter(name)}, name);
  }

  maker(name) {
    const at = this.app.program.passes.findIndex(pass => pass.name === name);
    return at < 0 ? name : element("a", {href: this.app.address({pass: name})}, name);
  }

  /** Operands to the left, readers to the right. */
  neighbourhood(row, operands, readers) {
    const sides = [operands, readers].map(rows => rows.slice(0, NEIGHBOURS));
    const count = Math.max(1, ...sides.map(rows => rows.length)), height = count * 24 + 26, middle = (height - 14) / 2;
    const drawn = [], lines = [];
    sides.forEach((rows, side) => rows.forEach((other, at) => {
      const y = middle + (at - (rows.length - 1) / 2) * 24;
      const [x, from, to] = side ? [248, 224, 248] : [4, 112, 136];
      lines.push(svg("path", {d: side ? `M${from} ${middle} C${to} ${middle} ${from} ${y} ${to} ${y}` : `M${from} ${y} C${to} ${y} ${from} ${middle} ${to} ${middle}`}));
      drawn.push(this.box(other, x, y, 108, ""));
    }));
    const hidden = [operands.length, readers.length].map((all, side) => all > NEIGHBOURS ? svg("text", {class: "more", x: side ? 302 : 58, y: height - 5, "text-anchor": "middle"}, `+${all - NEIGHBOURS} more`) : null);
    return svg("svg", {viewBox: `0 0 360 ${height}`, role: "img", "aria-label": "The node between its operands and its readers"}, lines, drawn, this.box(row, 136, middle, 88, "self"), hidden);
  }

  box(row, x, y, width, kind) {
    const name = this.app.report.text(row, "name"), short = shortened(name, Math.floor((width - 8) / 6.4));
    const label = svg("text", {x: x + width / 2, y: y + 4, "text-anchor": "middle"}, short);
    return svg("a", {href: this.app.address({node: name}), class: kind}, svg("title", {}, name), svg("rect", {x, y: y - 10, width, height: 20, rx: 4}), label);
  }
}

/** The end of a file's path, for the whole is long. */
function tail(path) {
  const parts = path.split("/");
  return parts.length > 3 ? `…/${parts.slice(-2).join("/")}` : path;
}

/** The style sheet's name of a memory category's colour. */
function colourName(category) {
  return category.startsWith("held") ? "held" : category;
}
