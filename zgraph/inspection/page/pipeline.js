// The slider over the passes: what each is, what it took and did, and the program's text with what it changed.

const MARKS = {added: "+", removed: "−", moved: "↳", gone: "↰", former: "~", changed: "~"};
const CHANGES = ["added", "removed", "moved", "changed"];

class Pipeline {
  constructor(app) {
    this.app = app;
    this.lines = [];
    this.list = new VirtualList(byId("text"), 20, at => this.line(at));
    byId("pass").addEventListener("input", event => app.choosePass(Number(event.target.value)));
    byId("pass-before").addEventListener("click", () => app.choosePass(app.pass - 1));
    byId("pass-after").addEventListener("click", () => app.choosePass(app.pass + 1));
    for (const button of document.getElementsByName("text")) button.addEventListener("change", () => this.drawText());
    byId("text").addEventListener("click", event => this.click(event));
  }

  draw(changed) {
    if (changed.has("program")) this.drawNames();
    if (changed.has("program") || changed.has("pass")) {
      this.drawSlider();
      this.drawCard();
      this.drawText();
    } else this.list.redraw(); // (another node is the chosen one)
  }

  drawNames() {
    const {passes} = this.app.program;
    const slider = byId("pass"), count = passes.length;
    slider.max = count - 1;
    // The slider's ends stand over the middle of the first and the last name.
    slider.style.width = `calc(${100 - 100 / count}% + 16px)`;
    slider.style.marginLeft = `calc(${50 / count}% - 8px)`;
    byId("pass-names").replaceChildren(...passes.map((pass, at) => {
      const idle = pass.changed && !CHANGES.some(what => pass.changed[what]);
      const choose = () => this.app.choosePass(at);
      return element("li", {}, element("button", {type: "button", class: idle && "idle", onclick: choose, title: pass.summary}, breakable(pass.name)));
    }));
  }

  drawSlider() {
    const {program, pass} = this.app, slider = byId("pass");
    slider.value = pass;
    slider.setAttribute("aria-valuetext", program.passes[pass].name);
    byId("pass-before").disabled = pass === 0;
    byId("pass-after").disabled = pass === program.last;
    [...byId("pass-names").children].forEach((item, at) => {
      if (at === pass) item.firstChild.setAttribute("aria-current", "step");
      else item.firstChild.removeAttribute("aria-current");
    });
  }

  drawCard() {
    const {program, pass} = this.app, facts = program.passes[pass];
    const left = element("div", {}, element("h3", {}, facts.name), element("p", {class: "said"}, facts.summary), passFacts(facts));
    const figures = [["Step time", "seconds", secondsText], ["Exposed", "exposed", secondsText], ["Peak", "peak", bytesText]];
    const right = figures.map(([name, key, text]) => this.measure(name, key, text));
    byId("pass-card").replaceChildren(left, element("div", {class: "measures"}, right));
  }

  /** A figure of the program after this pass, how it changed, and a bar for every pass. */
  measure(name, key, text) {
    const {program, pass} = this.app;
    const values = program.passes.map(p => p.figures[key]), now = values[pass];
    const by = pass ? now - values[pass - 1] : 0;
    const way = by < 0 ? "better" : "worse";
    const note = pass && by ? element("p", {class: `note ${way}`}, signed(by, text)) : element("p", {class: "note"}, pass ? "as before" : "at capture");
    return element("div", {}, element("p", {class: "note"}, name), element("p", {class: "figure"}, text(now)), note, this.bars(name, values, text));
  }

  bars(name, values, text) {
    const most = Math.max(...values, 1e-12), {pass, program} = this.app;
    const bars = values.map((value, at) => {
      const height = Math.max(2, 40 * value / most);
      const title = svg("title", {}, `after ${program.passes[at].name}: ${text(value)}`);
      const place = {x: at * 10 + 1, y: 42 - height, width: 8, height, rx: 1};
      return svg("rect", {...place, class: at === pass && "now", onclick: () => this.app.choosePass(at)}, title);
    });
    return svg("svg", {viewBox: `0 0 ${values.length * 10} 44`, preserveAspectRatio: "none", role: "img", "aria-label": `${name} after each pass`}, bars);
  }

  drawText() {
    const {program, pass, report} = this.app;
    const whole = document.querySelector("input[name=text]:checked").value === "whole";
    const after = program.graph(pass).lines;
    byId("text").setAttribute("aria-label", `The program after ${program.passes[pass].name}`);
    if (whole || !pass) this.lines = Array.from(after, (row, at) => ({mark: "", row, at: at + 1}));
    else this.lines = folded(numbered(changedLines(report, program.graph(pass - 1).lines, after, program.passes[pass].moved)));
    if (!whole && pass && this.lines.length === 1 && this.lines[0].fold) this.lines = [];
    byId("change-count").textContent = this.said(whole);
    this.show();
  }

  said(whole) {
    const {program, pass} = this.app;
    if (!pass) return "the captured program, whole: there is none before it";
    if (whole) return countText(this.lines.length, "line");
    const {changed} = program.passes[pass];
    const counts = CHANGES.filter(what => changed[what]).map(what => `${changed[what].toLocaleString("en")} ${what}`);
    return counts.length ? `nodes: ${counts.join(", ")}` : "no node is another";
  }

  show() {
    const {text} = this.app.report.rows;
    const letters = this.lines.reduce((most, line) => Math.max(most, line.fold ? 0 : text[line.row].length), 0);
    this.list.show(this.lines.length, letters);
  }

  line(at) {
    const line = this.lines[at], {report, node} = this.app;
    if (line.fold) return element("div", {class: "line fold", "data-fold": at, role: "button"}, `⋯ ${countText(line.fold.length, "line")} as before — show`);
    const name = report.text(line.row, "name");
    const kind = `line ${line.mark}${name ? "" : " heading"}${name && name === node ? " chosen" : ""}`;
    const text = this.lineText(line);
    return element("div", {class: kind, "data-node": name || false},
      element("span", {class: "at"}, line.at ? String(line.at) : ""), element("span", {class: "mark"}, MARKS[line.mark] || ""), element("span", {}, text));
  }

  lineText(line) {
    const {text} = this.app.report.rows;
    const [code, comment] = parted(text[line.row]);
    if (line.pair === undefined) return [code, element("span", {class: "comment"}, comment)];
    const [otherCode, otherComment] = parted(text[line.pair]);
    return [underlined(otherCode, code), element("span", {class: "comment"}, underlined(otherComment, comment))];
  }

  click(event) {
    const line = event.target.closest(".line");
    if (!line) return;
    if (line.dataset.fold !== undefined) this.unfold(Number(line.dataset.fold));
    else if (line.dataset.node) this.app.chooseNode(line.dataset.node);
  }

  unfold(at) {
    const top = this.list.viewport.scrollTop;
    this.lines.splice(at, 1, ...this.lines[at].fold);
    this.show();
    this.list.viewport.scrollTop = top;
  }
}

/** Lines with the numbers that they have in the program after the pass. */
function numbered(lines) {
  let at = 0;
  for (const line of lines) if (!["removed", "gone", "former"].includes(line.mark)) line.at = ++at;
  return lines;
}

/** Code, and the comment behind it with the blanks before that. */
function parted(text) {
  const at = text.indexOf("  # "), end = at < 0 ? text.length : text.slice(0, at).trimEnd().length;
  return [text.slice(0, end), text.slice(end)];
}

/** A text with what another has not marked. */
function underlined(other, text) {
  const [start, middle, end] = difference(other.trimStart(), text.trimStart());
  const blanks = text.length - text.trimStart().length;
  return [text.slice(0, blanks), start, middle ? element("mark", {}, middle) : "", end];
}

/** A name that may be broken behind its underscores. */
function breakable(name) {
  return name.split(/(?<=_)/).flatMap(part => [part, element("wbr", {})]);
}

function passFacts(facts) {
  const chips = names => names.map(name => element("span", {class: "chip"}, name));
  const all = entries => entries.map(([name, value]) => element("span", {class: "chip mono"}, `${name} = ${JSON.stringify(value)}`));
  const options = Object.entries(facts.options), stats = Object.entries(facts.stats);
  const kept = [facts.bitwise && "keeps every bit", facts.level && `level becomes ${facts.level}`].filter(Boolean).join(", ");
  return pairs([
    ["requires", facts.requires.length ? chips(facts.requires) : ""],
    ["provides", facts.provides.length ? chips(facts.provides) : ""],
    ["conflicts", facts.conflicts.length ? chips(facts.conflicts) : ""],
    ["contract", kept],
    ["options", options.length ? all(options) : ""],
    ["counts", stats.map(([name, count]) => `${count.toLocaleString("en")} ${name.replaceAll("_", " ")}`).join(", ")],
    ["nodes", facts.nodes.toLocaleString("en")],
    ["values", facts.bytes && (facts.bytes.removed || facts.bytes.added) ? `${bytesText(facts.bytes.removed)} gone, ${bytesText(facts.bytes.added)} new` : ""],
    ["took", `${facts.seconds.toFixed(3)} s, verified in ${facts.verify_seconds.toFixed(3)} s`],
  ]);
}
