"""Inductor keeps what passes decided: order, numbers, what is saved; it says what it fused, and what it can't do."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.async_compile
from lowering import LAYERS, PRODUCTS, WIDTH, WORLD, Blocks, compiled_parts, ordered
from ranks import Ranks
from refusals import smallest
from sweeps import sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.executable import Executable
from zgraph.codegen.inductor import compile_inductor, launches
from zgraph.codegen.partition import split
from zgraph.errors import LoweringError
from zgraph.passes import graph_pass
from zgraph.passes.analysis.costs import size_of
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.program import collectives
from zgraph.program.node import Phase, Role, info
from zgraph.program.program import InputRole, Program

pytestmark = pytest.mark.inductor

aten = torch.ops.aten


@graph_pass("start_early", "each gather starts three products earlier; its wait stays", requires=("sharded",))
def start_early(program: Program) -> dict[str, int]:
    moved = 0
    at = {node: i for i, node in enumerate(program.nodes)}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        products = [n for n in at if n.target in PRODUCTS and info(n).phase is phase]
        for node in at:
            if collectives.is_start(node) and info(node).role is Role.GATHER and info(node).phase is phase:
                before = [p for p in products if at[p] < at[node]]
                if len(before) >= 3:
                    before[-3].prepend(node)
                    moved += 1
    return {"moved": moved}


@graph_pass(
    "wait_late",
    "each reduction is waited for three products later than the next one starts",
    requires=("reduced",),
)
def wait_late(program: Program) -> dict[str, int]:
    moved = 0
    at = {node: i for i, node in enumerate(program.nodes)}
    products = [n for n in at if n.target in PRODUCTS]
    for node in at:
        if collectives.is_wait(node) and info(node.all_input_nodes[0]).role is Role.REDUCE:
            after = [p for p in products if at[p] > at[node]]
            if len(after) >= 3:
                after[2].append(node)
                moved += 1
    return {"moved": moved}


# -- order --------------------------------------------------------------------------------------------------------
def products_between(executable: Executable, start: str, end: str) -> int:
    names = ordered(executable.program)
    return sum("mm" in name for name in names[names.index(start) : names.index(end)])


ALONE: dict[str, Any] = {"bucket": {"gather": 0, "reduce": 0}, "prefetch": {"enabled": False}}


def test_order_that_passes_decided_is_that_of_the_generated_code(group: dict[str, str]) -> None:
    early, late = f"{__name__}:start_early before release", f"{__name__}:wait_late"
    sharded = compiled_parts(Blocks(), (torch.randn(16, WIDTH),), group, early, late, **ALONE)
    for executable in sharded:
        assert [n.name for n in launches(executable.source, executable.program)] == ordered(executable.program)
    hidden = products_between(sharded[0], "gather_layers_3_up_weight", "whole_layers_3_up_weight")
    assert hidden >= 3, "the pass hid nothing behind products"
    assert products_between(sharded[1], "scatter_grad_layers_2_up_weight", "grad_layers_2_up_weight") >= 3


@sweep("zero", [0, 3], quick=1)
@pytest.mark.parametrize("bucket", [None, 0])
def test_the_schedule_of_the_plan_is_that_of_the_generated_code(
    group: dict[str, str], zero: int, bucket: int | None
) -> None:
    sizes = {"gather": bucket, "reduce": bucket}
    forward, backward = compiled_parts(Blocks(2), (torch.randn(16, WIDTH),), group, zero=zero, bucket=sizes)
    for executable in (forward, backward):
        assert [n.name for n in launches(executable.source, executable.program)] == ordered(executable.program)
    coalesced = "_coalesced" in forward.source + backward.source
    assert coalesced == (bucket is None), "a bucket is one collective"
    assert bool(forward.flying) == (zero == 3), "the backward's first gathers start in the forward"


class Tied(nn.Module):
    """The head's weight is the table: its gradient has a part from either end of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, WIDTH)
        self.blocks = Blocks(2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.table(indices)
        for layer in self.blocks.layers:
            x = layer(x)
        return (x @ self.table.weight.t()).logsumexp(-1).mean()


def test_the_first_part_of_a_gradient_is_computed_where_the_program_has_it(group: dict[str, str]) -> None:
    indices = torch.randint(0, 512, (2, 16))
    for executable in compiled_parts(Tied(), (indices,), group, zero=0):
        made = [n.name for n in launches(executable.source, executable.program) if n.target in PRODUCTS]
        assert made == [n.name for n in executable.program.graph.nodes if n.target in PRODUCTS]


class Residual(nn.Module):
    """What its sums begin with, the table's rows, is computed again for each of its layers where memory is scarce."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.table(indices)
        for layer in self.layers:
            x = x + torch.nn.functional.silu(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_what_is_computed_again_is_made_where_it_is_read_and_not_all_by_one_kernel(group: dict[str, str]) -> None:
    inputs = (torch.randint(0, 512, (8, 64)),)
    least = smallest(
        lambda: programs(Residual(), zgraph.Plan(mesh={"dp": WORLD}, zero=0, memory_budget=1), inputs, WORLD)
    )
    _, backward = compiled_parts(Residual(), inputs, group, zero=0, memory_budget=least)
    copies = [n for n in backward.program.graph.nodes if info(n).copy_of is not None and "embedding" in str(n.target)]
    assert len(copies) > 1
    body = backward.source[backward.source.index("def call(") :]
    calls = [c for c in re.findall(r"^ +cpp_fused\w*\(", body, re.M) if "embedding" in c and "dense" not in c]
    assert len(calls) == len(copies)


@pytest.mark.slow
def test_a_dead_buffer_is_held_within_what_values_take_without_weights(
    group: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config
    from torch._inductor.codegen.wrapper import EfficientPeakEstimate

    estimates: list[int] = []
    made = EfficientPeakEstimate.__init__

    def recorded(self: Any) -> None:
        made(self)
        estimates.append(self.overall_peak_memory)

    monkeypatch.setattr(EfficientPeakEstimate, "__init__", recorded)
    plan = zgraph.Plan(mesh={"dp": WORLD}, zero=0)
    forward = split(programs(Blocks(), plan, (torch.randn(2, 16, WIDTH),), WORLD).program).forward
    with config.patch(fx_graph_cache=False):
        compile_inductor(forward, group)
    peak = max(sum(m.values()) for m in memory_of(forward, True)) - sum(size_of(n) for n in forward.placeholders())
    assert abs(estimates[-1] / peak - 1) <= 0.05


@sweep("kind", ["convolutions", "convolutions, channels last"], quick=1)
@sweep("precision", ["fp32", "bf16"], quick=1)
def test_nothing_touches_what_is_in_flight_when_the_forward_ends(
    group: dict[str, str], kind: str, precision: str
) -> None:
    """Inductor would like convolutions' weights in another memory format: a copy of bytes that have not arrived. Nor is
    the operand of such a gather a copy, whose original would be freed while it is sent."""
    model, x = example(kind)
    bucket = {"gather": 0, "reduce": 0}
    forward, _ = compiled_parts(model, (x,), group, precision=precision, bucket=bucket)
    given = {p.name: (n, s) for (p, n), s in zip(forward.program.output_items(), forward.strides, strict=True)}
    starts = [given[name] for name in forward.flying]
    assert any(start.meta["val"].dim() == 4 for start, _ in starts)
    for start, strides in starts:
        assert strides == start.meta["val"].stride()
        operand = start.all_input_nodes[0]
        if operand.op != "placeholder":
            assert given[operand.name][1] == operand.meta["val"].stride()


class FusesAcross(nn.Module):
    """The last product of elements can be fused with the sine, and all that it needs would then run before `first`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.second(self.first(x.sin()))
        return y, x.cos() * self.scale


def test_fusion_does_not_pull_a_wait_before_products(group: dict[str, str]) -> None:
    forward, _ = compiled_parts(FusesAcross(), (torch.randn(256, WIDTH),), group)
    names = [n.name for n in launches(forward.source, forward.program)]
    assert names == ordered(forward.program)
    assert names.index("whole_scale") > names.index("mm_1")


# -- what is fused ------------------------------------------------------------------------------------------------
def fused_with(executable: Executable, *operators: str) -> bool:
    return any(set(operators) <= set(kernel.operators) for kernel in executable.kernels)


def alone(executable: Executable) -> set[str]:
    """What runs by a library call instead of a fused kernel."""
    return {operator for kernel in executable.library for operator in kernel.operators}


def test_norms_activations_and_residuals_are_fused(group: dict[str, str]) -> None:
    forward, backward = compiled_parts(Blocks(), (torch.randn(16, WIDTH),), group)
    assert fused_with(forward, "add", "native_layer_norm"), "a residual is fused with the norm that follows"
    assert fused_with(forward, "gelu")
    assert fused_with(backward, "gelu_backward", "gelu"), "the activation is computed again in its backward's kernel"
    assert fused_with(backward, "add", "native_layer_norm_backward")
    assert alone(forward) == {"addmm"} and alone(backward) <= {"mm", "addmm"}


def test_backward_computes_no_product_again(group: dict[str, str]) -> None:
    _, backward = compiled_parts(Blocks(), (torch.randn(16, WIDTH),), group)
    again = [n for n in backward.program.graph.nodes if n.op != "output" and info(n).copy_of is not None]
    assert again and not [n.name for n in again if n.target in PRODUCTS]
    products = sum(kernel.calls for kernel in backward.library)
    assert products == 4 * LAYERS, "two for each linear layer: the input's gradient and the weight's"


class CastsWeights(nn.Module):
    """Norm in float32 over products in bfloat16, as mixed precision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(x).bfloat16() @ self.weight.bfloat16())
        return (x + y.float()).pow(2).mean()


def test_casts_are_fused_and_an_average_needs_no_kernel(group: dict[str, str]) -> None:
    forward, backward = compiled_parts(CastsWeights(), (torch.randn(16, WIDTH),), group)
    assert "_to_copy" not in alone(forward) | alone(backward)
    casts = [k for k in forward.kernels if "_to_copy" in k.operators]
    assert casts and any(len(k.operators) > 1 for k in casts), "the activation's cast is part of the norm's kernel"
    # The gathered weight is cast by one kernel, once: a product's operand has to be in memory.
    assert sum(k.calls for k in casts if set(k.operators) == {"_to_copy"}) <= 1
    starts = [n for n in backward.program.graph.nodes if collectives.is_start(n) and info(n).role is Role.REDUCE]
    assert {collectives.reduce_op_of(n) for n in starts} == {"avg"}
    for start in starts:
        operand = start.all_input_nodes[0]
        assert operand.target not in (aten.div.Tensor, aten.mul.Tensor), "the reduction averages, no kernel scales"


def test_report_lists_kernels_with_their_operators_and_library_calls(not_compiled: None) -> None:
    model = zgraph.compile(Blocks(2), zgraph.Plan(), inputs=(torch.randn(16, WIDTH),))
    report = model.zgraph.report()
    operators = {operator for kernel in report.kernels() for operator in kernel.operators}
    assert {"native_layer_norm", "gelu", "add", "gelu_backward", "native_layer_norm_backward"} <= operators
    assert {k.name: k.calls for k in report.library_calls()}["extern_kernels.addmm"] == 4
    text = str(report)
    for kernel in report.kernels():
        assert kernel.calls > 0 and kernel.name in text
    assert "library calls: extern_kernels.addmm (4 times)" in text


# -- numbers ------------------------------------------------------------------------------------------------------
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(x + y).flatten(0, 1), tokens.flatten())


class Convolutions(nn.Module):
    """Whose first part wants channels last, so that Inductor chooses strides of its own for what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 16, 3, stride=2),
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(F.relu(self.norm(self.a(x))))
        return F.cross_entropy(self.head(F.silu(y).mean((2, 3))), torch.arange(len(x), device=x.device) % 5)


def example(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "attention":
        return Attention(), torch.randint(0, 50, (3, 17))
    if kind == "convolutions":
        return Convolutions(), torch.randn(4, 3, 12, 12)
    if kind == "convolutions, channels last":
        model = Convolutions().to(memory_format=torch.channels_last)
        return model, torch.randn(4, 3, 12, 12).to(memory_format=torch.channels_last)
    return Blocks(1), torch.randn(16, WIDTH)


KINDS = ["blocks", "convolutions", "convolutions, channels last", "attention"]


def relative(mine: torch.Tensor, plain: torch.Tensor) -> float:
    return float((mine - plain).norm() / plain.norm().clamp_min(1e-30))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_gradients_are_those_of_plain_pytorch(kind: str) -> None:
    model, x = example(kind)
    expected = model(x)
    expected.backward()
    plain, total = gradients(model), torch.stack([g.norm() for g in gradients(model).values()]).norm()
    twin, _ = example(kind)
    zgraph.compile(twin, zgraph.Plan(), inputs=(x,))
    loss = twin(x)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    mine = gradients(twin)
    assert mine.keys() == plain.keys()
    for name, grad in plain.items():
        # (a bias before BatchNorm has a gradient of zero, which is nothing but rounding)
        assert (mine[name] - grad).norm() <= 1e-5 * grad.norm() + 3e-7 * total, name


def train_convolutions(kind: str, zero: int | None) -> tuple[list[torch.Tensor], int]:
    """(losses, parameters and buffers after two updates of two micro-batches each, forwards that took whole weights).

    Every rank has the same batch, so that all is as in one process: `zero` None is plain PyTorch.
    """
    model, x = example(kind)
    if zero is not None:
        zgraph.compile(model, zgraph.Plan(zero=zero), inputs=(x,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[torch.Tensor] = []
    for _ in range(2):
        with model.no_sync() if zero is not None else contextlib.nullcontext():
            losses = [model(x)]
            losses[0].backward()
        losses.append(model(x))
        losses[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        results += [loss.detach() for loss in losses]
    whole = 0
    if zero is not None:
        parts = [e for step in model.zgraph.programs.values() for e in step.executables()]
        whole = sum(
            e.program.name.endswith("forward") and any(p.role is InputRole.UNSHARDED for p in e.program.inputs)
            for e in parts
        )
    state = [*model.parameters(), *model.buffers()]
    return results + [t.full_tensor() if hasattr(t, "full_tensor") else t.detach() for t in state], whole


def compare_convolutions(kind: str, zero: int) -> int:
    """On a rank: asserts that training is that of plain PyTorch; returns the forwards that took whole weights."""
    plain, _ = train_convolutions(kind, None)
    found, whole = train_convolutions(kind, zero)
    for mine, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
    return whole


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("kind", ["convolutions", "convolutions, channels last"])
def test_strides_that_inductor_chose_are_those_the_backward_reads(two: Ranks, kind: str, zero: int) -> None:
    """Of two forwards as well, where stages 1 and 2 have one that gathers and one that takes whole weights."""
    assert two.run(compare_convolutions, kind, zero) == [zero in (1, 2)] * 2


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * self.weight, 0.5, training=self.training)


@pytest.mark.slow
def test_the_backward_of_dropout_uses_the_forwards_mask() -> None:
    model = zgraph.compile(Drops(), zgraph.Plan())
    x = torch.rand(64, 64) + 0.5
    masks = []
    for _ in range(2):
        y = model(x)
        model.weight.grad = None
        y.sum().backward()
        # y = x * w * m with w = 1, so dy/dw = x * m = y: exactly the elements that the forward kept.
        torch.testing.assert_close(model.weight.grad, y.detach())
        masks.append(y.detach() != 0)
        assert 0.4 < masks[-1].float().mean() < 0.6
    assert not torch.equal(*masks), "each call draws a mask of its own"
    assert torch.equal(model.eval()(x), x)


# -- what it can't do ---------------------------------------------------------------------------------------------
def broken_lowering(x: object) -> object:
    raise NotImplementedError("this operator has no kernel here")


@torch.library.custom_op("zgraph_tests::unlowered", mutates_args=())
def unlowered(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@unlowered.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class UsesUnlowered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = unlowered(x)  # the line at fault
        return (y * self.scale).sum()


def line_of(text: str) -> str:
    with open(__file__) as file:
        return f"{__file__}:{next(i for i, line in enumerate(file, 1) if text in line)}"


@pytest.fixture
def refused() -> Iterator[None]:
    from torch._inductor.lowering import lowerings

    operator = torch.ops.zgraph_tests.unlowered.default
    lowerings[operator] = broken_lowering
    with torch._inductor.config.patch(fx_graph_cache=False):  # (the same graph may have been compiled before, whole)
        yield
    del lowerings[operator]


def test_an_operator_that_inductor_cant_lower_is_named_with_the_users_line(refused: None) -> None:
    model = UsesUnlowered()
    with pytest.raises(LoweringError) as caught:
        zgraph.compile(model, zgraph.Plan(), inputs=(torch.randn(8),))
    text = str(caught.value)
    assert "zgraph_tests.unlowered" in text
    assert line_of("# the line at fault") in text
    assert "this operator has no kernel here" in text
    assert "eager" in text


def test_eager_runs_what_inductor_cant(refused: None) -> None:
    model = zgraph.compile(UsesUnlowered(), zgraph.Plan(backend="eager"))
    x = torch.randn(8)
    model(x).backward()
    assert torch.equal(model.scale.grad, x)


@torch.library.custom_op("zgraph_tests::of_rows", mutates_args=())
def of_rows(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@of_rows.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class UsesOwnOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = of_rows(self.inner(x).transpose(0, 1))
        return (y.transpose(0, 1) * self.inner(x)).sum()


@pytest.mark.slow
def test_an_operator_of_ones_own_takes_all_lengths_in_one_program() -> None:
    """Inductor keeps to the layouts that a custom operator's inputs had at capture, whose sizes have other names since."""
    torch.manual_seed(0)
    plain = UsesOwnOperator()
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(shapes="dynamic"))
    for rows in (5, 3):
        x = torch.randn(rows, 4, 8)
        torch.testing.assert_close(model(x), plain(x))
    assert len(model.zgraph.runtime.entries) == 1


@pytest.mark.slow
def test_torchs_own_kernel_for_a_custom_operator_is_listed_not_hidden() -> None:
    model = zgraph.compile(UsesUnlowered(), zgraph.Plan(), inputs=(torch.randn(8),))
    assert "torch.ops.zgraph_tests.unlowered" in {k.name for k in model.zgraph.report().library_calls()}
    assert "torch.ops.zgraph_tests.unlowered" in str(model.zgraph.report())
