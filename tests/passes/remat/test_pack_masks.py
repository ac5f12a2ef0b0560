"""Masks that are saved as bits: numbers are bit for bit those of masks that are saved as bytes, and an eighth is saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Ranks
from sweeps import sweep
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zgraph
from zgraph.build.planned_step import programs
from zgraph.passes.analysis.saved_values import crossings
from zgraph.passes.remat.pack_masks import LEAST
from zgraph.program.node import tensor
from zgraph.program.packed_masks import FROM_BITS, TO_BITS
from zgraph.program.program import Program

WORDS, WIDTH, HEADS = 50, 24, 3


# -- operators --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [(1,), (8,), (7, 3), (4, 5, 6), (2, 0), ()], ids=str)
@pytest.mark.parametrize("backwards", [False, True])
def test_a_mask_comes_back_bit_for_bit(size, backwards):
    """In any order of memory, which need not be that of the mask that is given."""
    mask = torch.rand(size) < 0.3
    like = mask.permute(tuple(reversed(range(mask.dim())))).contiguous() if backwards else mask
    stride = tuple(reversed(like.stride())) if backwards else like.stride()
    bits = TO_BITS(mask, stride)
    assert bits.dtype is torch.uint8 and bits.numel() == -(-mask.numel() // 8)
    back = FROM_BITS(bits, mask.shape, stride)
    assert back.equal(mask) and back.dtype is torch.bool and back.stride() == stride


# -- models -----------------------------------------------------------------------------------------------------------
class Layer(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(drop)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Dropout(drop), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        weights = self.drop(torch.softmax(q @ k.transpose(-1, -2), -1))
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).flatten(2)))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, drop: float = 0.2, *, again: bool = False) -> None:
        super().__init__()
        self.words, self.head, self.again = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), again
        self.layers = nn.ModuleList(Layer(drop) for _ in range(2))

    def forward(self, words):
        x = self.words(words)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def words(rows: int = 4, length: int = 18, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def saved_masks(program: Program) -> list[torch.Tensor]:
    return [tensor(c.root) for c in crossings(program) if tensor(c.root).dtype is torch.bool]


PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "eager": (1, {}, {}),
    "compiled": (1, {"backend": "inductor"}, {}),
    "zero": (2, {"zero": 3}, {}),
    "compiled, zero": (2, {"zero": 3, "backend": "inductor"}, {}),
    "tensor parallel": (3, {"mesh": {"tp": 3}}, {}),
    "tensor parallel, by tokens": (3, {"mesh": {"tp": 3}, "sequence_parallel": True}, {}),
    "in parts": (3, {"mesh": {"tp": 3}, "partition_activations": True}, {}),
    "context parallel": (2, {"mesh": {"cp": 2}}, {}),
    "recomputed": (1, {"recompute": "full"}, {}),
    "regions of the model": (1, {}, {"again": True}),
    "policy": (1, {"recompute": ["layers.0"]}, {}),
    "tiles": (1, {"tiles": {"loss": 2}}, {}),
    "pipeline": (2, {"mesh": {"pp": 2}, "micro_batches": 2}, {}),
    "micro-batches": (1, {"micro_batches": 2}, {}),
    "offloaded": (1, {"offload": {"activations": "cpu"}}, {}),
    "half precision": (1, {"precision": "bf16"}, {}),
}


@sweep("plan", list(PLANS), quick=(0, 3, 8))
def test_plans_compute_the_same(plan):
    world, fields, options = PLANS[plan]
    asked = zgraph.Plan(**{"backend": "eager", "mesh": {"dp": world}, "pack_masks": True} | fields)
    result = zgraph.verify(net(**options), asked, world, (words(),))
    assert result.ok, result


@sweep("backend", ["eager", "inductor"], quick=(0,))
def test_no_mask_is_saved_as_bytes(backend):
    by_bytes, by_bits = (
        programs(net(), zgraph.Plan(backend=backend, mesh={"dp": 1}, pack_masks=packed), (words(),), 1).program
        for packed in (False, True)
    )
    before = [m for m in saved_masks(by_bytes) if m.numel() >= LEAST]
    assert len(before) == 6 + 2 * (backend == "inductor"), "three dropouts of each layer; compiled, its ReLU as well"
    assert not [m for m in saved_masks(by_bits) if m.numel() >= LEAST]
    packed = [n for n in by_bits.nodes if n.target is TO_BITS]
    assert [8 * tensor(n).numel() for n in packed] == [m.numel() for m in before]


def test_small_masks_and_what_is_returned_stay_bytes():
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.a(x)
            mask = y > 0
            small = y[:2] > 1
            return torch.where(mask, y, 0).sum() + torch.where(small, y[:2], 0).sum(), mask

    plan = zgraph.Plan(backend="eager", mesh={"dp": 1}, pack_masks=True)
    program = programs(Returned(), plan, (torch.randn(64, WIDTH),), 1).program
    assert not [n for n in program.nodes if n.target in (TO_BITS, FROM_BITS)]


def losses(plan: zgraph.Plan, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Losses and weights of some steps, all drawn by one generator."""
    model: Any = zgraph.compile(net(), plan)
    torch.manual_seed(3)
    results = [model.train_step(words(length=n, seed=n)).detach().clone() for n in lengths]
    return [*results, *zgraph.full_state_dict(model).values()]


def packed_and_not(fields: dict[str, Any], lengths: tuple[int, ...]) -> bool:
    plans = [zgraph.Plan(optimizer=zgraph.SGD(lr=0.1), pack_masks=packed, **fields) for packed in (False, True)]
    one, other = (losses(plan, lengths) for plan in plans)
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.gloo
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_two_ranks_train_bit_for_bit_as_with_bytes(two: Ranks, backend):
    fields = {"mesh": {"dp": 2}, "zero": 3, "backend": backend}
    assert all(two.run(packed_and_not, fields, (18, 18, 18)))


@pytest.mark.gloo
@pytest.mark.slow
def test_one_program_serves_lengths_that_no_byte_divides(two: Ranks):
    fields = {"mesh": {"dp": 2}, "backend": "eager", "shapes": "dynamic"}
    assert all(two.run(packed_and_not, fields, (18, 19, 23, 18)))


def eager_steps() -> bool:
    """Whether a plain model of the same seed has the same gradients: the mask is the one that plain PyTorch draws."""
    plain = net()
    compiled: Any = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager", mesh={"dp": 2}, pack_masks=True))
    for seed in range(2):
        for model in (plain, compiled):
            torch.manual_seed(seed)
            model(words()).backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in compiled.parameters()]
    return all(torch.allclose(p.grad, g, rtol=0, atol=2e-6) for p, g in zip(plain.parameters(), grads, strict=True))


@pytest.mark.gloo
def test_ranks_drop_what_plain_pytorch_does(two: Ranks):
    assert all(two.run(eager_steps))
