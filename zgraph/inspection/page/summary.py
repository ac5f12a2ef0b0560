"""The part of the page that is shown before any script runs: the subject, the forecast beside measurements, the plan
and the remarks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from zgraph.inspection.inspection import EVALUATION, STEP, UPDATE, Inspection
from zgraph.inspection.memory import Peak, peak_of, total_at
from zgraph.units import milliseconds, shown_bytes

KINDS = {STEP: "forward and backward", UPDATE: "update", EVALUATION: "evaluation"}


def title_of(inspection: Inspection) -> str:
    """Return the page's title, escaped."""
    return escape(inspection.origin or "a model")


def summary_of(inspection: Inspection) -> str:
    """Return figures, programs and plan as HTML."""
    peak = peak_of(inspection)
    return "\n".join([_about(inspection), _cards(inspection, peak), _programs(inspection), _plan(inspection)])


def remarks_of(inspection: Inspection) -> str:
    """Return the passes' remarks, the costliest first, as HTML."""
    rows = inspection.remarks()
    if not rows:
        return '<p class="empty">No pass reports a missed chance.</p>'
    head = ("missed", "why", "cost of a step", "remedy", "by", "program")
    cells = [
        (
            f"<strong>{escape(r['what'])}</strong> {_link(r['program'], r['node'])}",
            escape(r["why"]),
            f'<span class="nowrap">+{float(r["seconds"]) * 1e3:.3g} ms</span>',
            escape(r["remedy"]),
            escape(r["made_by"]),
            escape(r["program"]),
        )
        for r in rows
    ]
    return _table(head, cells, numbers=(2,))


def _about(inspection: Inspection) -> str:
    costs, plan = inspection.costs, inspection.plan
    sizes = inspection.way().last.program.mesh
    mesh = " × ".join(f"{name} {size}" for name, size in sizes.items()) or "none"
    rates = "as measured" if costs.hardware.measured else "at data-sheet rates"
    ranks = f"{inspection.world} rank{'s' if inspection.world != 1 else ''}"
    facts = [
        ("world", ranks),
        ("mesh", mesh),
        ("hardware", f"{costs.hardware.name}, {rates}"),
        ("backend", plan.backend),
    ]
    rows = [f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in facts]
    return f'<dl class="about">{"".join(rows)}</dl>'


def _cards(inspection: Inspection, peak: Peak) -> str:
    step, measured = inspection.forecast, inspection.measured
    share = f"{step.exposed / step.seconds:.1%} of the step" if step.seconds else ""
    capacity = f"{peak.bytes / inspection.costs.hardware.capacity:.1%} of the device's memory"
    missed = inspection.remarks()
    cost = sum(float(r["seconds"]) for r in missed)
    cards = [
        _card(
            "Step time",
            milliseconds(step.seconds),
            "forecast",
            _beside(measured.get("seconds"), step.seconds, milliseconds),
        ),
        _card("Exposed communication", milliseconds(step.exposed), share),
        _card("Peak memory", shown_bytes(peak.bytes), capacity, _beside(measured.get("peak"), peak.bytes, shown_bytes)),
        _card("Missed chances", str(len(missed)), f"+{cost * 1e3:.3g} ms a step" if missed else "nothing was missed"),
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(name: str, figure: str, note: str, measured: str = "") -> str:
    number, _, unit = figure.partition(" ")
    shown = f"{escape(number)} <small>{escape(unit)}</small>"
    return f'<div class="card"><h3>{name}</h3><p class="figure">{shown}</p><p class="note">{escape(note)}</p>{measured}</div>'


def _beside(measured: float | None, forecast: float, shown: Any) -> str:
    """Return a measurement, and how far the forecast is from it, as HTML; "" without one."""
    if not measured:
        return ""
    off = f"forecast {(forecast - measured) / measured:+.1%}"
    return f'<p class="measured"><strong>{escape(shown(measured))}</strong> measured ({off})</p>'


def _programs(inspection: Inspection) -> str:
    forecasts = inspection.forecasts()
    lanes = list(dict.fromkeys(lane for _, forecast in forecasts for lane in forecast.busy))
    head = (
        "program",
        "what",
        "nodes",
        "passes",
        "time",
        *(f"{lane} busy" for lane in lanes),
        "exposed",
        "moved",
        "peak",
    )
    rows = []
    for way, forecast in forecasts:
        moved = ", ".join(f"{lane} {shown_bytes(size)}" for lane, size in sorted(forecast.moved.items()))
        busy = [milliseconds(forecast.busy[lane]) if lane in forecast.busy else "–" for lane in lanes]
        cells = [way.name, KINDS[way.kind], str(len(forecast.clock)), str(len(way.snapshots) - 1)]
        cells += [milliseconds(forecast.seconds), *busy, milliseconds(sum(forecast.exposed.values())), moved or "–"]
        rows.append([escape(cell) for cell in (*cells, shown_bytes(total_at(way, forecast)[0]))])
    return _table([escape(name) for name in head], rows, numbers=range(2, len(head)))


def _plan(inspection: Inspection) -> str:
    from zgraph.plan.plan import Plan

    usual = Plan().model_dump(mode="json")
    chosen = {key: value for key, value in inspection.plan_data.items() if value != usual.get(key)}
    shown = "".join(f"<code>{escape(key)} = {escape(_short(value))}</code>" for key, value in chosen.items())
    whole = escape(json.dumps(inspection.plan_data, indent=2, ensure_ascii=False))
    said = (
        f"{len(chosen)} of {len(inspection.plan_data)} fields differ from the default plan"
        if chosen
        else "the default plan"
    )
    return f'<details class="plan"><summary><b>Plan</b> {shown or "the default one"}</summary><p>{said}</p><pre>{whole}</pre></details>'


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _link(program: str, node: str) -> str:
    """Return a link that selects a node (see "location" in main.js); "" without a node."""
    from urllib.parse import quote

    return (
        f'<a class="mono" href="#/{quote(program, safe="")}//{quote(node, safe="")}">{escape(node)}</a>' if node else ""
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Return a table with these heads, whose cells are HTML already. The columns in `numbers` are aligned to the
    right."""
    right = set(numbers)

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=number' if at in right else ''}>{cell}</{tag}>" for at, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{line(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'
