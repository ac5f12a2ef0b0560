"""Run a plan's update on virtual ranks in one process, from the gradients of a step, for `zgraph bisect`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from zgraph.build.update_program import trained, update_history
from zgraph.passes import History, PassRecord
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.program.tolerance import Difference, difference
from zgraph.update import scaler
from zgraph.update.build_update import AHEAD, EMA, MASTER, NONFINITE, scalar_names, states_of
from zgraph.verification.virtual_ranks import coordinates, run_virtual
from zgraph.verification.virtual_step import Results, VirtualStep, shard_of

_SHOWN = {InputRole.PARAMETER: "parameter", InputRole.STATE: "state"}


class VirtualUpdate:
    """The update that follows a step. `records` are its program after each pass, as `passed` returns them.

    It is the second update with the same gradients, so that states no longer have their initial values. `share` is the
    share of the states that is offloaded. No pass is verified here.
    """

    def __init__(
        self, step: VirtualStep, share: float | None, passed: Callable[[Callable[[], History]], list[PassRecord]]
    ) -> None:
        self.step = step
        self.members, self.options = trained(step.model, step.specs, step.plan, share)
        plain = (step.plan, self.members, step.specs, step.sizes, step.device, self.options)
        self.records = passed(lambda: update_history(*plain, verified=False))
        self._held = [self._first(rank) for rank in range(len(step.ranks))]
        roles = {shown: role for role, shown in _SHOWN.items()}
        for inputs, results in zip(self._held, self.of_program(self.records[0].program), strict=True):
            inputs |= {(roles[what], name): value for (what, name), value in results.items() if what in roles}

    def of_program(self, program: Program) -> Results:
        """Return the parameters, states and outputs after an update, whether the program returns them or writes them in
        place."""
        given = [
            [inputs[p.role, p.name].clone(memory_format=torch.preserve_format) for p in program.inputs]
            for inputs in self._held
        ]
        results: Results = []
        for inputs, values in zip(given, run_virtual(program, given), strict=True):
            rank_results = {
                (_SHOWN[p.role], p.name): value  # type: ignore[index]
                for p, value in zip(program.inputs, inputs, strict=True)
                if p.role in _SHOWN
            }
            for port, value in zip(program.outputs, values, strict=True):
                if port.role is OutputRole.OUTPUT:
                    rank_results["output", port.name] = value
                elif port.role is OutputRole.MUTATION and port.of in _SHOWN:
                    rank_results[_SHOWN[port.of], port.name] = value  # type: ignore[index]
            results.append(rank_results)
        return results

    def differences(self, results: Results, bound: float | None = None) -> list[Difference]:
        """Return how far each result is from that of the update before any pass. `bound`: see
        `zgraph.program.tolerance.difference`."""
        return [
            difference(what, name, rank, values.get((what, name)), plain, bound=bound)
            for rank, (values, expected) in enumerate(zip(results, self._expected, strict=True))
            for (what, name), plain in expected.items()
        ]

    @cached_property
    def _expected(self) -> Results:
        return self.of_program(self.records[0].program)

    def _first(self, rank: int) -> dict[tuple[Any, str], torch.Tensor]:
        """Return the inputs of a rank's first update."""
        step, options = self.step, self.options
        inputs: dict[tuple[Any, str], torch.Tensor] = {}
        for member in self.members:
            spec = step.specs[member.name]
            param = shard_of(step.params[member.name], spec, rank, step.sizes)
            inputs[InputRole.PARAMETER, member.name] = param
            inputs[InputRole.GRADIENT, member.name] = step.gradient(member.name, rank)
            inputs[InputRole.STATE, member.count] = torch.zeros((), dtype=torch.float64)
            for key, state in states_of(member, spec, options).items():
                tensor = torch.full(state.shape, state.fill, dtype=state.dtype)
                inputs[InputRole.STATE, f"{member.name}/{key}"] = (
                    tensor.copy_(param) if key in (MASTER, EMA, AHEAD) else tensor
                )
        for key, first in (scaler.initial(options.loss_scale) if options.loss_scale else {}).items():
            inputs[InputRole.STATE, f"/{key}"] = first
        inputs[InputRole.STATE, f"/{NONFINITE}"] = torch.tensor(0)
        inputs[InputRole.SCALARS, "scalars"] = torch.tensor(self._numbers(), dtype=torch.float64)
        for dim, at in coordinates(step.sizes, rank).items():
            inputs[InputRole.RANK_INDEX, dim] = torch.tensor(at)
        return inputs

    def _numbers(self) -> list[float]:
        """Return the scalars of the update: the plan's learning rates and other options, and 1.0 for factors on
        gradients and the loss."""
        records = {m.group: m.record for m in self.members}
        numbers = []
        for group, path in scalar_names(self.members, self.options):
            key, _, at = path.partition(".")
            value: Any = 1.0 if group < 0 else getattr(records[group], key)
            numbers.append(float(value[int(at)] if at else value))
        return numbers
