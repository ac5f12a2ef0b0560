"""Pipelines on real ranks: losses, gradients and weights are those of one process; ranks hold their own stages alone; a lost rank is an error."""

from __future__ import annotations

import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sweeps import sweep
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutput

import zgraph
from zgraph.codegen.executable import Executable
from zgraph.errors import CollectiveError, PlanError, StepError
from zgraph.plan.pipeline_schedules.actions import Action
from zgraph.stages.channels import Channels
from zgraph.stages.worker import Worker

pytestmark = pytest.mark.gloo

SUMS = 1e-6  # norm-wise: float32 sums in another order (over ranks, over the stages of a tied parameter)
LOW = 2.0**-7  # norm-wise: twice the rounding of bfloat16, in which gradients are averaged


class Words(nn.Module):
    """The least that is called as models of transformers are, and gives what they give."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(models.WORDS, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, models.WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        return CausalLMOutput(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def model_of(name: str) -> nn.Module:
    """Without dropout: ranks draw numbers of their own."""
    if name in ("words", "tied words"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Words(name == "tied words")
    made = models.build(name).model
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return made


def batch_of(name: str, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if name == "vit":
        like = models.build(name).inputs
        return {
            k: torch.randn(rows, *v.shape[1:], generator=generator)
            if v.is_floating_point()
            else torch.randint(0, 2, (rows, *v.shape[1:]), generator=generator)
            for k, v in like.items()
        }
    ids = torch.randint(0, models.WORDS, (rows, 7), generator=generator)
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(name: str, fields: dict[str, Any], rows: int, steps: int) -> dict[str, Any]:
    """On each rank: losses, and the weights and gradients that it holds."""
    plan = zgraph.Plan(**{"backend": "eager"} | fields)
    model: Any = zgraph.compile(model_of(name), plan)
    data = plan.resolve_mesh(dist.get_world_size()).get("dp", 1)
    mine = {k: v.chunk(data)[dist.get_rank() % data] for k, v in batch_of(name, rows).items()}
    outputs = [model.train_step(**mine) for _ in range(steps)]
    params = {n: p for n, p in model.named_parameters() if not p.is_meta}
    return {
        "losses": [float(o.loss) for o in outputs],
        "logits": outputs[0].logits is not None,
        "weights": {n: whole(p) for n, p in params.items()},
        "gradients": {n: whole(p.grad) for n, p in params.items() if p.grad is not None},
        "norm": None
        if model.zgraph.runtime.updater.grad_norm is None
        else float(model.zgraph.runtime.updater.grad_norm),
    }


def plain(name: str, rows: int, micro_batches: int, data: int, steps: int, clip: float | None = None) -> dict[str, Any]:
    """The same in one process: the mean over `data` ranks of what each accumulates."""
    model: Any = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01) if steps > 1 else None
    losses, norm = [], None
    for _ in range(steps):
        each = []
        for part in range(data):
            mine = {k: v.chunk(data)[part] for k, v in batch_of(name, rows).items()}
            for number in range(micro_batches):
                loss = model(**{k: v.chunk(micro_batches)[number] for k, v in mine.items()}).loss
                loss.backward(torch.tensor(1.0 / micro_batches / data))
                each.append(float(loss.detach()))
        losses.append(sum(each) / len(each))
        if optimizer is not None:
            if clip is not None:
                norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
    return {
        "losses": losses,
        "weights": {n: p.detach() for n, p in model.named_parameters()},
        "gradients": {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        "norm": norm,
    }


def together(found: list[dict[str, Any]], what: str) -> dict[str, torch.Tensor]:
    """What all ranks hold; those that hold the same have the same bits."""
    merged: dict[str, torch.Tensor] = {}
    for rank in found:
        for name, value in rank[what].items():
            assert name not in merged or what == "gradients" or torch.equal(merged[name], value), name
            merged.setdefault(name, value)
    return merged


def apart(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).norm()) / max(float(expected.norm()), 1e-12)


@sweep(
    "name, schedule, micro_batches",
    [
        ("gpt2", "1f1b", 4),
        ("llama", "zb", 3),
        ("t5", "gpipe", 2),
        ("vit", "zbv", 4),
        ("llama", "interleaved1f1b", 4),
        ("words", "interleaved1f1b", 4),
    ],
    quick={5},
)
def test_gradients_of_two_stages_are_those_of_one_process_bit_for_bit(
    two: Ranks, name: str, schedule: str, micro_batches: int
) -> None:
    fields = {"mesh": {"pp": 2}, "micro_batches": micro_batches, "schedule": schedule}
    found = two.run(train, name, fields, 2 * micro_batches, 1)
    expected = plain(name, 2 * micro_batches, micro_batches, 1, 1)
    gradients = together(found, "gradients")
    assert gradients.keys() == expected["gradients"].keys()
    shared = set(found[0]["gradients"]) & set(found[1]["gradients"])
    for key, value in expected["gradients"].items():
        if key in shared:
            assert apart(gradients[key], value) <= SUMS, key
        else:
            assert torch.equal(gradients[key], value), key
    assert shared == ({"transformer.wte.weight"} if name == "gpt2" else {"shared.weight"} & shared)
    for rank in found:
        assert abs(rank["losses"][0] - expected["losses"][0]) <= 1e-6 * abs(expected["losses"][0])
    last = 0 if schedule == "zbv" else 1
    assert [rank["logits"] for rank in found] == [i == last for i in range(2)]


@pytest.mark.parametrize(
    "name, zero, schedule",
    [("llama", 0, "1f1b"), ("llama", 1, "zb"), ("llama", 2, "1f1b"), ("llama", 3, "zb"), ("words", 3, "zb")],
)
@pytest.mark.slow
def test_stages_sharded_over_two_ranks_train_as_one_process(four: Ranks, name: str, zero: int, schedule: str) -> None:
    fields = {
        "mesh": {"pp": 2, "dp": 2},
        "micro_batches": 2,
        "zero": zero,
        "schedule": schedule,
        "optimizer": zgraph.AdamW(lr=1e-3, weight_decay=0.01),
        "grad_clip": 0.5,
    }
    found = four.run(train, name, fields, 8, 3)
    expected = plain(name, 8, 2, 2, 3, clip=0.5)
    for step in range(3):
        mean = sum(rank["losses"][step] for rank in found) / 4  # (each rank has its own rows' loss)
        assert abs(mean - expected["losses"][step]) <= 1e-5 * abs(expected["losses"][step])
    assert all(abs(rank["norm"] - expected["norm"]) <= 1e-5 * expected["norm"] for rank in found)
    weights = together(found, "weights")
    assert weights.keys() == expected["weights"].keys()
    assert all(apart(weights[n], v) <= 1e-5 for n, v in expected["weights"].items())


def _order(zero: int) -> list[str]:
    """What a rank's forwards begin with, in a step: programs that gather, and waits for what other stages send."""
    order: list[str] = []
    run, take = Executable.run, Channels.take

    def running(executable: Executable, values: list[Any]) -> Any:
        order.append(executable.program.name.rpartition(".")[2].rstrip("0123456789"))
        return run(executable, values)

    def taking(channels: Channels, action: Action) -> Any:
        order.append(f"take {action.kind}")
        return take(channels, action)

    fields = {"mesh": {"pp": 2, "dp": 2}, "micro_batches": 2, "zero": zero, "schedule": "gpipe", "backend": "eager"}
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = zgraph.compile(plain, zgraph.Plan(**fields), loss_fn=nn.functional.mse_loss)
    x = torch.randn(4, 8)
    model.train_step(x, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executable, "run", running)
        patch.setattr(Channels, "take", taking)
        model.zero_grad()
        model.train_step(x, x)
    return order


@sweep("zero, again", [(0, []), (1, []), (3, ["ahead"])], quick=1)
def test_a_stage_starts_its_first_gathers_before_it_waits_for_what_it_receives(
    four: Ranks, zero: int, again: list[str]
) -> None:
    first = ["ahead"] if zero else []
    for order in four.run(_order, zero):
        assert order[: order.index("take B")] == [*first, "take F", "forward", *again, "take F", "forward"]


@sweep("name, zero", [("gpt2", 1), ("gpt2", 2), ("gpt2", 3), ("tied words", 3)], quick=1)
def test_gradients_over_stages_and_data_are_the_mean_of_one_process(four: Ranks, name: str, zero: int) -> None:
    fields = {"mesh": {"pp": 2, "dp": 2}, "micro_batches": 2, "zero": zero}
    found = four.run(train, name, fields, 8, 1)
    expected = plain(name, 8, 2, 2, 1)
    gradients = together(found, "gradients")
    assert all(apart(gradients[n], g) <= SUMS for n, g in expected["gradients"].items())


@pytest.mark.slow
def test_half_precision_over_stages_and_data_stays_within_its_rounding(four: Ranks) -> None:
    fields = {"mesh": {"pp": 2, "dp": 2}, "micro_batches": 2, "precision": "bf16"}
    found = four.run(train, "llama", fields, 8, 1)
    alone = plain("llama", 8, 2, 2, 1)
    total = torch.stack([g.norm() for g in alone["gradients"].values()]).norm()
    for name, value in together(found, "gradients").items():
        assert float((value - alone["gradients"][name]).norm()) <= 4 * LOW * float(total), name


@sweep("name", ["gpt2", "tied words"], quick=1)
def test_four_stages_of_a_tied_model(four: Ranks, name: str) -> None:
    fields = {
        "mesh": {"pp": 4},
        "micro_batches": 4,
        "schedule": "1f1b",
        "optimizer": zgraph.AdamW(lr=1e-3, weight_decay=0.01),
    }
    found = four.run(train, name, fields, 8, 3)
    expected = plain(name, 8, 4, 1, 3)
    weights = together(found, "weights")  # (the tied one has the same bits on both of its ranks)
    assert weights.keys() == expected["weights"].keys()
    assert found[0]["losses"] == found[3]["losses"]
    assert abs(found[0]["losses"][2] - expected["losses"][2]) <= 1e-5 * expected["losses"][2]


class Shifted(nn.Module):
    """Parameters whose gradients are one tensor, which is also what goes back to the stage before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(2, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) + self.shifts[0]
        return self.second(x + self.shifts[1] + self.shifts[2]).square().mean()


def shifted() -> nn.Module:
    torch.manual_seed(0)
    return Shifted()


def train_shifted(schedule: str) -> dict[str, torch.Tensor]:
    plan = zgraph.Plan(mesh={"pp": 2}, micro_batches=3, backend="eager", schedule=schedule, partition=["second"])
    model: Any = zgraph.compile(shifted(), plan)
    model.train_step(torch.arange(24.0).reshape(6, 4) / 24)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["gpipe", "zb"])
def test_gradients_that_are_one_tensor_are_added_up_apart(two: Ranks, schedule: str) -> None:
    model = shifted()
    for part in (torch.arange(24.0).reshape(6, 4) / 24).chunk(3):
        model(part).backward(torch.tensor(1 / 3))
    found = {n: g for rank in two.run(train_shifted, schedule) for n, g in rank.items()}
    assert found.keys() == {n for n, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        assert torch.equal(found[name], param.grad), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [
        ({"mesh": {"pp": 4, "dp": 2}, "zero": 3, "schedule": "zb"}, 1e-5),
        ({"mesh": {"pp": 2, "dp": 4}, "zero": 2, "schedule": "zbv", "precision": "bf16"}, LOW),
    ],
)
def test_eight_ranks_train_as_one_process(fields: dict[str, Any], tolerance: float) -> None:
    data = fields["mesh"]["dp"]
    both = {"micro_batches": 4, "grad_clip": 0.5, "optimizer": zgraph.AdamW(lr=1e-3, weight_decay=0.01)}
    with Ranks(8) as ranks:
        found = ranks.run(train, "llama", fields | both, 4 * data, 2)
    expected = plain("llama", 4 * data, 4, data, 2, clip=0.5)
    for step in range(2):
        mean = sum(rank["losses"][step] for rank in found) / 8
        assert abs(mean - expected["losses"][step]) <= tolerance * abs(expected["losses"][step])
    assert all(abs(rank["norm"] - expected["norm"]) <= 2 * tolerance * expected["norm"] for rank in found)
    assert together(found, "weights").keys() == expected["weights"].keys()


@pytest.mark.slow
def test_stages_whose_states_and_activations_lie_on_disk_or_are_computed_again(two: Ranks, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "mesh": {"pp": 2},
        "micro_batches": 4,
        "zero": 3,
        "schedule": "zb",
        "optimizer": zgraph.AdamW(lr=1e-3, weight_decay=0.01),
    }
    usual = two.run(train, "llama", fields, 8, 2)
    away = {"offload": {w: f"nvme:{tmp_path}" for w in ("activations", "optimizer")} | {"least_bytes": 0}}
    for other in (away, {"recompute": "full"}):
        found = two.run(train, "llama", fields | other, 8, 2)
        for mine, theirs in zip(found, usual, strict=True):
            assert mine["losses"] == theirs["losses"]
            assert all(torch.equal(mine["weights"][n], v) for n, v in theirs["weights"].items())


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled_stages_give_the_gradients_of_one_process(two: Ranks) -> None:
    fields = {"mesh": {"pp": 2}, "micro_batches": 2, "schedule": "zb", "backend": "inductor"}
    found = two.run(train, "llama", fields, 4, 1)
    expected = plain("llama", 4, 2, 1, 1)
    gradients = together(found, "gradients")
    assert all(apart(gradients[n], g) <= 1e-5 for n, g in expected["gradients"].items())


def holds(partition: Any) -> tuple[int, int]:
    with torch.device("meta"):
        model = model_of("words")
    torch.manual_seed(5)
    plan = zgraph.Plan(mesh={"pp": 2}, micro_batches=2, backend="eager", partition=partition)
    compiled: Any = zgraph.compile(model, plan, inputs=batch_of("llama", 4))
    real = sum(p.numel() for p in compiled.parameters() if not p.is_meta)
    compiled.train_step(**batch_of("llama", 4))
    assert all(p.grad is None for p in compiled.parameters() if p.is_meta)
    return real, sum(p.numel() for p in compiled.parameters())


def test_no_rank_holds_more_than_its_stages(two: Ranks) -> None:
    (first, total), (second, _) = two.run(holds, "parameters")
    assert first + second == total
    assert max(first, second) < 0.75 * total


def evaluate(rows: int) -> Any:
    plan = zgraph.Plan(mesh={"pp": 2}, micro_batches=2, backend="eager")
    model: Any = zgraph.compile(model_of("words"), plan)
    batch = batch_of("llama", rows)
    step = model.eval_step(**batch)
    with torch.no_grad():
        called = model(**batch)
    with pytest.raises(StepError, match="forward with gradients"):
        model(**batch)
    trained = model.train_step(**batch)
    same = step.logits is None or (torch.equal(step.logits, called.logits) and model.training)
    return same, None if step.logits is None else step.logits, float(trained.loss)


@sweep("rows", [4, 3], quick=1)
def test_a_forward_alone_gives_the_model_s_output_on_the_last_stage(two: Ranks, rows: int) -> None:
    if rows == 3:  # (two micro-batches do not divide it)
        with pytest.raises(AssertionError, match="do not divide a batch of 3"):
            two.run(evaluate, rows)
        return
    (_, none, loss), (same, logits, loss_too) = two.run(evaluate, rows)
    with torch.no_grad():
        batch = batch_of("llama", rows)
        expected = torch.cat(
            [model_of("words").eval()(**{k: v[i : i + 2] for k, v in batch.items()}).logits for i in (0, 2)]
        )
    assert none is None and same and loss == loss_too
    assert torch.equal(logits, expected)


def warned(use_cache: bool) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zgraph.stages.partition_model")
    log.addHandler(handler)
    model = model_of("llama")
    model.config.use_cache = use_cache
    plan = zgraph.Plan(mesh={"pp": 2}, micro_batches=2, backend="eager")
    zgraph.compile(model, plan, inputs=batch_of("llama", 4))
    log.removeHandler(handler)
    return found


@pytest.mark.slow
def test_outputs_that_only_travel_are_told(two: Ranks) -> None:
    (told, _), (silent, _) = two.run(warned, True), two.run(warned, False)
    assert any("2 outputs of earlier stages go to the last one" in text for text in told)
    assert not any("outputs of earlier stages" in text for text in silent)


def refused(fields: dict[str, Any], rows: int) -> str:
    try:
        train("words", fields, rows, 1)
    except (PlanError, StepError) as error:
        return f"{error.where}: {error.what}"
    return "nothing"


@sweep(
    "fields, rows, says",
    [
        ({"micro_batches": 3}, 4, "micro_batches: 3 micro-batches do not divide a batch of 4"),
        ({"micro_batches": 2, "schedule": "dualpipev"}, 4, "micro_batches"),
        ({"micro_batches": 2, "schedule": "gpipe", "virtual_stages": 40}, 4, "stages"),
        ({"micro_batches": 2, "partition": ["layerz.1"]}, 4, "partition"),
    ],
    quick=(0, 3),
)
def test_what_can_t_be_cut_or_run_is_refused_on_every_rank(
    two: Ranks, fields: dict[str, Any], rows: int, says: str
) -> None:
    found = two.run(refused, {"mesh": {"pp": 2}} | fields, rows)
    assert found[0] == found[1]
    assert says in found[0]


def lose_a_rank(where: str) -> str:
    plan = zgraph.Plan(mesh={"pp": 2}, micro_batches=4, backend="eager", optimizer=zgraph.SGD(lr=0.1))
    model: Any = zgraph.compile(model_of("words"), plan)
    batch = batch_of("llama", 8)
    model.train_step(**batch)
    if dist.get_rank() == 1 and where == "between steps":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        backward = Worker.backward

        def die(worker: Worker, action: Action, *given: Any) -> Any:
            if action.micro_batch == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return backward(worker, action, *given)

        Worker.backward = die  # type: ignore[method-assign]
    try:
        model.train_step(**batch)
    except CollectiveError as error:
        return str(error)
    return "nothing"


@sweep("where", ["between steps", "in a backward"], quick=1)
def test_a_rank_that_dies_is_an_error_on_the_others(where: str) -> None:
    with Ranks(2, timeout=20.0) as ranks:
        outcomes = ranks.attempt(lose_a_rank, where)
    assert outcomes[1].died
    said = outcomes[0].value
    assert "rank 1 is gone" in said and "at step 2" in said, outcomes[0].traceback or said
    if where == "in a backward":
        assert "stage 0 has lost rank 1" in said
        # (What it had begun to send may have died with it: rank 0 may be a micro-batch behind.)
        behind = "the backward of micro-batch [12]: .* on its way from stage 1 to stage 0"
        ahead = "the forward of micro-batch 3: .* on its way from stage 0 to stage 1"
        assert re.search(f"{behind}|{ahead}", said), said


# -- around a step ------------------------------------------------------------------------------------------------------
class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.shift, self.other = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + (self.shift + self.other)  # (one tensor is the gradient of both)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def mean_square(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, targets)


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(4.0 * count).reshape(count, 4) / 24, torch.linspace(-1, 1, 4 * count).reshape(count, 4)


def compiled_stack(loss_fn: Any = mean_square, **fields: Any) -> Any:
    plan = zgraph.Plan(
        **{"mesh": {"pp": 2}, "micro_batches": 3, "backend": "eager", "partition": ["layers.2"]} | fields
    )
    return zgraph.compile(stack(), plan, loss_fn=loss_fn)


def expected_of(model: nn.Module, count: int, micro_batches: int = 3) -> dict[str, torch.Tensor]:
    x, y = rows(count)
    for part, targets in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        mean_square(model(part), targets).backward(torch.tensor(1 / micro_batches))
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def freeze_later(schedule: str) -> list[dict[str, torch.Tensor]]:
    model, found = compiled_stack(schedule=schedule), []
    model.zero_grad()  # (also before the model is cut)
    for frozen in ((), ("shift", "other", "layers.0", "layers.1"), ("layers.3",)):
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        model.train_step(*rows(6))
        found.append(gradients(model))
        model.zero_grad()
    return found


@sweep("schedule", ["1f1b", "zb"], quick=1)
def test_what_is_frozen_and_unfrozen_between_steps_trains_accordingly(two: Ranks, schedule: str) -> None:
    first, second = two.run(freeze_later, schedule)
    for number, frozen in enumerate(((), ("shift", "other", "layers.0", "layers.1"), ("layers.3",))):
        model = stack()
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        wanted, found = expected_of(model, 6), first[number] | second[number]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[n], g) for n, g in wanted.items())


def evaluate_first() -> list[dict[str, torch.Tensor]]:
    model, found = compiled_stack(), []
    model.eval_step(rows(2)[0])  # (which three micro-batches do not divide)
    for _ in range(2):
        model.train_step(*rows(6))
        found.append(gradients(model))
        model.zero_grad()
        model.eval_step(rows(6)[0])
    return found


def test_an_evaluation_may_come_first_and_targets_are_those_of_each_call(two: Ranks) -> None:
    first, second = two.run(evaluate_first)
    wanted = expected_of(stack(), 6)
    for mine, theirs in zip(first, second, strict=True):
        assert (mine | theirs).keys() == wanted.keys()
        assert all(torch.equal((mine | theirs)[n], g) for n, g in wanted.items())


def tied_without_an_optimizer() -> dict[str, Any]:
    """Twice: the group of the tied weight's ranks alone must not let ranks name the next model's groups differently."""
    train("gpt2", {"mesh": {"pp": 4}, "micro_batches": 4}, 8, 1)
    return train("gpt2", {"mesh": {"pp": 4}, "micro_batches": 4}, 8, 1)


@pytest.mark.slow
def test_a_tied_gradient_is_summed_without_an_optimizer_too(four: Ranks) -> None:
    found = four.run(tied_without_an_optimizer)
    expected = plain("gpt2", 8, 4, 1, 1)
    for name, value in expected["gradients"].items():
        assert all(apart(r["gradients"][name], value) <= SUMS for r in found if name in r["gradients"]), name


def refused_around(case: str) -> str:
    try:
        if case == "batches":
            x, y = rows(6)
            compiled_stack().train_step(x + dist.get_rank(), y)
        elif case == "schedule":
            compiled_stack(schedule="gpipe" if dist.get_rank() else "1f1b").train_step(*rows(6))
        else:
            head = nn.Linear(4, 4)
            compiled_stack(lambda output, targets: mean_square(head(output), targets)).train_step(*rows(6))
    except zgraph.errors.ZgraphError as error:
        return str(error.what)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("batches", "ranks [0, 1], of one pipeline, have different batches"),
        ("schedule", "ranks disagree about the plan"),
        ("parameters", "loss_fn reads parameters that want gradients"),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused_on_all_ranks(two: Ranks, case: str, says: str) -> None:
    first, second = two.run(refused_around, case)
    assert says in first or says in second
    assert "nothing" not in (first, second)


class Encoder(nn.Module):
    """torch's own layers, whose evaluation is one fused operator, and a head that only trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head, self.extra = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        found = self.head(x).mean()
        return found + self.extra(x).square().mean() if self.training else found


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder()


def train_then_evaluate() -> tuple[float, float]:
    plan = zgraph.Plan(mesh={"pp": 2}, micro_batches=2, backend="eager")
    model: Any = zgraph.compile(encoder(), plan)
    x = torch.linspace(-1, 1, 96).reshape(4, 3, 8)
    return float(model.train_step(x)), float(model.eval_step(x))


@pytest.mark.slow
def test_an_evaluation_may_read_fewer_parameters_and_otherwise(two: Ranks) -> None:
    found = two.run(train_then_evaluate)
    x, model = torch.linspace(-1, 1, 96).reshape(4, 3, 8), encoder()
    trained = (model(x[:2]) + model(x[2:])).detach() / 2
    with torch.no_grad():
        evaluated = (model.eval()(x[:2]) + model(x[2:])) / 2
    for losses in found:
        assert losses == pytest.approx((float(trained), float(evaluated)), rel=1e-5)
