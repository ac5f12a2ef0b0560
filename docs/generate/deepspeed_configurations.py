"""The pages on DeepSpeed's configurations: what became of each key, and the forecast of a step, by the functions that users call.

    python docs/generate/deepspeed_configurations.py [NAME ...]     # writes docs/migrate/deepspeed/, by default all of it (minutes)

A page is of a file in `examples/deepspeed/configs/`. `tests/deepspeed/test_configuration_pages.py` holds pages to what is written here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from zgraph import deepspeed
from zgraph.deepspeed.report import VERDICTS, Report, shown
from zgraph.plan import planfile
from zgraph.plan.plan import Plan
from zgraph.units import shown_bytes

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples/deepspeed/configs"
PAGES = ROOT / "docs/migrate/deepspeed"
INDEX = "configurations"
WORLD, HARDWARE, LENGTH = 8, "h100-80g", 1024
TITLES = {  # in the order of the index
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero2_offload": "ZeRO-2 with the optimizer on the host",
    "zero3_offload": "ZeRO-3 with weights and optimizer on the host",
    "zero_infinity": "ZeRO-Infinity",
    "zero_plus_plus": "ZeRO++: fewer bits on the wire",
    "mics": "MiCS: sharding within groups of ranks",
    "bf16": "bf16, reduced in fp32",
    "fp16": "fp16 with a dynamic loss scale",
    "activation_checkpointing": "Activation checkpointing on the host",
    "pipeline": "A pipeline",
    "tensor_parallel": "Tensor parallelism",
    "sequence_parallel": "Sequence parallelism",
    "one_cycle": "The 1-cycle schedule",
    "onebit_adam": "1-bit Adam",
}
FORECAST = "## What a step takes"
MODEL = (
    "a GPT of 306 M parameters (4 layers of width 2048, 50,304 words), sequences of 1,024 tokens, 8 ranks of H100 at the rates of its "
    "data sheet: a lower bound, for comparing"
)


def config_of(name: str) -> Path:
    return CONFIGS / f"{name}.json"


def report_of(name: str) -> Report:
    return deepspeed.report(config_of(name), world=WORLD)


def head(name: str) -> str:
    """A page as far as it needs no forecast: the configuration, its keys, the plan."""
    report = report_of(name)
    parts = [
        f"# {TITLES[name]}",
        f"DeepSpeed's configuration ([{name}.json](../../../examples/deepspeed/configs/{name}.json)), as its documents write it, on {WORLD} ranks. "
        "[From DeepSpeed](../deepspeed.md) explains the verdicts.",
        f"```json\n{config_of(name).read_text().strip()}\n```",
        "## What became of each key",
        _keys(report),
    ]
    if report.plan is not None:
        parts += ["## The plan", f"```toml\n{_as_toml(report.plan)}\n```"]
    return "\n\n".join(parts) + "\n"


def _keys(report: Report) -> str:
    lines = ["| key | value | verdict | what it is here |", "| --- | --- | --- | --- |"]
    for verdict in VERDICTS:
        for row in report.rows:
            if row.verdict == verdict:
                value = "not given" if row.implied else f"`{shown(row.value)}`"
                said = f"{row.said}. To do: {row.hint}" if row.hint else row.said
                lines.append(f"| `{row.key}` | {value} | {verdict} | {said.replace('|', '/')} |")
    return "\n".join(lines)


def _as_toml(plan: Plan) -> str:
    given = plan.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    for field in ("optimizer", "lr_schedule"):  # (whose names are their defaults)
        record = getattr(plan, field)
        if record is not None:
            given[field] = {"name": record.name} | given.get(field, {})
    return planfile.render(given, Path("plan.toml")).strip()


# -- the forecast -------------------------------------------------------------------------------------------------------------
@cache
def _model() -> Any:
    """On the meta device: nothing of it is computed."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from link.gpt import GPT, Size
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    with torch.device("meta"):
        return GPT(Size(layers=4, dim=2048, vocab=50304, positions=LENGTH, seq=LENGTH))


@cache
def forecast_of(name: str) -> tuple[str, str] | None:
    """(what `zgraph forecast` prints of the plan, the step's time and peak for the index); None where there is no plan."""
    from zgraph.forecast.stages import forecast_pipeline
    from zgraph.inspection.make_inspection import of_model
    from zgraph.inspection.memory import peak_of

    plan = report_of(name).plan
    if plan is None:
        return None
    plan = plan.model_copy(update={"hardware": HARDWARE})
    rows = json.loads(config_of(name).read_text())["train_micro_batch_size_per_gpu"] * plan.micro_batches
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
    if plan.pipeline_ranks(WORLD) > 1:
        whole = forecast_pipeline(_model(), plan, (tokens, tokens), WORLD)
        return str(whole), _row(whole.seconds, whole.worst.peak)
    found = of_model(_model(), plan, (tokens, tokens), WORLD)
    peak = peak_of(found)
    text = f"{found.forecast}\npeak: {shown_bytes(peak.bytes)} in {peak.program}, with what is held besides it"
    return text, _row(found.forecast.seconds, peak.bytes)


def _row(seconds: float, peak: int) -> str:
    return f"{seconds * 1e3:.1f} ms | {shown_bytes(peak)}"


def page(name: str) -> str:
    """A whole page."""
    made = forecast_of(name)
    if made is None:
        return head(name)
    return f"{head(name)}\n{FORECAST}\n\nBy `zgraph forecast`, of {MODEL}.\n\n```text\n{made[0].rstrip()}\n```\n"


def index(rows: Sequence[str]) -> str:
    """The page that leads to the others, from its rows (`index_row`)."""
    parts = [
        "# DeepSpeed's configurations",
        "One page for each kind of configuration that DeepSpeed's documents show: what `zgraph.deepspeed.plan` makes of each key, the plan, and "
        "what `zgraph forecast` says of a step. The files are in `examples/deepspeed/configs/`; `zgraph check FILE --world 8` prints the same keys.",
        f"Of {MODEL}. Batches differ between the files, so compare with a look at the pages.",
        "\n".join(["| configuration | a step | peak of a rank |", "| --- | ---: | ---: |", *rows]),
    ]
    return "\n\n".join(parts) + "\n"


def index_row(name: str) -> str:
    made = forecast_of(name)
    return f"| [{TITLES[name]}]({name}.md) | {made[1] if made is not None else 'refused | '} |"


def main() -> None:
    names = sys.argv[1:] or list(TITLES)
    PAGES.mkdir(exist_ok=True)
    for name in names:
        (PAGES / f"{name}.md").write_text(page(name))
        print(f"{name}: {forecast_of(name) and forecast_of(name)[1]}", flush=True)  # type: ignore[index]
    if names == list(TITLES):
        (PAGES / f"{INDEX}.md").write_text(index([index_row(name) for name in names]))


if __name__ == "__main__":
    main()
