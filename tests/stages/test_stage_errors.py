"""A rank of a pipeline that fails alone: the others come out of the step at once, with what it said, and the model is used no more.

Process groups wait for ten minutes here: whoever hangs is found by the limit of a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, Ranks
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.errors import CollectiveError, PeerError, StepError
from zgraph.runtime.updater import Updater
from zgraph.stages.worker import Worker

pytestmark = pytest.mark.gloo

LIMIT = 120.0  # seconds, of which all but one or two are a start


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Alone(Exception):
    """What a rank raises."""


def mean_square(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, targets)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(64.0).reshape(16, 4) / 64, torch.linspace(-1, 1, 64).reshape(16, 4)


def compiled(loss_fn: Any, **fields: Any) -> Any:
    torch.manual_seed(0)
    usual = {"micro_batches": 4, "backend": "eager", "optimizer": zgraph.SGD(lr=0.1)}
    return zgraph.compile(Deep(), zgraph.Plan(**{**usual, **fields}), loss_fn=loss_fn)


def fail_in(where: str, rank: int, error: Callable[[], BaseException], armed: list[bool]) -> Any:
    """The loss function of a model; on this rank, once it is armed, `error` is raised there."""
    count = [0]

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if armed and where == "loss" and dist.get_rank() == rank:
            count[0] += 1
            if count[0] == 3:
                raise error()
        return mean_square(output, targets)

    def spoilt(original: Any, when: Callable[..., bool]) -> Any:
        def call(*args: Any) -> Any:
            if armed and dist.get_rank() == rank and when(*args):
                raise error()
            return original(*args)

        return call

    if where == "forward":
        Worker.forward = spoilt(Worker.forward, lambda worker, number, *_: number == 1)  # type: ignore[method-assign]
    elif where == "backward":
        Worker.backward = spoilt(Worker.backward, lambda worker, action, *_: action.micro_batch == 1)  # type: ignore[method-assign]
    elif where == "update":
        Updater._run = spoilt(Updater._run, lambda *_: True)  # type: ignore[method-assign]
    return loss_fn


ERRORS: dict[str, Callable[[], BaseException]] = {
    "own": lambda: Alone("it is Tuesday"),
    "interrupt": lambda: KeyboardInterrupt("it is Tuesday"),
    "memory": lambda: torch.OutOfMemoryError("it is Tuesday"),
    "nan": lambda: StepError("it is Tuesday"),
}


def fail(where: str, rank: int, kind: str, evaluated: bool, fields: dict[str, Any]) -> dict[str, Any]:
    """One good step, one in which a rank fails, and what is then refused: all that ranks do together."""
    armed: list[bool] = []
    model = compiled(fail_in(where, rank, ERRORS[kind], armed), **fields)
    x, y = rows()
    model.train_step(x, y)
    armed.append(True)
    found: dict[str, Any] = {}
    try:
        model.eval_step(x) if evaluated else model.train_step(x, y)
    except BaseException as error:
        found["type"], found["text"] = type(error).__name__, str(error)
        if isinstance(error, PeerError):
            found["of"] = error.rank, error.stage, error.micro_batch
            assert isinstance(error, CollectiveError)
    armed.clear()
    found["later"] = []
    for again in (
        lambda: model.train_step(x, y),
        lambda: model.eval_step(x),
        lambda: model.save_checkpoint("never"),
        lambda: model.zgraph.recompile(model.zgraph.plan.model_copy(update={"micro_batches": 2})),
    ):
        try:
            again()
        except StepError as error:
            found["later"].append(str(error))
    dist.barrier()  # (the default group is as it was)
    return found


def all_out(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    assert not [o for o in outcomes if o.error is not None or o.died], [o.traceback for o in outcomes]
    return [o.value for o in outcomes]


def assert_told(
    found: list[dict[str, Any]], rank: int, raised: str, place: tuple[int | None, int | None], words: str
) -> None:
    """The one has raised its own error, the others say whose it was and what it said; no step is taken after it."""
    assert found[rank]["type"] == raised
    for number, mine in enumerate(found):
        if number != rank:
            assert mine["type"] == "PeerError", mine
            assert mine["of"] == (rank, *place)
            assert f"rank {rank} has failed in this step" in mine["text"]
            assert "it is Tuesday" in mine["text"]
            assert words in mine["text"]
        assert len(mine["later"]) == 4
        for text in mine["later"]:
            assert f"rank {rank}" in text
            assert "it is Tuesday" in text
            assert "start all of them again" in text


@pytest.mark.core
@sweep("schedule", ["1f1b", "gpipe", "zb"], quick=1)
def test_a_loss_function_that_raises_ends_the_step_on_both_ranks(schedule: str) -> None:
    with Ranks(2, timeout=600.0) as ranks:
        fields = {"mesh": {"pp": 2}, "schedule": schedule}
        found = all_out(ranks.attempt(fail, "loss", 1, "own", False, fields, limit=LIMIT))
    assert_told(found, 1, "Alone", (1, 2), "stage 1, the forward of micro-batch 2")


@pytest.mark.parametrize(
    "where, rank, kind, raised, place, words",
    [
        ("loss", 3, "interrupt", "KeyboardInterrupt", (3, 2), "stage 3, the forward of micro-batch 2"),
        ("loss", 3, "nan", "StepError", (3, 2), "stage 3, the forward of micro-batch 2"),
        ("forward", 1, "memory", "OutOfMemoryError", (1, 1), "stage 1, the forward of micro-batch 1"),
        ("backward", 2, "own", "Alone", (2, 1), "stage 2, the backward of micro-batch 1"),
        ("update", 2, "own", "Alone", (None, None), "in the update"),
    ],
)
@pytest.mark.slow
def test_whatever_a_rank_of_four_stages_raises_the_others_are_told(
    where: str, rank: int, kind: str, raised: str, place: tuple[int | None, int | None], words: str
) -> None:
    with Ranks(4, timeout=600.0) as ranks:
        fields = {"mesh": {"pp": 4}, "schedule": "1f1b", "grad_clip": 1.0}
        found = all_out(ranks.attempt(fail, where, rank, kind, False, fields, limit=LIMIT))
    assert_told(found, rank, raised, place, words)


@pytest.mark.core
@pytest.mark.parametrize(
    "zero, where, rank, stage", [(z, *way) for z in (1, 3) for way in (("loss", 3, 1), ("backward", 0, 0))]
)
@pytest.mark.slow
def test_the_ranks_of_other_pipelines_come_out_too(where: str, rank: int, stage: int, zero: int) -> None:
    """They wait in collectives for those who wait for it."""
    with Ranks(4, timeout=600.0) as ranks:
        fields = {"mesh": {"pp": 2, "dp": 2}, "micro_batches": 4, "zero": zero}
        found = all_out(ranks.attempt(fail, where, rank, "own", False, fields, limit=LIMIT))
    number = 2 if where == "loss" else 1
    kind = "forward" if where == "loss" else "backward"
    assert_told(found, rank, "Alone", (stage, number), f"stage {stage}, the {kind} of micro-batch {number}")


@sweep("fields", [{"optimizer": None}, {"watch": {"interval": 0}}], quick=1)
def test_it_needs_neither_an_update_nor_heartbeats(fields: dict[str, Any]) -> None:
    with Ranks(2, timeout=600.0) as ranks:
        found = all_out(ranks.attempt(fail, "loss", 1, "own", False, {"mesh": {"pp": 2}} | fields, limit=LIMIT))
    assert_told(found, 1, "Alone", (1, 2), "stage 1, the forward of micro-batch 2")


@sweep("rank", [0, 1], quick=1)
def test_an_evaluation_that_fails_on_one_rank_ends_on_both(rank: int) -> None:
    with Ranks(2, timeout=600.0) as ranks:
        found = all_out(ranks.attempt(fail, "forward", rank, "own", True, {"mesh": {"pp": 2}}, limit=LIMIT))
    assert_told(found, rank, "Alone", (rank, 1), f"stage {rank}, the forward of micro-batch 1")


def refuse_infinite(infinite: bool) -> tuple[str, list[float]]:
    """Two steps, between them (if so) one that all ranks refuse alike; what was said, and a weight at the end."""
    model = compiled(mean_square, mesh={"pp": 2}, grad_clip={"norm": 1.0, "error_if_nonfinite": True})
    x, y = rows()
    model.train_step(x, y)
    said = "nothing"
    if infinite:
        try:
            model.train_step(x * torch.inf, y)
        except StepError as error:
            said = str(error)
    model.train_step(x, y)
    return said, next(p for p in model.parameters() if not p.is_meta).flatten().tolist()


def test_what_all_ranks_refuse_alike_ends_nothing() -> None:
    with Ranks(2, timeout=600.0) as ranks:
        straight = ranks.run(refuse_infinite, False, limit=LIMIT)
        for (said, weight), (_, wanted) in zip(ranks.run(refuse_infinite, True, limit=LIMIT), straight, strict=True):
            assert "the norm of the gradients is" in said
            assert weight == wanted
