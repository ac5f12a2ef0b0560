"""Bar charts of the benchmarks' results, drawn as SVG from the tables in `benchmarks/results/`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

ROW, GROUP_GAP, LABEL, WIDTH, VALUE = 18, 10, 250, 720, 70
COLORS = ("#1e88e5", "#fb8c00", "#43a047", "#8e24aa")


@dataclass(frozen=True)
class Plot:
    """What is drawn of a page: the columns of its first table that label a row, and those that are bars, by their numbers."""

    title: str
    labels: tuple[int, ...]
    bars: dict[str, int]


PLOTS = {
    "checkpoint": Plot("Seconds", (0,), {"zgraph": 1, "plain torch.distributed.checkpoint, or the copy": 3}),
    "compile_time": Plot("Seconds by number of layers", (0,), {"trace": 2, "joint": 3, "passes": 4, "verify": 5}),
    "context_parallel": Plot("MiB for 32,768 tokens, by ranks and kind of attention", (0, 1), {"forecast": 2}),
    "inspection": Plot("Seconds", (0,), {"seconds": 1}),
    "memory": Plot("Seconds a step, by budget", (0,), {"zgraph": 5, "torch at that peak": 9}),
    "offload": Plot("Peak, in MB", (0,), {"everything in memory": 2, "everything on disk": 3}),
    "pipeline": Plot("Share of a step in which ranks are idle, in percent", (0,), {"measured": 3, "formula": 4}),
    "precision": Plot("Loss by step", (0,), {"fp32": 1, "bf16": 2, "fp16": 3}),
    "tensor_parallel": Plot("Seconds a step", (0, 1), {"zgraph": 2, "torch": 3}),
    "update": Plot("Milliseconds an update", (0,), {"time": 1}),
    "whatif": Plot("Seconds", (0,), {"wall clock": 1}),
}


def first_table(markdown: str) -> list[list[str]]:
    """The cells of the rows of the first table, without its header."""
    found = re.search(r"^\|.*\|\n\|[-:| ]+\|\n((?:\|.*\|\n)+)", markdown, re.M)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in found[1].splitlines()] if found else []


def number(cell: str) -> float | None:
    """The number that a cell begins with."""
    found = re.match(r"\d+(\.\d+)?", cell)
    return float(found[0]) if found else None


def groups(markdown: str, plot: Plot) -> list[tuple[str, dict[str, float]]]:
    """The label of each row that has a number for the first bar, and its bars."""
    found = []
    for cells in first_table(markdown):
        values = {name: number(cells[column]) for name, column in plot.bars.items()}
        shown = {name: value for name, value in values.items() if value is not None}
        if next(iter(plot.bars)) in shown:
            found.append((" ".join(cells[column] for column in plot.labels if cells[column]), shown))
    return found


def draw(markdown: str, plot: Plot) -> str:
    """The chart of a page's results, as a figure in HTML."""
    rows = groups(markdown, plot)
    largest = max(value for _, bars in rows for value in bars.values())
    scale = (WIDTH - LABEL - VALUE) / largest
    parts, top = [], 24
    for at, name in enumerate(plot.bars):
        left = LABEL + at * 150
        parts.append(f'<rect x="{left}" y="2" width="12" height="12" fill="{COLORS[at]}"/>')
        parts.append(f'<text x="{left + 17}" y="12">{escape(name)}</text>')
    for label, bars in rows:
        middle = top + len(bars) * ROW / 2 + 4
        parts.append(f'<text x="{LABEL - 10}" y="{middle:.0f}" text-anchor="end">{escape(label[:42])}</text>')
        for name, value in bars.items():
            color = COLORS[list(plot.bars).index(name)]
            wide = value * scale
            parts.append(f'<rect x="{LABEL}" y="{top}" width="{wide:.1f}" height="{ROW - 3}" fill="{color}"/>')
            parts.append(f'<text x="{LABEL + wide + 6:.1f}" y="{top + 12}">{value:g}</text>')
            top += ROW
        top += GROUP_GAP
    picture = f'<svg viewBox="0 0 {WIDTH} {top}" role="img" font-size="12" fill="currentColor">{"".join(parts)}</svg>'
    return f"<figure>{picture}<figcaption>{escape(plot.title)}</figcaption></figure>"


def with_plot(name: str, markdown: str) -> str:
    """A page of results with its chart after the heading."""
    if name not in PLOTS:
        return markdown
    heading, _, rest = markdown.partition("\n")
    return f"{heading}\n\n{draw(markdown, PLOTS[name])}\n{rest}"
