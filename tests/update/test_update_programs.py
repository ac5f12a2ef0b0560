"""Update programs on virtual ranks, given the same gradients as torch's own optimizers, or a reference of the paper.

What torch.optim has is compared bit for bit with its `foreach=False` path on whole parameters, for any number of ranks.
The references below are written from the papers, in float64, one number at a time as they stand there.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sweeps import product, sweep
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import get_ema_multi_avg_fn

import zgraph
from zgraph.build.planned_step import update_program
from zgraph.build.update_program import update_options
from zgraph.parameters.layout import layout
from zgraph.plan.loss_scaling import LossScale
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.torch_compat import aot
from zgraph.update import assembler, scaler
from zgraph.update.adamw8bit import dequantize, dynamic_map, quantize
from zgraph.update.build_update import scalar_names, states_of
from zgraph.update.parameter_groups import members_of
from zgraph.verification.virtual_ranks import coordinates, run_virtual
from zgraph.verification.virtual_step import shard_of

pytestmark = pytest.mark.core

ROUNDING = 1e-6  # a norm or mean summed in another order, in float32 (6e-8 a number)


class Parameters(nn.Module):
    """Rows that no world here divides, two parameters of one shape, one of no dimension, and a convolution's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.up = nn.Parameter(torch.randn(5, 7))
        self.down = nn.Parameter(torch.randn(7, 5))
        self.bias = nn.Parameter(torch.randn(5))
        self.other_bias = nn.Parameter(torch.randn(5))
        self.conv = nn.Parameter(torch.randn(4, 3, 2))
        self.gain = nn.Parameter(torch.randn(()))

    def forward(self):
        raise NotImplementedError


def parameters() -> nn.Module:
    torch.manual_seed(0)
    return Parameters()


def gradients(model: nn.Module, steps: int, size: float = 1.0) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        yield {
            n: torch.randn(p.shape, generator=generator) * size * 10.0 ** (step % 3 - 1)
            for n, p in model.named_parameters()
        }


class Virtual:
    """An update program on virtual ranks, with its states and shards."""

    def __init__(self, plan: zgraph.Plan, world: int) -> None:
        model = parameters()
        self.program: Program = update_program(model, plan, world).program
        self.sizes = plan.resolve_mesh(world)
        self.specs = layout(model, self.sizes, plan.zero, plan.param_persistence_threshold, plan.resolved_precision())
        self.world = world
        members = members_of(model, self.specs, plan.optimizer)
        options = update_options(plan, members, self.specs)
        groups = {m.group: m.record for m in members}
        self.numbers = []
        for group, path in scalar_names(members, options):
            key, _, at = path.partition(".")
            self.numbers.append(getattr(groups[group], key)[int(at)] if at else getattr(groups[group], key))
        self.ranks: list[dict[tuple[InputRole, str], torch.Tensor]] = []
        for rank in range(world):
            held = {}
            for name, param in model.named_parameters():
                held[InputRole.PARAMETER, name] = self.shard(name, param.detach(), rank)
            for member in members:
                for key, state in states_of(member, self.specs[member.name], options).items():
                    made = torch.full(state.shape, state.fill, dtype=state.dtype)
                    if key in ("master", "ema"):
                        made.copy_(held[InputRole.PARAMETER, member.name])
                    held[InputRole.STATE, f"{member.name}/{key}"] = made
            held[InputRole.STATE, "/step"] = torch.zeros((), dtype=torch.float64)
            if options.loss_scale:
                for key, first in scaler.initial(options.loss_scale).items():
                    held[InputRole.STATE, f"/{key}"] = first.clone()
            self.ranks.append(held)

    def shard(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        return shard_of(whole, self.specs[name], rank, self.sizes).clone()

    def step(self, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The program's plain outputs on rank 0 (they are the same on all)."""
        inputs = []
        for rank, held in enumerate(self.ranks):
            given = dict(held)
            given |= {(InputRole.GRADIENT, n): self.shard(n, g, rank) for n, g in grads.items()}
            given[InputRole.SCALARS, "scalars"] = torch.tensor(self.numbers, dtype=torch.float64)
            for dim, at in coordinates(self.sizes, rank).items():
                given[InputRole.RANK_INDEX, dim] = torch.tensor(at)
            inputs.append([given[p.role, p.name] for p in self.program.inputs])
        results = run_virtual(self.program, inputs)
        shown = [
            {p.name: v for p, v in zip(self.program.outputs, values, strict=True) if p.role is OutputRole.OUTPUT}
            for values in results
        ]
        assert all(
            torch.equal(shown[0][k].nan_to_num(-1.0), other[k].nan_to_num(-1.0)) for other in shown for k in other
        )
        return shown[0]

    def whole(self, name: str, role: InputRole = InputRole.PARAMETER) -> torch.Tensor:
        spec = self.specs[name.partition("/")[0]]
        parts = [held[role, name] for held in self.ranks]
        if spec.shard_dim is None:
            assert all(torch.equal(parts[0], p) for p in parts)
            return parts[0]
        assert not torch.cat(parts)[spec.shape[0] :].any(), "padding is no longer zero"
        return torch.cat(parts)[: spec.shape[0]]

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: self.whole(n) for n in self.specs}


def plan_of(record: Any, zero: int = 3, **more: Any) -> zgraph.Plan:
    return zgraph.Plan(backend="eager", zero=zero, optimizer=record, param_persistence_threshold=0, **more)


def trained(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> dict[str, torch.Tensor]:
    for grads in gradients(model, steps):
        for name, param in model.named_parameters():
            param.grad = grads[name].clone()
        for optimizer in optimizers:
            optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


# -- what torch.optim has -------------------------------------------------------------------------------------------------
CASES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "AdamW": (zgraph.AdamW, {"lr": 1e-2}),
    "AdamW without decay": (zgraph.AdamW, {"lr": 1e-2, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-5}),
    "AdamW amsgrad": (zgraph.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "AdamW maximize": (zgraph.AdamW, {"lr": 1e-2, "maximize": True}),
    "Adam": (zgraph.Adam, {"lr": 3e-3}),
    "Adam with decay": (zgraph.Adam, {"lr": 3e-3, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "SGD": (zgraph.SGD, {"lr": 0.1}),
    "SGD with decay": (zgraph.SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "SGD momentum": (zgraph.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD nesterov": (zgraph.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adagrad": (zgraph.Adagrad, {"lr": 0.1}),
    "Adagrad all": (
        zgraph.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "maximize": True},
    ),
}


@sweep("world,zero", [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 0), (4, 1), (4, 2), (4, 3)], quick=1)
@pytest.mark.parametrize("case", list(CASES))
def test_updates_are_torchs_bit_for_bit(case, world, zero):
    record, arguments = CASES[case]
    mine = Virtual(plan_of(record(**arguments), zero), world)
    for grads in gradients(parameters(), 6):
        mine.step(grads)
    model = parameters()
    theirs = getattr(torch.optim, record.__name__)(model.parameters(), foreach=False, **arguments)
    expected = trained(model, [theirs], 6)
    assert all(torch.equal(mine.whole(n), expected[n]) for n in expected)
    assert float(mine.ranks[0][InputRole.STATE, "/step"]) == 6


@product(
    "world, arguments",
    [1, 2, 4],
    [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}],
    together=1,
)
def test_muon_is_torchs_bit_for_bit(world, arguments):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    mine = Virtual(plan_of(zgraph.Muon(lr=1e-2, companion=zgraph.AdamW(lr=3e-3), **arguments)), world)
    for grads in gradients(parameters(), 4):
        mine.step(grads)
    model = parameters()
    matrices = [model.up, model.down]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    both = [torch.optim.Muon(matrices, lr=1e-2, **arguments), torch.optim.AdamW(rest, lr=3e-3, foreach=False)]
    expected = trained(model, both, 4)
    assert all(torch.equal(mine.whole(n), expected[n]) for n in expected)


def test_groups_have_numbers_of_their_own():
    groups = (zgraph.ParamGroup(match="*bias", lr=0.1), zgraph.ParamGroup(match="embed.*", weight_decay=0.5))
    mine = Virtual(plan_of(zgraph.AdamW(lr=1e-2, groups=groups, decay="matrices")), 2)
    for grads in gradients(parameters(), 3):
        mine.step(grads)
    model = parameters()
    theirs = torch.optim.AdamW(
        [
            {"params": [model.up, model.down, model.conv]},
            {"params": [model.gain], "weight_decay": 0.0},
            {"params": [model.bias, model.other_bias], "lr": 0.1, "weight_decay": 0.0},
            {"params": [model.embed.weight], "weight_decay": 0.5},
        ],
        lr=1e-2,
        foreach=False,
    )
    expected = trained(model, [theirs], 3)
    assert all(torch.equal(mine.whole(n), expected[n]) for n in expected)


# -- references from papers -----------------------------------------------------------------------------------------------
def lion(p, g, state, step, *, lr, betas, weight_decay):
    """Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2."""
    m = state.setdefault("m", torch.zeros_like(p))
    direction = torch.sign(betas[0] * m + (1 - betas[0]) * g)
    state["m"] = betas[1] * m + (1 - betas[1]) * g
    return p - lr * (direction + weight_decay * p)


def lamb(p, g, state, step, *, lr, betas, eps, weight_decay, bias_correction, min_coeff, max_coeff):
    """You et al., 2019, "Large Batch Optimization for Deep Learning", Algorithm 2; phi cuts the ratio between two bounds,
    and the bias corrections stand in the step's size, as in DeepSpeed's FusedLamb."""
    m = state["m"] = betas[0] * state.get("m", torch.zeros_like(p)) + (1 - betas[0]) * g
    v = state["v"] = betas[1] * state.get("v", torch.zeros_like(p)) + (1 - betas[1]) * g * g
    update = m / (v.sqrt() + eps) + weight_decay * p
    ratio = 1.0
    if p.norm() > 0 and update.norm() > 0:
        ratio = min(max(float(p.norm() / update.norm()), min_coeff), max_coeff)
    size = lr * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step) if bias_correction else lr
    return p - size * ratio * update


def adamw(p, m, v, step, *, lr, betas, eps, weight_decay):
    return p * (1 - lr * weight_decay) - lr * (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)


def adamw8bit(p, g, state, step, *, lr, betas, eps, weight_decay, block_size, min_row_size):
    """Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization": AdamW between dequantized states."""
    m = betas[0] * state.get("m", torch.zeros_like(p)) + (1 - betas[0]) * g
    v = betas[1] * state.get("v", torch.zeros_like(p)) + (1 - betas[1]) * g * g
    small = p.dim() < 2 or p[0].numel() < min_row_size
    state["m"] = m if small else rounded(m, dynamic_map(True), block_size)
    state["v"] = v if small else rounded(v, dynamic_map(False), block_size)
    return adamw(p, m, v, step, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def rounded(x, values, block_size):
    table = torch.tensor(values, dtype=x.dtype)
    made = torch.empty_like(x)
    for row, into in zip(x.reshape(x.shape[0], -1), made.reshape(x.shape[0], -1), strict=True):
        for at in range(0, row.numel(), block_size):
            part = row[at : at + block_size]
            largest = part.abs().max()
            nearest = (part[:, None] / largest - table[None]).abs().argmin(1) if largest else torch.zeros_like(part)
            into[at : at + block_size] = table[nearest] * largest if largest else 0.0
    return made


REFERENCES: dict[str, tuple[Callable[..., torch.Tensor], Any, dict[str, Any], float]] = {
    "Lion": (lion, zgraph.Lion, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}, 1e-5),  # a hundred roundings
    "LAMB": (
        lamb,
        zgraph.LAMB,
        {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
        | {"bias_correction": True, "min_coeff": 0.1, "max_coeff": 3.0},
        1e-5,  # two norms and a quotient of float32, a hundred times
    ),
    "AdamW8bit": (
        adamw8bit,
        zgraph.AdamW8bit,
        {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "block_size": 4, "min_row_size": 6},
        # A number half-way between two codes may go to either: 1e-2 of a state, so 1e-5 of one element.
        1e-5,
    ),
}


@sweep("world", [1, 4, 2], quick=1)
@pytest.mark.parametrize("name", list(REFERENCES))
def test_a_hundred_updates_are_those_of_the_papers(name, world):
    reference, record, arguments, tolerance = REFERENCES[name]
    mine = Virtual(plan_of(record(**arguments)), world)
    model = parameters()
    expected = {n: p.detach().double() for n, p in model.named_parameters()}
    states: dict[str, dict[str, torch.Tensor]] = {n: {} for n in expected}
    for step, grads in enumerate(gradients(model, 100), 1):
        mine.step(grads)
        for n, p in expected.items():
            expected[n] = reference(p, grads[n].double(), states[n], step, **arguments)
    for n, p in expected.items():
        assert (mine.whole(n).double() - p).norm() <= tolerance * p.norm(), n


def test_eight_bit_states_do_not_depend_on_the_world():
    results = []
    for world in (1, 2, 4):
        mine = Virtual(plan_of(zgraph.AdamW8bit(lr=1e-2, block_size=3, min_row_size=6)), world)
        for grads in gradients(parameters(), 5):
            mine.step(grads)
        results.append(mine.weights())
    assert all(torch.equal(results[0][n], other[n]) for other in results for n in other)


def test_codes_are_the_nearest_values_and_keep_zeros():
    for signed in (True, False):
        values = torch.tensor(dynamic_map(signed))
        assert len(values) == 256 and values.unique().numel() == 256 and 0.0 in values
        x = torch.randn(3, 50) if signed else torch.rand(3, 50)
        x[1] = 0
        codes, scales = quantize(x, signed, 16)
        assert codes.dtype is torch.uint8 and scales.shape == (3, 4)
        back = dequantize(codes, scales, signed, 16)
        assert not back[1].any()
        for row in (0, 2):
            for at in range(50):
                scale = scales[row, at // 16]
                best = (x[row, at] - values * scale).abs().min()
                assert (x[row, at] - back[row, at]).abs() <= best + 1e-7 * scale


# -- clipping, averages, overflow -----------------------------------------------------------------------------------------
@sweep("world,zero", [(1, 3), (2, 0), (2, 3), (4, 1)], quick=2)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_and_the_clipped_update_are_torchs(norm_type, world, zero):
    clip = zgraph.GradClip(norm=0.5, norm_type=norm_type)
    mine = Virtual(plan_of(zgraph.SGD(lr=1.0), zero, grad_clip=clip), world)
    model = parameters()
    theirs = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    for grads in gradients(model, 3):
        found = mine.step(grads)["grad_norm"]
        for name, param in model.named_parameters():
            param.grad = grads[name].clone()
        norm = clip_grad_norm_(model.parameters(), 0.5, norm_type, foreach=False)
        exact = zero == 0 or world == 1  # the same operations in the same order; else norms are added over ranks
        assert torch.equal(found, norm) if exact else abs(found - norm) <= ROUNDING * norm
        theirs.step()
    for name, param in model.named_parameters():
        whole = mine.whole(name)
        assert torch.equal(whole, param) if exact else (whole - param).norm() <= ROUNDING * param.norm()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_norm_is_not_finite_where_one_ranks_rows_are_not(norm_type, bad):
    mine = Virtual(plan_of(zgraph.SGD(lr=1.0), grad_clip=zgraph.GradClip(norm=0.5, norm_type=norm_type)), 4)
    (grads,) = gradients(parameters(), 1)
    grads["embed.weight"][12, 3] = bad  # the last rank's row
    assert not mine.step(grads)["grad_norm"].isfinite()


def test_values_are_clipped_bit_for_bit():
    mine = Virtual(plan_of(zgraph.SGD(lr=1.0), grad_clip=zgraph.GradClip(value=0.25)), 2)
    (grads,) = gradients(parameters(), 1, size=10.0)
    mine.step(grads)
    for name, param in parameters().named_parameters():
        assert torch.equal(mine.whole(name), param.detach() - grads[name].clamp(-0.25, 0.25))


def test_a_rule_is_traced_once_for_each_kind_of_parameter_of_a_process_and_anew_where_it_says_otherwise(monkeypatch):
    traced: list[None] = []
    trace = aot.trace_function
    monkeypatch.setattr(aot, "trace_function", lambda *given: traced.append(None) or trace(*given))
    monkeypatch.setattr(assembler, "_TEMPLATES", OrderedDict())

    def count(record: Any, world: int = 1, **fields: Any) -> int:
        traced.clear()
        Virtual(plan_of(record, **fields), world)
        return len(traced)

    rule = zgraph.AdamW(lr=0.1)
    first = count(rule, grad_clip=1.0)
    assert 6 <= count(zgraph.AdamW(lr=0.2), grad_clip=1.0) < first, "six forms of seven parameters"
    assert count(rule, grad_clip=1.0) <= 3, "numbers alone"
    for other in (count(rule, ema=0.9), count(rule, world=2), count(zgraph.AdamW(lr=0.1, amsgrad=True))):
        assert other >= 5
    assert count(rule, ema=0.9) == 0


def test_averages_are_torchs():
    mine = Virtual(plan_of(zgraph.SGD(lr=0.1), ema=zgraph.EMA(decay=0.9)), 2)
    model = parameters()
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)  # the first one copies the weights as they are before any step, as ours do
    for grads in gradients(model, 5):
        mine.step(grads)
        for name, param in model.named_parameters():
            param.grad = grads[name].clone()
        theirs.step()
        average.update_parameters(model)
    for name, param in average.module.named_parameters():
        assert (mine.whole(f"{name}/ema", InputRole.STATE) - param).norm() <= ROUNDING * param.norm()


@product("bad, zero", [math.inf, -math.inf, math.nan], [0, 3], together=1)
def test_an_overflow_in_one_ranks_rows_skips_the_update_on_all_ranks(zero, bad):
    scale = LossScale(initial_scale_power=4, loss_scale_window=2, hysteresis=1)
    half = zgraph.Precision(parameter="float32", compute="float16", reduce="float32", loss_scale=scale)
    plan = plan_of(zgraph.AdamW(lr=1e-2), zero, ema=zgraph.EMA(decay=0.5), precision=half)
    mine, clean = Virtual(plan, 4), Virtual(plan, 4)
    first, second = gradients(parameters(), 2)
    for other in (mine, clean):
        other.step(first)
    before = [{k: v.clone() for k, v in held.items()} for held in mine.ranks]
    broken = {n: g.clone() for n, g in second.items()}
    broken["embed.weight"][12, 3] = bad  # the last rank's row
    mine.step(broken)
    for held, old in zip(mine.ranks, before, strict=True):
        same = [k for k in held if not k[1].startswith("/") or k[1] == "/step"]
        assert all(torch.equal(held[k], old[k]) for k in same)
        assert float(held[InputRole.STATE, "/scale"]) == 8.0 and int(held[InputRole.STATE, "/skipped"]) == 1
    for other in (mine, clean):
        other.step(second)
    assert all(torch.equal(mine.whole(n), clean.whole(n)) for n in mine.specs)


def test_a_norm_that_is_not_finite_changes_nothing_where_that_is_an_error():
    mine = Virtual(plan_of(zgraph.SGD(lr=0.1), grad_clip=zgraph.GradClip(norm=1.0, error_if_nonfinite=True)), 2)
    (grads,) = gradients(parameters(), 1)
    grads["bias"][4] = math.inf
    assert not mine.step(grads)["grad_norm"].isfinite()
    assert all(torch.equal(mine.whole(n), p) for n, p in parameters().named_parameters())
