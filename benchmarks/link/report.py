"""From what was measured to tables, goals and a plot.

A result is plain data, as `overlap.py` writes it to JSON: `variants` has, by name, a `status` ("measured", "not installed"
or "failed") and by rate (in Gbit/s, as text; "0" is unlimited) the seconds of each step in `rounds`, and `link`, `ops`,
`held`, `peak` of one step. A step's time is the median over rounds of the medians of a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]
EQUAL = 1.3  # computing and the link take about as long where one takes less than so many times the other
TOLERANCE = 1e-4  # relative, of losses
WIRE_TOLERANCE = 0.05  # of those that send values in few bits
WIRE = (
    *("zgraph-bf16", "zgraph-int8", "zgraph-int4", "zgraph-auto"),
    *("ddp_fp16-eager", "ddp_powersgd-eager", "ddp_noop-eager"),  # (the last sends nothing at all)
)
HEADER = (
    "variant",
    "step",
    "min",
    "p25",
    "p75",
    "max",
    "of compute",
    "link",
    "ops",
    "exposed, own",
    "exposed, compute",
    "forecast",
    "forecast exposed",
    "held",
    "peak",
)
LEGEND = (
    "Step: seconds from a barrier to the end of the slower rank, median over rounds of each round's median; min to max are of "
    "all steps. Of compute: over the faster `local`. Link: seconds that a step's traffic takes the link at this rate; ops: "
    "its collectives. Exposed, own: (step - own step at unlimited rate) / link; exposed, compute: (step - compute alone) / "
    "link. Held: bytes of torch's CPU allocator between steps on rank 0 (parameters, optimizer state, and what a variant "
    "keeps); peak: the most during a step, which includes what is held."
)


@dataclass(frozen=True)
class Goal:
    """`measured` is to be `limit` at most; None where it was not measured."""

    text: str
    limit: float
    measured: float | None

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "met" if self.measured <= self.limit else "missed"


# -- figures ----------------------------------------------------------------------------------------------------------
def at(result: Result, variant: str, rate: str) -> dict[str, Any] | None:
    """What was measured of a variant at a rate. `local` was measured once for all rates."""
    rates = result["variants"].get(variant, {}).get("rates", {})
    return rates.get("0" if variant.startswith("local") else rate)


def step(result: Result, variant: str, rate: str) -> float | None:
    found = at(result, variant, rate)
    return statistics.median(statistics.median(seconds) for seconds in found["rounds"]) if found else None


def fastest(result: Result, variants: Iterable[str], rate: str) -> float | None:
    return min((s for v in variants if (s := step(result, v, rate)) is not None), default=None)


def compute(result: Result) -> float | None:
    return fastest(result, [v for v in result["variants"] if v.startswith("local")], "0")


def exposed(result: Result, variant: str, rate: str, without: float | None) -> float | None:
    """The part of the link's time that a step takes longer than `without` seconds."""
    found, seconds = at(result, variant, rate), step(result, variant, rate)
    if found is None or seconds is None or without is None or not found["link"]:
        return None
    return (seconds - without) / found["link"]


def spread(found: dict[str, Any]) -> tuple[float, float, float, float]:
    """min, lower quartile, upper quartile, max of all steps, in seconds."""
    seconds = sorted(s for one in found["rounds"] for s in one)
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return seconds[0], lower, upper, seconds[-1]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


# -- do they train the same -------------------------------------------------------------------------------------------
def losses(result: Result) -> dict[str, float]:
    """By variant, the largest relative difference of a loss from the reference, over ranks and steps.

    `local` is compared at its first step only: without communication its ranks drift apart.
    """
    known = {name: v["losses"] for name, v in result["variants"].items() if v.get("losses")}
    reference = result.get("reference") or next((v for n, v in known.items() if not n.startswith("local")), None)
    found = {}
    for name, ranks in known.items():
        if reference is None:
            continue
        steps = 1 if name.startswith("local") else None
        pairs = [
            p for mine, other in zip(ranks, reference, strict=True) for p in zip(mine[:steps], other, strict=False)
        ]
        # (a loss that is no number must not pass: every comparison with it is false)
        found[name] = max((abs(a - b) / abs(b) if a == a else float("inf")) for a, b in pairs)
    return found


NAMES = {"gpt": "GPT", "llama": "transformers' Llama", "gpt2": "transformers' GPT-2", "t5": "transformers' T5"}


# -- goals ------------------------------------------------------------------------------------------------------------
def goals(result: Result) -> list[Goal]:
    """What zgraph is to reach, and what it did. Where a peer is both eager and compiled, the better one counts."""
    stage2, stage3 = "zgraph-zero2", "zgraph-zero3"
    ddp, stock = ("ddp-eager", "ddp-compiled"), ("fully_shard-eager", "fully_shard-compiled")
    others = [v for v in result["variants"] if not v.startswith(("zgraph", "local"))]
    sharded = [v for v in others if not v.startswith("ddp")]
    alone = compute(result)

    def link(rate: str) -> float | None:
        return (at(result, stage3, rate) or {}).get("link")

    bound = max((x for x in (alone, link("2")) if x), default=None) if alone and link("2") else None
    own = exposed(result, stage3, "2", step(result, stage3, "0"))
    unlimited = step(result, stage3, "0")
    found = [
        Goal(
            "ZeRO-3 at 2 Gbit/s / compiled fsdp_async",
            0.80,
            _ratio(step(result, stage3, "2"), step(result, "fsdp_async-compiled", "2")),
        ),
        Goal("ZeRO-3 at 2 Gbit/s / max(compute alone, link)", 1.10, _ratio(step(result, stage3, "2"), bound)),
        Goal("ZeRO-3 at 2 Gbit/s: (step - own unlimited) / link", 0.08, own),
        Goal("ZeRO-3 at 1 Gbit/s / link", 1.03, _ratio(step(result, stage3, "1"), link("1"))),
        Goal("ZeRO-3 unlimited / fully_shard", 0.90, _ratio(unlimited, fastest(result, stock, "0"))),
        Goal("ZeRO-3 unlimited / compute alone", 1.12, _ratio(unlimited, alone)),
    ]
    for rate in result["rates"]:
        where = at_rate(rate)
        found += [
            Goal(f"ZeRO-2 {where} / DDP", 0.95, _ratio(step(result, stage2, rate), fastest(result, ddp, rate))),
            Goal(
                f"ZeRO-2 {where} / the fastest of all others",
                1.0,
                _ratio(step(result, stage2, rate), fastest(result, others, rate)),
            ),
            Goal(
                f"ZeRO-3 {where} / the fastest that shards weights",
                1.0,
                _ratio(step(result, stage3, rate), fastest(result, sharded, rate)),
            ),
            Goal(f"ZeRO-3 {where}: peak memory / fully_shard", 1.0, _ratio(*_peaks(result, stage3, stock, rate))),
        ]
        for what, name in (("ZeRO-2", stage2), ("ZeRO-3", stage3)):
            off, hidden = forecast_errors(result, name, rate)
            found.append(Goal(f"{what} {where}: the forecast step is off by, of the step", 0.10, off))
            if rate != "0":
                found.append(Goal(f"{what} {where}: forecast exposed communication, likewise", 0.15, hidden))
        found += _goals_as_it_comes(result, rate)
    return found


def _goals_as_it_comes(result: Result, rate: str) -> list[Goal]:
    """What ZeRO-3 is to reach at a rate of the link with nothing calibrated."""
    mine, where = step(result, "zgraph-itself", rate), at_rate(rate)
    peer, alone = step(result, "fsdp_async-compiled", rate), compute(result)
    link = (at(result, "zgraph-itself", rate) or {}).get("link")
    if mine is None or not link or alone is None:
        return []
    equal = max(alone, link) < EQUAL * min(alone, link)
    return [
        Goal(f"as it comes {where} / calibrated", 1.03, _ratio(mine, step(result, "zgraph-zero3", rate))),
        Goal(f"as it comes {where} / max(compute alone, link)", 1.15 if equal else 1.10, mine / max(alone, link)),
        Goal(f"as it comes {where} / compiled fsdp_async", 0.80 if equal else 1.00, _ratio(mine, peer)),
    ]


def forecast_errors(result: Result, variant: str, rate: str) -> tuple[float | None, float | None]:
    """How far the forecast is from what was measured, as parts of the step: of the step, and of communication exposed (what the
    step takes longer than at the unlimited rate)."""
    seconds, unlimited = step(result, variant, rate), step(result, variant, "0")
    forecast = (at(result, variant, rate) or {}).get("forecast")
    if seconds is None or forecast is None:
        return None, None
    off = abs(forecast["step"] - seconds) / seconds
    return off, None if unlimited is None else abs(forecast["exposed"] - max(seconds - unlimited, 0.0)) / seconds


def _peaks(result: Result, mine: str, others: Iterable[str], rate: str) -> tuple[float | None, float | None]:
    peaks = [p for v in others if (p := (at(result, v, rate) or {}).get("peak")) is not None]
    return (at(result, mine, rate) or {}).get("peak"), min(peaks, default=None)


# -- text -------------------------------------------------------------------------------------------------------------
def at_rate(rate: str) -> str:
    return "unlimited" if rate == "0" else f"at {rate} Gbit/s"


def _number(value: float | None, form: str = "{:.3f}", unit: str = "") -> str:
    return "" if value is None else form.format(value) + unit


def table(result: Result, rate: str) -> str:
    alone = compute(result)
    rows = [HEADER]
    for name, variant in result["variants"].items():
        found = at(result, name, rate)
        if found is None:
            rows.append((name, variant["status"], *[""] * (len(HEADER) - 2)))
            continue
        seconds = step(result, name, rate)
        forecast = found.get("forecast") or {}
        rows.append(
            (
                name,
                _number(seconds, unit=" s"),
                *(_number(s) for s in spread(found)),
                _number(_ratio(seconds, alone), "{:.2f}"),
                _number(found["link"], unit=" s"),
                _number(found["ops"], "{:g}"),
                _number(exposed(result, name, rate, step(result, name, "0")), "{:.0%}"),
                _number(exposed(result, name, rate, alone), "{:.0%}"),
                _number(forecast.get("step"), unit=" s"),
                _number(_ratio(forecast.get("exposed"), found["link"]), "{:.0%}"),
                _number(_ratio(found.get("held"), 1e6), "{:.4g}", " MB"),
                _number(_ratio(found.get("peak"), 1e6), "{:.4g}", " MB"),
            )
        )
    return _aligned(rows)


def _aligned(rows: list[tuple[str, ...]]) -> str:
    """A markdown table that can be read in a terminal: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("| " + " | ".join(cells) + " |")
    lines.insert(1, "|" + "-" * (widths[0] + 2) + "|" + "|".join("-" * (w + 1) + ":" for w in widths[1:]) + "|")
    return "\n".join(lines)


def goals_table(result: Result) -> str:
    rows = [("goal", "at most", "measured", "")]
    for goal in goals(result):
        rows.append((goal.text, f"{goal.limit:.2f}", _number(goal.measured, "{:.3f}"), goal.verdict))
    return _aligned(rows)


def losses_text(result: Result) -> str:
    found = losses(result)
    against = "data-parallel training in one process" if result.get("reference") else "the first variant's"
    text = f"Losses of the first 3 steps against {against}: largest relative difference "
    text += ", ".join(f"{name} {value:.1g}" for name, value in found.items())
    told = []
    for bound in sorted({allowed(name) for name in found}):
        wrong = [name for name, value in found.items() if allowed(name) == bound and not value <= bound]
        told.append(f"MORE THAN {bound}: {', '.join(wrong)}." if wrong else f"All within {bound}.")
    return f"{text}. {' Of those that send few bits: '.join(told)}"


def allowed(name: str) -> float:
    """By how much a variant's losses may differ."""
    return WIRE_TOLERANCE if name in WIRE else TOLERANCE


def conditions(result: Result) -> str:
    c, size = result["conditions"], result["size"]
    elsewhere = [e for v in result["variants"].values() for f in v["rates"].values() for e in f["elsewhere"]]
    busy = f"median {statistics.median(elsewhere):.0%}, at most {max(elsewhere):.0%}" if elsewhere else "unknown"
    return (
        f"Conditions: {c['date']}, {c['cpu']}, {c['cores']} cores, torch {c['torch']}, Python {c['python']}. "
        f"Products are MKL's, zgraph's {c['products']}'s. "
        f"{NAMES[result.get('model', 'gpt')]} of {result['parameters'] / 1e6:.1f} M parameters "
        f"({size['layers']} layers, width {size['dim']}), float32, SGD, "
        f"batch {size['batch']} x {size['seq']} a rank, 2 ranks with one core each and one thread, a modelled link of "
        f"{result['latency_us']:g} us a step. {c['rounds']} rounds of {c['steps']} steps after {c['warmup']} to warm up; each "
        f"variant in processes of its own, rounds go through all of them. What other processes used of all cores meanwhile: "
        f"{busy}."
    )


def markdown(result: Result) -> str:
    parts = ["# Overlap: training steps over a modelled link", f"`{result['conditions']['command']}`"]
    for rate in result["rates"]:
        parts += [f"## {at_rate(rate)[0].upper()}{at_rate(rate)[1:]}", table(result, rate)]
    parts += [f"{name} failed: {v['why']}" for name, v in result["variants"].items() if v["status"] == "failed"]
    parts += [LEGEND, "## Goals", goals_table(result), losses_text(result), conditions(result)]
    return "\n\n".join(parts) + "\n"


# -- plot -------------------------------------------------------------------------------------------------------------
def plot(result: Result, file: Path) -> None:
    """Step time by variant, grouped by rate, with lines for compute alone and each variant's link. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "zgraph"  # (the same figures give the same file)
    from matplotlib import pyplot

    names = [n for n, v in result["variants"].items() if v["rates"]]
    width = 0.84 / max(1, len(names))
    figure, axes = pyplot.subplots(figsize=(3 + 3 * len(result["rates"]), 5.5))
    colors = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    labels: dict[str, str] = {"link": "time of the variant's traffic on the link"}
    for i, name in enumerate(names):
        for group, rate in enumerate(result["rates"]):
            found, seconds = at(result, name, rate), step(result, name, rate)
            if found is None or seconds is None:
                continue
            x = group + (i - (len(names) - 1) / 2) * width
            _, lower, upper, _ = spread(found)
            error = [[max(0.0, seconds - lower)], [max(0.0, upper - seconds)]]
            axes.bar(
                x,
                seconds,
                width * 0.92,
                yerr=error,
                ecolor="#555555",
                color=colors[i % len(colors)],
                label=labels.pop(name, name) if group == 0 else None,
                edgecolor="black" if name.startswith("zgraph") else "none",
            )
            if found["link"]:
                axes.hlines(
                    found["link"],
                    x - width / 2,
                    x + width / 2,
                    colors="black",
                    linewidth=2,
                    label=labels.pop("link", None),
                )
    if (alone := compute(result)) is not None:
        axes.axhline(alone, color="black", linestyle="--", linewidth=1, label="compute alone")
    axes.set_xticks(range(len(result["rates"])), [at_rate(rate) for rate in result["rates"]])
    axes.set_ylabel("seconds a step")
    axes.set_title("Training step, 2 ranks over a modelled link")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(file, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
