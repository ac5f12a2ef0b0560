"""Writes a bundle while a model runs: with ZGRAPH_BUNDLE=FOLDER set, rank 0 puts there what was compiled, and what was measured."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from zgraph.errors import BundleError
from zgraph.inspection import bundle
from zgraph.inspection.inspection import of_runtime

if TYPE_CHECKING:
    from zgraph.runtime import Runtime

logger = logging.getLogger(__name__)

VARIABLE = "ZGRAPH_BUNDLE"
MEASURED = (5, 20, 100)  # steps after which what was measured is written again


class Recorder:
    """The bundle of one running model. A folder that can't be written is refused when the model is compiled; what goes wrong later is
    logged and ends the recording, not the run."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime = runtime
        self.folder = folder
        self.written: set[str] = set()
        self.steps = 0
        self.changed = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe.{os.getpid()}"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise BundleError(
                "a bundle can't be written here", where=f"{VARIABLE}={folder}", why=error.strerror
            ) from error

    def compiled(self) -> None:
        """Programs were made: they are written when this step is over (and a first one now)."""
        self.changed = True
        if not self.written:
            self.write()

    def stepped(self) -> None:
        """A step is over."""
        self.steps += 1
        if self.changed or self.steps in MEASURED:
            self.write()

    def write(self) -> None:
        self.changed = False
        try:
            bundle.write(of_runtime(self.runtime), self.folder, self.written)
        except Exception as error:
            logger.warning("the bundle in %s is not written any more: %s", self.folder, error)
            self.runtime.recorder = None


def recorder_of(runtime: Runtime) -> Recorder | None:
    """What records a runtime, if someone wants that. A second model of the process gets a folder of its own beside the first's."""
    folder = os.environ.get(VARIABLE)
    if not folder or runtime.agreement.rank != 0:
        return None
    path = Path(folder)
    name, at = path, 1
    while name in _TAKEN:
        at += 1
        name = path.with_name(f"{path.name}-{at}")
    _TAKEN.add(name)
    return Recorder(runtime, name)


_TAKEN: set[Path] = set()
