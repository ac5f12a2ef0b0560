"""Writes a bundle while a model runs: with ZGRAPH_BUNDLE=FOLDER set, rank 0 puts there what was compiled, and what was measured. Of a
pipeline it has the stages of the first position along "pp", and FOLDER-pp1 those of the next."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from zgraph.errors import BundleError
from zgraph.inspection import bundle
from zgraph.inspection.make_inspection import of_runtime

if TYPE_CHECKING:
    from zgraph.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

VARIABLE = "ZGRAPH_BUNDLE"
MEASURED = (5, 20, 100)  # steps after which what was measured is written again

_taken: set[Path] = set()  # folders of this process's models


class Recorder:
    """The bundle of one running model. What goes wrong while it runs is logged and ends the recording, not the run."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime = runtime
        self.folder = folder
        self.written: set[str] = set()
        self.steps = 0

    def of(self, runtime: Runtime) -> Recorder:
        """A recorder of the same model's next run time, which is compiled anew, for the same folder."""
        return Recorder(runtime, self.folder)

    def compiled(self) -> None:
        """A program was made: it is written now, should nothing come after it. (Pages of what there is are made once here.)"""
        self._write(views=not self.written)

    def stepped(self) -> None:
        """A step is over: its update is there, and from time to time there is more that was measured."""
        self.steps += 1
        updates = self.runtime.updater.programs.histories().keys()
        if self.steps in MEASURED or not updates <= self.written:
            self._write(views=True)

    def _write(self, *, views: bool) -> None:
        try:
            bundle.write(of_runtime(self.runtime), self.folder, self.written, views=views)
        except Exception as error:
            logger.warning("the bundle in %s is not written any more: %s", self.folder, error)
            self.runtime.recorder = None


def record(runtime: Runtime) -> None:
    """Let a bundle be written of this model, where someone wants that. A second model of the process gets a folder beside the first's.
    Raises `BundleError` on every rank where one that is to write can't.
    """
    folder = os.environ.get(VARIABLE)
    if not runtime.everyone.any("a bundle", bool(folder)):
        return
    position = runtime.stage_position()
    mine = f"{folder}-pp{position}" if folder and position else folder

    def refused(rank: int, said: str) -> BundleError:
        return BundleError(f"rank {rank} can't write a bundle", where=f"{VARIABLE}={folder}", why=said)

    first = runtime.agreement.first()
    runtime.recorder = runtime.everyone.together(
        "the bundle", lambda: Recorder(runtime, _folder(mine)) if first and mine else None, refused
    )


def _folder(wanted: str) -> Path:
    """The first folder of this name that no model of the process has; it can be written into."""
    path, at = Path(wanted), 1
    while path in _taken:
        at += 1
        path = Path(f"{wanted}-{at}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe.{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise BundleError("a bundle can't be written here", where=f"{VARIABLE}={wanted}", why=error.strerror) from error
    _taken.add(path)
    return path
