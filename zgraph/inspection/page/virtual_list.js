// A list of which only the rows that can be seen are in the page: twenty thousand cost what forty do.

const SPARE = 12; // rows above and below, so that a scroll finds something there

class VirtualList {
  /** `draw(index)` makes the element of a row; all rows have the same height. */
  constructor(viewport, height, draw) {
    this.viewport = viewport;
    this.height = height;
    this.draw = draw;
    this.count = 0;
    this.shown = "";
    this.window = element("div", {class: "window"});
    this.space = element("div", {class: "space"}, this.window);
    viewport.replaceChildren(this.space);
    viewport.addEventListener("scroll", onceAFrame(() => this.refresh()), {passive: true});
    new ResizeObserver(() => this.redraw()).observe(viewport);
  }

  /** Show so many rows, of so many letters at most, from the top. */
  show(count, letters = 0) {
    this.count = count;
    this.space.style.height = `${count * this.height}px`;
    this.space.style.width = letters ? `${letters + 14}ch` : "";
    this.viewport.scrollTop = 0;
    this.redraw();
  }

  redraw() {
    this.shown = "";
    this.refresh();
  }

  refresh() {
    const {scrollTop, clientHeight} = this.viewport;
    const first = Math.max(0, Math.floor(scrollTop / this.height) - SPARE);
    const end = Math.min(this.count, Math.ceil((scrollTop + clientHeight) / this.height) + SPARE);
    if (this.shown === `${first} ${end}`) return;
    this.shown = `${first} ${end}`;
    const rows = [];
    for (let at = first; at < end; at++) rows.push(this.draw(at));
    this.window.style.transform = `translateY(${first * this.height}px)`;
    this.window.replaceChildren(...rows);
  }

  /** Scroll as little as is needed to see a row, which then has others around it. */
  reveal(index) {
    const top = index * this.height, {scrollTop, clientHeight} = this.viewport;
    if (top < scrollTop || top + this.height > scrollTop + clientHeight) {
      this.viewport.scrollTop = Math.max(0, top - clientHeight / 3);
    }
    this.refresh();
  }
}
