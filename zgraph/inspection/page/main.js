// What is looked at: a program, a pass, a node. It stands in the page's address, so that links, Back and bookmarks work.
//
// A location is "#/PROGRAM/PASS/NODE"; an empty pass is the last one. Other addresses are sections of the page.

class App {
  constructor(report) {
    this.report = report;
    this.program = report.programs.get(report.main);
    this.pass = this.program.last;
    this.node = "";
    this.parameter = "";
    this.details = new Details(this);
    this.sections = new Map([
      [byId("pipeline"), new Pipeline(this)], [byId("graph"), new GraphBrowser(this)], [byId("memory"), new MemoryChart(this)],
      [byId("timeline"), new Timeline(this)], [byId("parameters"), new ParameterTable(this)],
    ]);
    this.waiting = new Map([...this.sections.keys()].map(section => [section, new Set()]));
    this.seen = new Set();
    this.choosePrograms();
    window.addEventListener("hashchange", () => this.arrive());
    this.watch();
  }

  get graph() {
    return this.program.graph(this.pass);
  }

  get pass_() {
    return this.program.passes[this.pass];
  }

  /** The chosen node's place in the finished program; undefined for none, and for one that is not in it. */
  get place() {
    return this.node ? this.program.places.get(this.report.number(this.node)) : undefined;
  }

  choosePrograms() {
    const select = byId("program"), kinds = {step: "forward and backward", update: "update", evaluation: "evaluation"};
    select.replaceChildren(...[...this.report.programs.values()].map(program => element("option", {value: program.name}, `${program.name} — ${kinds[program.kind]}`)));
    select.value = this.program.name;
    select.disabled = this.report.programs.size < 2;
    select.addEventListener("change", () => {
      location.hash = address(select.value, "", "");
    });
  }

  // -- choosing -----------------------------------------------------------------------------------------------------------
  /** The address of what is looked at now, but for what is given. */
  address({pass = this.pass === this.program.last ? "" : this.pass_.name, node = this.node, finished = false}) {
    return address(this.program.name, finished ? "" : pass, node);
  }

  /** Another pass takes the place of this one in the history: Back leads to where the slider was first moved. */
  choosePass(at) {
    const within = Math.max(0, Math.min(this.program.last, at));
    location.replace(this.address({pass: within === this.program.last ? "" : this.program.passes[within].name}));
  }

  chooseNode(name, {finished = false} = {}) {
    location.hash = this.address({node: name, finished});
  }

  chooseParameter(name) {
    this.parameter = name;
    byId("parameter-search").value = name;
    this.changed(new Set(["parameter"]));
  }

  /** Take what the address says. What it names and is not there is left as it was. */
  arrive() {
    if (!location.hash.startsWith("#/")) return;
    const [name, pass, node] = location.hash.slice(2).split("/").map(decodeURIComponent);
    const before = {program: this.program, pass: this.pass, node: this.node};
    this.program = this.report.programs.get(name) || this.program;
    const at = this.program.passes.findIndex(p => p.name === pass);
    this.pass = at < 0 ? this.program.last : at;
    this.node = node || "";
    byId("program").value = this.program.name;
    this.changed(new Set(Object.keys(before).filter(key => before[key] !== this[key])));
  }

  // -- drawing ------------------------------------------------------------------------------------------------------------
  /** Sections draw when they are first seen: the page can be used before the last of them is made. */
  watch() {
    const observer = new IntersectionObserver(entries => {
      for (const {target, isIntersecting} of entries) {
        if (isIntersecting) this.seen.add(target);
        else this.seen.delete(target);
      }
      this.draw();
    }, {rootMargin: "200px"});
    for (const section of this.sections.keys()) observer.observe(section);
    this.changed(new Set(["program", "pass", "node"]));
    this.arrive();
  }

  changed(what) {
    for (const waiting of this.waiting.values()) for (const item of what) waiting.add(item);
    this.details.draw();
    this.draw();
  }

  draw() {
    for (const section of this.seen) {
      const changed = this.waiting.get(section);
      if (!changed.size) continue;
      this.waiting.set(section, new Set());
      this.sections.get(section).draw(changed);
    }
  }
}

function address(program, pass, node) {
  return `#/${[program, pass, node].map(encodeURIComponent).join("/")}`;
}

async function start() {
  try {
    new App(new Report(await readData()));
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    const failure = byId("failure");
    failure.textContent = `The programs in this page can't be shown: ${error.message}`;
    failure.hidden = false;
    throw error;
  }
}

start();
