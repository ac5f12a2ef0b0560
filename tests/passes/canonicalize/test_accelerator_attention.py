"""Attention of accelerators by a plan's sparsity: flash, memory-efficient and cuDNN attention become the same operators as a CPU's.

Nothing here has an accelerator. Models call the accelerators' operators by name, which are captured on fake tensors; after the pass a CPU can run
them. For what depends on the device, the fake tensors of a captured program are put on a CUDA device.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from programs import captured
from sweeps import product
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.errors import PlanError
from zgraph.passes.canonicalize.cleanup import cleanup
from zgraph.passes.canonicalize.sparse_attention import SparseOptions, sparse_attention
from zgraph.passes.verifier import verify_program
from zgraph.program.attention_calls import BACKWARDS
from zgraph.program.program import Program
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD
from zgraph.verification.masked_attention import masks_of

aten = torch.ops.aten
BOUND, HEADS, LENGTH, WIDTH = 1e-5, 4, 40, 8
PLAN = {"*": zgraph.BigBird(block=8)}


class Attend(nn.Module):
    """A layer of attention by an operator of CPUs ("cpu") or of accelerators; `apart` puts heads before positions in memory."""

    def __init__(self, how: str, *, apart: bool = False, heads_of_keys: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.how, self.apart, self.heads_of_keys, self.options = how, apart, heads_of_keys, options
        self.inner, self.outer = nn.Linear(WIDTH, (HEADS + 2 * heads_of_keys) * 16), nn.Linear(HEADS * 16, WIDTH)
        self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        dropout, causal = self.options.get("dropout", 0.0), self.options.get("causal", False)
        if self.how == "cpu":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=0.2, enable_gqa=True)
        if self.how == "flash":
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=0.2)[0]
        if self.how == "efficient":  # (torch gives it as many heads of keys as of queries)
            k, v = (x.repeat_interleave(HEADS // self.heads_of_keys, 1) for x in (k, v))
        bias = None if mask is None else mask.expand(len(q), HEADS, q.shape[2], k.shape[2])
        operator = getattr(aten, f"_scaled_dot_product_{self.how}_attention")
        return operator(q, k, v, bias, True, dropout, causal, scale=0.2)[0]

    def forward(self, x, seen=None):
        q, k, v = (
            y.unflatten(-1, (-1, 16)).transpose(1, 2)
            for y in self.inner(x).split([n * 16 for n in (HEADS, self.heads_of_keys, self.heads_of_keys)], -1)
        )
        if self.apart:
            q, k, v = (y.contiguous() for y in (q, k, v))
        if self.options.get("other_keys"):
            k, v = k[:, :, :5], v[:, :, :5]
        mask = self.bias if self.options.get("learned") else None
        if seen is not None:
            mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[:, None, None, :]
        return self.outer(self.attention(q, k, v, mask).transpose(1, 2).flatten(2)).square().mean()


def model(how: str, **options: Any) -> Attend:
    torch.manual_seed(0)
    return Attend(how, **options)


def inputs(*, padded: bool = False) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    x = torch.randn(2, LENGTH, WIDTH)
    return (x, torch.arange(LENGTH) < torch.tensor([[LENGTH], [31]])) if padded else (x,)


CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "heads before positions": {"apart": True},
    "grouped": {"heads_of_keys": 2},
    "padded": {"padded": True},
    "padded, heads before positions": {"padded": True, "apart": True},
}


@product("how, case", ["flash", "efficient", "cudnn"], list(CASES), together=1)
def test_a_step_is_that_of_the_plain_model_with_masks(how: str, case: str) -> None:
    options = dict(CASES[case])
    padded = options.pop("padded", False)
    if padded and how == "flash":
        pytest.skip("flash attention has no mask")
    compiled: Any = zgraph.compile(model(how, **options), zgraph.Plan(backend="eager", attention=PLAN))
    plain = model("cpu", **options)
    with masks_of(plain, PLAN):
        expected = plain(*inputs(padded=padded))
        expected.backward()
    loss = compiled(*inputs(padded=padded))
    loss.backward()
    assert float((loss - expected).detach().abs()) < BOUND
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert p.grad is None or float((p.grad - q.grad).abs().max()) < BOUND


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("how", ["flash", "efficient"])
def test_inductor_gives_the_same_at_several_lengths(how: str) -> None:
    compiled: Any = zgraph.compile(model(how, causal=True), zgraph.Plan(attention=PLAN, shapes="dynamic"))
    plain = model("cpu", causal=True)
    for x in (*inputs(), torch.randn(3, 33, WIDTH)):
        with masks_of(plain, PLAN):
            expected = plain(x)
        assert float((compiled(x) - expected).detach().abs()) < BOUND


def program_of(how: str, dtype: torch.dtype = torch.float32, **options: Any) -> Program:
    """Return a captured program whose fake tensors are on a CUDA device."""
    program = captured(model(how, **options).to(dtype), tuple(x.to(dtype) for x in inputs()))
    cleanup()(program)

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")

    with program.fake_mode:
        for node in program.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = torch.utils._pytree.tree_map(moved, node.meta["val"])
    return program


def run(program: Program) -> None:
    sparse_attention(SparseOptions(tuple(PLAN.items())))(program)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("how", ["flash", "efficient", "cudnn"])
def test_programs_of_a_cuda_device_have_the_operators_there(how: str, apart: bool) -> None:
    program = program_of(how, apart=apart)
    layouts = {n.name: n.meta["val"].stride() for n in program.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    run(program)
    targets = [n.target for n in program.nodes]
    assert targets.count(SPARSE) == targets.count(SPARSE_BACKWARD) == 1
    assert not set(targets) & {*BACKWARDS, *BACKWARDS.values()}
    for node in program.nodes:
        if node.target in (SPARSE, SPARSE_BACKWARD):
            assert {x.device for x in node.meta["val"]} == {torch.device("cuda", 0)}
    readers = {n.name: n.meta["val"].stride() for n in program.nodes if n.name in layouts and "getitem" not in n.name}
    assert readers == {name: layouts[name] for name in readers}, (
        "what reads it finds the layouts that it was captured for"
    )
    verify_program(program)


@pytest.mark.parametrize("how", ["flash", "efficient", "cudnn"])
def test_dropout_has_a_seed_that_the_backward_reads_as_well(how: str) -> None:
    program = program_of(how, dropout=0.1)
    run(program)
    (seed,) = [n for n in program.nodes if n.target is aten.randint.low]
    dropouts = [n.args[-2:] for n in program.nodes if n.target in (SPARSE, SPARSE_BACKWARD)]
    assert dropouts == [(seed, 0.1)] * 2 and seed.meta["val"].device.type == "cuda"
    assert not set(n.target for n in program.nodes) & {*BACKWARDS, *BACKWARDS.values()}
    verify_program(program)


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        ("flash", {"other_keys": True}, "attention of 40 queries with 5 keys can't be sparse"),
        ("efficient", {"learned": True}, "attention with a mask that has a gradient can't be sparse"),
        ("efficient", {"dtype": torch.float64}, "attention of torch.float64 can't be sparse"),
        ("flash", {"heads_of_keys": 3}, "attention of 4 heads with 3 heads of keys can't be sparse"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_with_its_line(how: str, options: dict[str, Any], said: str) -> None:
    program = program_of(how, **options)
    with pytest.raises(PlanError) as caught:
        run(program)
    assert said in str(caught.value) and "test_accelerator_attention.py:" in str(caught.value)


def test_attention_whose_sums_are_read_elsewhere_is_refused() -> None:
    class Sums(Attend):
        def attention(self, q, k, v, mask):
            results = aten._scaled_dot_product_flash_attention(q, k, v, scale=0.2)
            return results[0] * results[6].sum().to(q.dtype)

    torch.manual_seed(0)
    program = captured(Sums("flash"), inputs())
    with pytest.raises(PlanError, match="of which more is read than its output"):
        run(copy.copy(program))
