"""What one rank has saved of its shards is no other rank's: loading it is refused before anything is changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zgraph
from zgraph.errors import ModelError

pytestmark = pytest.mark.gloo


def attempt(folder):
    """What each way to load says, on this rank; then whether its own file goes on right."""
    torch.manual_seed(0)
    model = zgraph.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        zgraph.Plan(backend="eager", mesh={"dp": 2}, optimizer=zgraph.AdamW(lr=0.1)),
    )
    rank = torch.distributed.get_rank()
    model(torch.ones(2, 4)).sum().backward()
    model.step()
    saved = {"model": model.state_dict(), "optimizer": model.zgraph.optimizer.state_dict()}
    torch.save(saved, folder / f"{rank}.pt")
    torch.distributed.barrier()
    before = copy.deepcopy({n: p._local_tensor for n, p in model.named_parameters()})
    of_first, own = (torch.load(folder / f"{n}.pt") for n in (0, rank))
    part = {n[2:]: v for n, v in of_first["model"].items() if n[0] == "1"}
    said = []
    for load in (
        lambda: model.load_state_dict(of_first["model"]),
        lambda: model.load_state_dict(of_first["model"], assign=True),
        lambda: model[1].load_state_dict(part),
        lambda: nn.ModuleDict({"inner": model}).load_state_dict(
            {f"inner.{n}": v for n, v in of_first["model"].items()}
        ),
        lambda: model.zgraph.optimizer.load_state_dict(of_first["optimizer"]),
    ):
        try:
            load()
            said.append("loaded")
        except ModelError as error:
            said.append(str(error))
    same = all(torch.equal(before[n], p._local_tensor) for n, p in model.named_parameters())
    with torch.no_grad():
        model[0].weight.zero_()
    model.load_state_dict(own["model"])
    model.zgraph.optimizer.load_state_dict(own["optimizer"])
    back = all(torch.equal(before[n], p._local_tensor) for n, p in model.named_parameters())
    return said, same, back


def test_shards_of_another_rank_are_refused(two, tmp_path):
    first, second = two.run(attempt, tmp_path)
    assert first[0] == ["loaded"] * 5 and first[1:] == second[1:] == (True, True)
    assert all("is the shard of another rank, at [0] of the mesh" in text for text in second[0]), second[0]
