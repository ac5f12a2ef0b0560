"""Who calls, wraps or loads a module inside of a compiled model on several ranks is told by zgraph what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import zgraph
from zgraph.errors import ModelError

pytestmark = pytest.mark.gloo


def model() -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return zgraph.compile(layers, zgraph.Plan(backend="eager", mesh={"dp": 2}))


def said(attempt: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as caught:
        attempt()
    return str(caught.value)


def attempts() -> list[str]:
    made, rows = model(), torch.ones(2, 4)
    expected = made(rows)
    twin = copy.deepcopy(made)
    found = [
        said(lambda: made[0](rows)),
        said(lambda: twin[0](rows)),
        said(lambda: fully_shard(made)),
        said(lambda: fully_shard(twin[0])),
        said(lambda: made[0].load_state_dict(nn.Linear(4, 4).state_dict())),
        said(lambda: made.load_state_dict(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).state_dict())),
    ]
    with zgraph.full_weights(made, write=True), torch.no_grad():
        assert torch.equal(made[1](made[0](rows)), expected)
        made[0].load_state_dict({"weight": torch.ones(4, 4), "bias": torch.zeros(4)})
        changed = made(rows)
    assert torch.equal(made(rows), changed) and not torch.equal(changed, expected)
    assert torch.equal(twin(rows), expected)
    assert len(made.zgraph.programs) == 1, list(
        made.zgraph.programs
    )  # (the part that was refused made no program stale)
    return found


def test_parts_of_a_compiled_model_are_refused(two: Ranks):
    for called, of_twin, wrapped, part, loaded, whole in two.run(attempts):
        assert called == of_twin and "a part of a compiled model (Linear) was called" in called
        assert "zgraph.full_weights(model)" in called
        assert (
            wrapped == part and "fully_shard was applied to a compiled model" in wrapped and "Plan(zero=3)" in wrapped
        )
        assert "'weight' is a whole tensor" in loaded and "'0.weight' is a whole tensor" in whole
        assert "full_weights(model, write=True)" in whole


def conversions() -> list[str]:
    made, rows = model(), torch.ones(2, 4)
    loss = made(rows).sum()  # (what holds a weight's place in the graph keeps torch from swapping it)
    same = (lambda: made.to("cpu"), made.float, lambda: made.to(torch.float32), made.cpu)
    assert all(conversion() is made for conversion in same) and made[0].to("cpu") is made[0]
    assert made.to(memory_format=torch.channels_last) is made
    loss.backward()
    before = made(rows)
    found = [said(made.half), said(lambda: made[1].to(torch.bfloat16)), said(lambda: made.to_empty(device="cpu"))]
    assert torch.equal(made(rows), before)
    with zgraph.full_weights(made):
        assert made[1].double().weight.dtype is torch.float64 and made.double()[0].weight.dtype is torch.float64
    assert torch.equal(made(rows), before)
    part = copy.deepcopy(made[0]).half()
    assert part.weight.dtype is torch.float16 and made[0].weight.dtype is torch.float32
    return found


def test_a_compiled_model_is_neither_moved_nor_cast(two: Ranks):
    for cast, part, emptied in two.run(conversions):
        assert (
            "0.weight is torch.float32 on cpu, and would be torch.float16 on cpu" in cast
            and "before zgraph.compile" in cast
        )
        assert ": weight is torch.float32 on cpu, and would be torch.bfloat16 on cpu" in part
        assert "would be another tensor" in emptied
