"""Write a bundle while a model runs: with ZGRAPH_BUNDLE=FOLDER set, rank 0 writes what was compiled and measured. Of a
pipeline, FOLDER gets the stages of the first position along "pp", FOLDER-pp1 those of the next."""

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
MEASURED = (5, 20, 100)  # steps after which measurements are written again

_taken: set[Path] = set()  # folders that models of this process write to


class Recorder:
    """The writer of one running model's bundle. An error is logged and ends the recording, not the run."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime = runtime
        self.folder = folder
        self.written: set[str] = set()
        self.steps = 0

    def of(self, runtime: Runtime) -> Recorder:
        """Return a recorder for the same folder, for the next run time of the same model, which is compiled anew."""
        return Recorder(runtime, self.folder)

    def compiled(self) -> None:
        """Write a new program at once, in case the run ends early. The files made of programs are written with the
        first one only."""
        self._write(views=not self.written)

    def stepped(self) -> None:
        """Write the update's programs after the first step that made them, and measurements after the steps in
        `MEASURED`."""
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
    """Start to write a bundle of this model if any rank has ZGRAPH_BUNDLE set. A second model of the process gets a
    folder beside the first's. Raises `BundleError` on every rank if the rank that is to write can't."""
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
    """Choose the first folder of this name that no model of the process has, and check that it can be written. Raises
    `BundleError`."""
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
