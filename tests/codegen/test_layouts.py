"""Strides: whatever a layer is given, and whatever its operators' fake implementations promise, numbers are those of plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from layout_cases import LAYERS, LAYOUTS, Between, weights
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.errors import LayoutError
from zgraph.program.tolerance import difference

KNOWN = [  # (operators of these have other strides than their fake implementations promise)
    ("layer_norm", "transposed"),
    ("encoder", "reversed"),
    ("dropout", "last"),
    ("reflect", "last"),
    ("replicate", "last"),
    ("log_softmax", "transposed"),
    ("smooth_l1", "last"),
    ("max_unpool", "last"),
    ("batch_norm_2d", "last"),
]
ENDS_THE_PROCESS = [("pdist", "none")]
"""In plain PyTorch: its backward of pdist reads memory that no rows have."""
BACKENDS = ("eager", "inductor")
# Each layer with two layouts, one on either backend, and in turn with all of them: what is wrong with a layout is wrong with every layer that
# looks at strides, and what is wrong with a layer with every layout but its own.
IN_TURN = [
    (backend, (layer, list(LAYOUTS)[(at + of * len(LAYOUTS) // 2 + at // len(LAYOUTS)) % len(LAYOUTS)]))
    for at, layer in enumerate(LAYERS)
    for of, backend in enumerate(BACKENDS)
]
ALL = [(backend, case) for backend, case in IN_TURN if case not in (*KNOWN, *ENDS_THE_PROCESS)]


def run(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The output and the gradients of a loss outside of the model."""
    torch.manual_seed(5)
    x = x.detach().clone().requires_grad_(True)
    model.zero_grad()
    out = model(x)
    (out * weights(out)).sum().backward()
    return {"output": out.detach(), "input": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


def refuse_differences(
    found: dict[str, torch.Tensor | None],
    plain: dict[str, torch.Tensor | None],
    exact: Callable[[], dict[str, torch.Tensor | None]] | None = None,
) -> None:
    """Refuse what is not plain PyTorch's but for rounding. Where terms of a sum cancel, float32 itself is far from float64's `exact` numbers: there
    `found` may be as far from these as plain PyTorch is, twice."""
    norm = math.sqrt(sum(float(v.norm()) ** 2 for v in plain.values() if v is not None))
    for name, expected in plain.items():
        mine = torch.zeros_like(expected) if found[name] is None and expected is not None else found[name]
        if mine is expected is None:
            continue
        compared = difference("value", name, 0, mine, expected, norm)
        if not compared.ok and exact is not None and isinstance(mine, torch.Tensor):
            truth = exact()[name]
            off, plainly_off = (float((v.double() - truth).norm()) for v in (mine, expected))
            assert off <= 2 * plainly_off, f"{compared}; from float64 {off:.3g}, plain PyTorch {plainly_off:.3g}"
            continue
        assert compared.ok, str(compared)


def compare(layer: str, layout: str, backend: str, scaled: bool = False) -> None:
    shape, make = LAYERS[layer]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Between(make(), LAYOUTS[layout], scaled)

    torch.manual_seed(1)
    x = torch.randn(shape)
    try:
        plain = run(model(), x)
    except (RuntimeError, IndexError, ValueError) as error:
        pytest.skip(f"plain PyTorch refuses: {error}")
    compiled = zgraph.compile(model(), zgraph.Plan(backend=backend))
    for _ in range(2):  # (the first run of a program decides what later ones lay out)
        refuse_differences(run(compiled, x), plain, lambda: run(model().double(), x.double()))


@sweep("layer, layout", KNOWN, quick=4)
def test_results_with_other_strides_than_promised_change_no_number(layer, layout):
    compare(layer, layout, "eager")


@sweep("backend, case", ALL, quick=(1, len(ALL) - 2), ids=str)
def test_any_layer_on_any_layout_gives_the_numbers_of_plain_pytorch(backend, case):
    compare(*case, backend, scaled=True)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.GroupNorm(1, 6)

    def forward(self, x):
        return self.g(x.transpose(1, 2)).transpose(1, 2)


@sweep("backend", ["inductor", "eager"], quick=1)
def test_norms_between_transposes(backend):
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), Norm(), nn.LayerNorm(6), Norm(), nn.Linear(6, 3))

    torch.manual_seed(1)
    x = torch.randn(4, 8, 5)
    refuse_differences(run(zgraph.compile(model(), zgraph.Plan(backend=backend)), x), run(model(), x))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_tangents_of_any_strides_are_those_of_plain_pytorch(backend):
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), Norm())

    torch.manual_seed(1)
    x, whole = torch.randn(4, 8, 5), torch.randn(8, 6, 8)
    compiled, plain = zgraph.compile(model(), zgraph.Plan(backend=backend)), model()
    for tangent in (whole[:4].mT, whole[::2].mT, whole[0].mT.expand(4, 8, 6), whole[:4, :, 0][:, None].expand(4, 8, 6)):
        for m in (compiled, plain):
            m.zero_grad()
            m(x).backward(tangent)
        for mine, its in zip(compiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-5)


def test_tangents_that_are_not_contiguous_are_right_on_virtual_ranks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), Norm())
    torch.manual_seed(1)
    x, w = torch.randn(4, 8, 5), torch.randn(4, 8, 6)
    made = zgraph.verify(model, zgraph.Plan(backend="eager"), 2, (x,), lambda out: (out * w[: len(out)]).sum())
    assert made.ok, str(made)


def test_a_program_lays_out_only_what_lies_otherwise():
    """After the first run the generated code is that of the program, but for these nodes."""
    model = zgraph.compile(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), zgraph.Plan(backend="eager"))
    x = torch.randn(4, 6)
    model(x).sum().backward()
    model(x).sum().backward()
    (entry,) = model.zgraph.runtime.entries.values()
    for executable in entry.program().executables():
        assert executable.function._others == {}
        assert executable.function._forward == executable.function.module.forward


def test_a_library_result_with_other_strides_is_laid_out_for_inductor():
    from zgraph.codegen.inductor import _as_promised

    value = torch.arange(6.0).view(3, 2).t()
    laid = _as_promised(value, (2, 3), (3, 1), "torch.ops.aten.some")
    assert laid.stride() == (3, 1) and torch.equal(laid, value)
    assert _as_promised(value, (2, 3), (1, 2), "torch.ops.aten.some") is value
    with pytest.raises(LayoutError, match="of size"):
        _as_promised(value, (3, 2), (2, 1), "torch.ops.aten.some")
