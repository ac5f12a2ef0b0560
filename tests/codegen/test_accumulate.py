"""A backward that adds its gradients to sums: the same additions as those of whole gradients, made in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.accumulate import summing
from zgraph.codegen.eager import compile_eager
from zgraph.codegen.executable import Executable
from zgraph.codegen.inductor import adopt_strides, compile_inductor
from zgraph.codegen.partition import split
from zgraph.program.program import InputRole, OutputRole

ROLES = {
    InputRole.PARAMETER: "parameter",
    InputRole.INPUT: "input",
    InputRole.SAVED: "saved",
    InputRole.TANGENT: "tangent",
    InputRole.ACCUMULATOR: "sum",
}


class Net(nn.Module):
    """`left` and `right` have one gradient together, that of `far` has gaps: it is one number, seen as often as there are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.left, self.right = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
        self.far = nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.layer(x)) * (self.left + self.right)
        return hidden.pow(2).mean() + self.far.sum()


def compiled(backend: str) -> tuple[Net, list[Executable]]:
    """The model, and its forward, its backward, and the backward that adds to sums."""
    torch.manual_seed(0)
    model = Net()
    parts = split(programs(model, zgraph.Plan(backend=backend), (torch.randn(3, 6),), 1).program)
    assert parts.backward is not None
    if backend == "eager":
        return model, [compile_eager(p, {}) for p in (parts.forward, parts.backward, summing(parts.backward))]
    forward = compile_inductor(parts.forward, {})
    adopt_strides(parts.backward, forward)
    backwards = [compile_inductor(p, {}, is_backward=True) for p in (parts.backward, summing(parts.backward))]
    return model, [forward, *backwards]


def run(executable: Executable, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The outputs by their roles and names; `given` has the inputs likewise, those of one alone by their role."""
    ports = executable.program.inputs
    names = [f"{ROLES[p.role]} {p.name}" for p in ports]
    results = executable.run(
        [given[n] if n in given else given[ROLES[p.role]] for n, p in zip(names, ports, strict=True)]
    )
    return {f"{p.role} {p.name}": v for p, v in zip(executable.program.outputs, results, strict=True)}


@sweep("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)], quick=(0,))
def test_sums_are_those_of_whole_gradients_bit_for_bit_and_stay_where_they_are(backend: str) -> None:
    model, (forward, backward, onto) = compiled(backend)
    given: dict[str, Any] = {f"parameter {n}": p.detach() for n, p in model.named_parameters()}
    gradients = []
    for number in range(3):
        given |= {"input": torch.randn(3, 6), "tangent": torch.tensor(0.5 + number)}
        saved = {n: v for n, v in run(forward, given).items() if n.startswith(OutputRole.SAVED)}
        gradients.append({n: v.clone() for n, v in run(backward, given | saved).items()})
        if number == 0:
            sums = {n.replace("gradient", "sum"): g.clone() for n, g in gradients[0].items()}
            places = {n: s.data_ptr() for n, s in sums.items()}
        else:
            assert not run(onto, given | saved | sums), "a gradient that is in its sum is given, too"
    assert len(sums) == 5
    for name, total in sums.items():
        first, second, third = (g[name.replace("sum", "gradient")] for g in gradients)
        assert torch.equal(total, (first + second) + third), name
        assert total.data_ptr() == places[name] and second.any(), name


def test_a_program_without_gradients_stays_as_it_is() -> None:
    forward = split(programs(Net(), zgraph.Plan(), (torch.randn(3, 6),), 1).program).forward
    assert summing(forward).outputs == forward.outputs and summing(forward).inputs == forward.inputs
