"""Metrics of a run, written by rank 0 to CSV files, TensorBoard or Weights & Biases.

The metrics and their names ("Train/Samples/lr") are DeepSpeed's, over the rows trained on so far. TensorBoard and wandb are written by their own
libraries.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from zgraph.deepspeed import comm
from zgraph.errors import PlanError

Event = tuple[str, float, int]  # name, value, rows so far
Writer = Callable[[Iterable[Event]], None]
_JOB = "DeepSpeedJobName"  # (DeepSpeed's default)


class Monitor:
    """The monitors that a configuration enables. Raises `PlanError` on every rank if the library of one is not
    installed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        wanted = {name: config[name] for name in _WRITERS if (config.get(name) or {}).get("enabled")}
        for name in wanted:
            _refuse_missing(name)
        self.enabled = bool(wanted)
        self._writers = [_WRITERS[name](section) for name, section in wanted.items()] if comm.get_rank() == 0 else []

    def write_events(self, events: Iterable[Event]) -> None:
        """Write the events (name, value, position) on rank 0; do nothing on other ranks."""
        events = list(events)
        for write in self._writers:
            write(events)


def _refuse_missing(name: str) -> None:
    for library in _LIBRARIES.get(name, ()):
        if importlib.util.find_spec(library) is None:
            raise PlanError(
                f"the library {library} is not installed", where=f"{name}.enabled", hint=f"pip install {library}"
            )


def _folder(section: Mapping[str, Any]) -> Path:
    folder = Path(section.get("output_path") or "") / (section.get("job_name") or _JOB)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _csv(section: Mapping[str, Any]) -> Writer:
    folder = _folder(section)
    begun: set[Path] = set()

    def write(events: Iterable[Event]) -> None:
        for name, value, position in events:
            path = folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if path not in begun:
                    begun.add(path)
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([position, value])

    return write


def _tensorboard(section: Mapping[str, Any]) -> Writer:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(log_dir=str(_folder(section)))

    def write(events: Iterable[Event]) -> None:
        for event in events:
            writer.add_scalar(*event)
        writer.flush()

    return write


def _wandb(section: Mapping[str, Any]) -> Writer:
    wandb = importlib.import_module("wandb")
    wandb.init(project=section.get("project") or "deepspeed", group=section.get("group"), entity=section.get("team"))

    def write(events: Iterable[Event]) -> None:
        for name, value, position in events:
            wandb.log({name: value}, step=position)

    return write


_WRITERS: dict[str, Callable[[Mapping[str, Any]], Writer]] = {
    "csv_monitor": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
_LIBRARIES = {"tensorboard": ("tensorboard",), "wandb": ("wandb",)}
