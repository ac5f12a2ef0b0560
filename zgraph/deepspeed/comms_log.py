"""The collectives of an engine's compiled steps, counted for `comms_logger` as their programs run.

A program lists each collective with its bytes, and every run of it sends exactly these, so nothing is intercepted. The
time of a single collective can't be measured, since others and the computation run beside it: torch's profiler measures
what one step waited for (`zgraph.runtime.timings`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from zgraph.deepspeed.comm import comms_logger
from zgraph.passes.analysis.costs import bytes_of, size_of
from zgraph.program import collectives
from zgraph.program.program import InputRole
from zgraph.runtime.memory import COMPILING
from zgraph.runtime.timings import Clock

if TYPE_CHECKING:
    from zgraph.program.program import Program

NAMES = {  # as DeepSpeed calls them
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}


def collectives_of(program: Program) -> Counter[tuple[str, int]]:
    """Count a program's collectives by name and bytes, where the bytes are those of the whole tensor that is gathered
    or reduced.

    Gathers that the update before may have started are counted too.
    """
    counts: Counter[tuple[str, int]] = Counter()
    for node in program.graph.nodes:
        if collectives.is_start(node):
            kind = collectives.kind(node)
            counts[NAMES.get(kind, kind), bytes_of(node)] += 1
    for node in program.input_nodes(InputRole.IN_FLIGHT).values():
        counts[NAMES["all_gather"], size_of(node)] += 1
    return counts


class CommsLog:
    """The count of one engine's collectives, from `watch` on, while `comms_logger` is enabled."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Program, Counter[tuple[str, int]]]] = {}
        self._clock: Clock | None = None
        self._steps = 0
        self._seen: dict[str, float] | None = None

    def watch(self, clock: Clock) -> None:
        """Count the programs that this clock reports."""
        if self._clock is not clock:
            self._clock, clock.on_ran, self._seen = clock, self._ran, clock.sampled

    def stepped(self, clock: Clock) -> None:
        """Count a step that has ended by this clock.

        If the model was cut or recompiled in it, its clock is a new one, and steps count from the next one on.
        """
        if not comms_logger.enabled or self._clock is not clock:
            self.watch(clock)
            return
        self._steps += 1
        comms_logger.steps += 1
        if clock.sampled is not None and clock.sampled is not self._seen:
            self._seen = clock.sampled
            for part, seconds in self._seen.items():
                comms_logger.waited[part].append(seconds)
        if comms_logger.wants_sample and self._steps >= COMPILING:
            comms_logger.wants_sample, clock.wants_sample = False, True

    def _ran(self, program: Program) -> None:
        if not comms_logger.enabled:
            return
        if id(program) not in self._known:
            self._known[id(program)] = program, collectives_of(program)
        for (name, size), count in self._known[id(program)][1].items():
            if comms_logger.wants(name):
                comms_logger.compiled[name, size] += count
