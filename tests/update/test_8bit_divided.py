"""8-bit states where ranks divide weights: blocks are those of the whole rows, and checkpoints hold every rank's scales."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph

pytestmark = pytest.mark.gloo


class Net(nn.Module):
    """`down` has rows of 24, of which each of two ranks has 12."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.down(torch.tanh(self.up(x)))).pow(2).mean()


DIVIDED = {"up": "colwise", "down": "rowwise"}


def batch(seed, mesh):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    if "dp" in mesh:
        x = x.chunk(2)[torch.distributed.get_rank()]
    return x


def made(mesh, block):
    record = zgraph.AdamW8bit(lr=1e-2, eps=1e-3, block_size=block, min_row_size=8)
    divided = {"tensor_parallel": DIVIDED} if "tp" in mesh else {}
    plan = zgraph.Plan(mesh=mesh, backend="eager", zero=2, optimizer=record, **divided)
    return zgraph.compile(Net(), plan, inputs=(batch(0, mesh),))


def train(model, mesh, first, last):
    for seed in range(first, last):
        model.train_step(batch(seed, mesh))
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}


def run(folder, block):
    """Weights after five steps: by dp, by tp, and by both from tp's checkpoint after three."""
    tp, dp = {"tp": 2}, {"dp": 2}
    whole, model, twin = made(dp, block), made(tp, block), made(tp, block)
    found = {"dp": train(whole, dp, 0, 5)}
    train(model, tp, 0, 3)
    model.save_checkpoint(folder, "three")
    found["tp"] = train(model, tp, 3, 5)
    for name, other, mesh in (("tp again", twin, tp), ("tp to dp", whole, dp)):
        other.load_checkpoint(folder, "three")
        found[name] = train(other, mesh, 3, 5)
    shapes = {k: tuple(v.shape) for k, v in model.zgraph.optimizer.state[model.down.weight].items()}
    return found, shapes


@pytest.mark.slow
@pytest.mark.parametrize("block", [4, 5, 256])  # (each rank has whole blocks; parts of some; parts of the only one)
def test_a_checkpoint_goes_on_bit_for_bit_and_as_on_undivided_weights(two, tmp_path, block):
    first, second = two.run(run, tmp_path, block)
    for found, shapes in (first, second):
        assert shapes["exp_avg_scale"] == (16, -(-24 // block))
        for name, value in found["tp"].items():
            assert torch.equal(found["tp again"][name], value), name
            for other in ("dp", "tp to dp"):
                # (a sum that rounds otherwise may round a state to the next of its 256 values)
                torch.testing.assert_close(found[other][name], value, rtol=1e-3, atol=3e-4)
    model = Net()
    plan = zgraph.Plan(backend="eager", optimizer=zgraph.AdamW8bit(lr=1e-2, eps=1e-3, block_size=block, min_row_size=8))
    zgraph.compile(model, plan).load_checkpoint(tmp_path, "three")
    for name, value in train(model, {}, 3, 5).items():
        torch.testing.assert_close(value, first[0]["tp"][name], rtol=1e-3, atol=3e-4)
