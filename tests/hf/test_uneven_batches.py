"""accelerate's even_batches=False: rows that are uneven train as over DistributedDataParallel; numbers of batches that are uneven are refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from trainers import as_launched

import zgraph
from zgraph.api.uneven_batches import batches_of_ranks
from zgraph.errors import ModelError

pytest.importorskip("accelerate")


def rows(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, generator=generator) for _ in range(count)]


def prepared(plan: zgraph.Plan | None, count: int, size: int) -> Any:
    """(an accelerator, a model, an optimizer, a loader whose ranks may have other numbers of rows)."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    if plan is not None:
        model = zgraph.compile(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    loader = torch.utils.data.DataLoader(rows(count), batch_size=size)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def losses(plan: zgraph.Plan | None, count: int, size: int) -> list[tuple[int, float]]:
    with as_launched():
        accelerator, model, optimizer, loader = prepared(plan, count, size)
        found = []
        for x in itertools.chain(loader, loader):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append((len(x), loss.item()))
        return found


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("count, size", [(14, 4), (15, 2)])
def test_ranks_with_fewer_rows_in_the_last_batch_are_as_over_ddp(two: Ranks, count: int, size: int):
    plain = two.run(losses, None, count, size)
    for one, other in zip(two.run(losses, zgraph.Plan(backend="eager"), count, size), plain, strict=True):
        assert [n for n, _ in one] == [n for n, _ in other] and min(n for n, _ in plain[1]) < size
        assert [loss for _, loss in one] == pytest.approx([loss for _, loss in other], rel=1e-5)


def evaluated(plan: zgraph.Plan) -> tuple[str, float]:
    """(why training and evaluation are refused, the sum over all rows of what the model gives with whole weights)."""
    with as_launched():
        accelerator, model, _, loader = prepared(plan, 10, 4)
        said = set()
        for train in (True, False):
            model.train(train)
            with pytest.raises(ModelError, match="loader gives rank 0 2 batches, and rank 1 1") as caught:
                next(model(x) for x in loader)
            said.add(str(caught.value))
        with zgraph.full_weights(model), torch.no_grad():
            total = sum(model(x).sum() for x in loader)
        return said.pop(), float(accelerator.reduce(total, "sum"))


@pytest.mark.gloo
def test_ranks_with_fewer_batches_are_refused_but_for_an_evaluation_with_whole_weights(two: Ranks):
    with as_launched():
        _, plain, _, _ = prepared(None, 10, 4)
        expected = float(plain(torch.stack(rows(10))).sum())
    for said, total in two.run(evaluated, zgraph.Plan(backend="eager")):
        assert "even_batches=True" in said and "full_weights" in said
        assert total == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even, drop", [(False, False), (True, False), (False, True)])
def test_batches_are_counted_as_they_are_given(split: bool, even: bool, drop: bool):
    from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SkipBatchSampler
    from torch.utils.data import BatchSampler, SequentialSampler

    for count in range(1, 20):
        inner = BatchSampler(SequentialSampler(range(count)), 3, drop)
        shards = [BatchSamplerShard(inner, 3, rank, split, even) for rank in range(3)]
        given = [len(list(shard)) for shard in shards]
        loader = DataLoaderShard(range(count), batch_sampler=SkipBatchSampler(shards[0], 0))
        counted = batches_of_ranks(loader)
        assert counted == given or (not counted and len(set(given)) == 1), count


def test_ranks_with_fewer_batches_are_not_joined(monkeypatch: pytest.MonkeyPatch):
    with as_launched():
        accelerator, model, _, _ = prepared(zgraph.Plan(backend="eager"), 8, 2)
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass  # (accelerate does nothing here)
        monkeypatch.setattr(type(accelerator), "multi_device", True)
        with pytest.raises(ModelError, match="join_uneven_inputs can't be had") as caught:
            accelerator.join_uneven_inputs([model], even_batches=False)
        assert "even_batches=True" in str(caught.value)


def test_local_sgd_is_refused_before_its_first_step(monkeypatch: pytest.MonkeyPatch):
    from accelerate.local_sgd import LocalSGD
    from accelerate.utils import DistributedType

    with as_launched():
        accelerator, model, _, _ = prepared(zgraph.Plan(backend="eager"), 8, 2)
        monkeypatch.setattr(type(accelerator), "distributed_type", DistributedType.MULTI_CPU)
        with pytest.raises(ModelError, match="LocalSGD can't train a compiled model") as caught:
            LocalSGD(accelerator, model, local_sgd_steps=2).__enter__()
        assert "local_steps" in str(caught.value)
        with LocalSGD(accelerator, model, local_sgd_steps=2, enabled=False), model.no_sync():
            pass
