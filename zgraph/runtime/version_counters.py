"""Checks that what a backward reads is as it was at its forward: versions that autograd counts are noted at the
forward, and compared before the backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zgraph.errors import StepError
from zgraph.program.program import InputRole
from zgraph.torch_compat import tensor_storage

if TYPE_CHECKING:
    from zgraph.build.step_program import StepProgram
    from zgraph.capture.capture import Trace
    from zgraph.capture.storages import Sharing

KINDS = {InputRole.INPUT: "the input", InputRole.BUFFER: "the buffer", InputRole.CONSTANT: "the tensor"}


class VersionCounters:
    """The versions of one forward of `step`. Those of what a program writes itself are noted after the write."""

    def __init__(
        self, trace: Trace, step: StepProgram, sharing: Sharing, of_param: Callable[[str], tuple[int, ...]]
    ) -> None:
        self.trace = trace
        self.step = step
        self.sharing = sharing
        self.of_param = of_param
        self.inputs: list[int | None] = []
        self.outputs: list[tuple[int, torch.Tensor, int]] = []
        self.params: dict[str, tuple[int, ...]] = {}

    def note(self, flat: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Note the versions after the forward."""
        self.params = {name: self.of_param(name) for name in self.trace.parameters}
        self.inputs = [None] * len(flat)
        for at in self.trace.others:
            if isinstance(flat[at], torch.Tensor):
                self.inputs[at] = tensor_storage.version(flat[at])
        for index in self.sharing.read_outputs:
            # (an output itself would hold autograd's node of this call; a detached tensor shares its version)
            seen = outputs[index].detach()
            self.outputs.append((index, seen, tensor_storage.version(seen)))

    def check(self, flat: Sequence[Any], *, whole: bool) -> None:
        """Raise `StepError`, a `RuntimeError` with autograd's words, if something that the backward reads has changed.
        With `whole` the forward runs again, and reads all of its inputs; those that it writes to are kept as they were.
        """
        late, weights = self.step.read_late
        inputs = range(len(flat)) if whole else late | self.sharing.read_inputs
        for at in sorted(inputs):
            value, then = flat[at], self.inputs[at]
            if then is None or (whole and at in self.step.mutated) or tensor_storage.version(value) == then:
                continue
            port = self.trace.inputs[at]
            name = port.name if port.role is InputRole.BUFFER else self.trace.source(at)
            raise self._changed(
                f"{KINDS.get(port.role, 'the input')} {name!r}", "write to it after the backward, or give a copy"
            )
        if not whole:
            for index, seen, then in self.outputs:
                if tensor_storage.version(seen) != then:
                    raise self._changed(
                        f"output {index} of the model (counted flat)",
                        "write x = x * 2 for x.mul_(2), or write to a clone of it",
                    )
        read = self.params if whole else (weights | self.sharing.read_params) & self.params.keys()
        for name in self.params:
            if name in read and self.of_param(name) != self.params[name]:
                raise self._changed(
                    f"the parameter {name!r}", "run the backward before an optimizer's step, a load, or a write"
                )

    def _changed(self, what: str, hint: str) -> StepError:
        return StepError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}",
            where=f"the backward of {self.step.name}",
            why="it was written to between the forward and its backward, which reads it as it was at the forward",
            hint=hint,
        )
