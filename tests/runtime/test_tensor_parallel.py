"""Weights divided over the ranks of "tp", on real ranks: what a user sees of them, and that they train as one process does.

Functions at the top of this file run on the ranks; each returns what the test compares.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, kept
from sweeps import sweep
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import zgraph
from zgraph.checkpoint.comparison import compare
from zgraph.checkpoint.detect_format import open_checkpoint

pytestmark = pytest.mark.gloo
WORDS, WIDTH, ROWS = 24, 8, 8


class Block(nn.Module):
    """Attention by one weight for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.drop(self.back(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.between(x)))))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 4, dropout: float = 0.0, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, words, targets):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def built(**fields: Any) -> nn.Module:
    torch.manual_seed(0)
    return Net(**fields)


class Pair(nn.Module):
    """The smallest that is divided: a matrix by its rows, and one by its columns."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WORDS)
        self.drop = nn.Dropout(dropout)

    def forward(self, words, targets):
        inner = self.drop(F.gelu(self.up(self.embed(words))))
        return F.cross_entropy(self.down(inner).flatten(0, 1), targets.flatten())


def pair(**fields: Any) -> nn.Module:
    torch.manual_seed(0)
    return Pair(**fields)


def batch(number: int, share: int = 0, of: int = 1, length: int = 5) -> tuple[torch.Tensor, ...]:
    """This share of the rows of one batch."""
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(WORDS, (ROWS, length), generator=generator).chunk(of)[share] for _ in range(2))


def mine(plan: zgraph.Plan, number: int, length: int = 5) -> tuple[torch.Tensor, ...]:
    """The rows that this rank's place among those of "dp" says."""
    if not dist.is_initialized():
        return batch(number, length=length)
    sizes = plan.resolve_mesh(dist.get_world_size())
    of = sizes.get("dp", 1)
    return batch(number, dist.get_rank() // sizes.get("tp", 1) % of, of, length)


def plan_of(mesh: dict[str, int], **fields: Any) -> zgraph.Plan:
    divides = {"tensor_parallel": "auto"} if "tp" in mesh else {}
    staged = {"micro_batches": 2, "partition": ("layers.1",)} if "pp" in mesh else {}
    return zgraph.Plan(**{"backend": "eager", "mesh": mesh, **divides, **staged, **fields})


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()).clone()


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-12))


def divided_here(model: nn.Module) -> list[str]:
    """The names of parameters of which this rank has a part by "tp"."""
    found = []
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            at = (param.device_mesh.mesh_dim_names or ()).index("tp")
            found += [name] if param.placements[at].is_shard() else []
    return found


# -- as one process -----------------------------------------------------------------------------------------------------
Values = dict[str, torch.Tensor]


def of_all(model: nn.Module, of: Callable[[torch.Tensor], Any] = lambda p: p) -> Values:
    """What is asked of each parameter that is here, whole."""
    return {n: whole(of(p)) for n, p in model.named_parameters() if not p.is_meta}


def gradients(
    mesh: dict[str, int], fields: dict[str, Any], name: str = "two layers"
) -> tuple[torch.Tensor, Values, int]:
    """(the mean loss of all ranks, the gradients, how many parameters are divided)."""
    plan = plan_of(mesh, **fields)
    model = zgraph.compile(MODELS[name](), plan)
    loss = model(*mine(plan, 0))
    loss.backward()
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean, of_all(model, lambda p: p.grad), len(divided_here(model))


# (Gradients of the biases of keys are zero, but for how they round: AdamW is not to make steps of that.)
EPS = 1e-4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "eps": EPS},
    "Muon": {"lr": 1e-2, "companion": zgraph.AdamW(lr=1e-2, eps=EPS)},
    "LAMB": {"lr": 1e-2, "weight_decay": 0.1, "eps": EPS},
}


def steps(mesh: dict[str, int], name: str, fields: dict[str, Any], model: str = "pair") -> tuple[Values, Values]:
    """(the weights after three steps, their averages)."""
    made = {"optimizer": getattr(zgraph, name)(**OPTIMIZERS[name]), "grad_clip": 0.3, "ema": 0.9}
    plan = plan_of(mesh, **made, **fields)
    compiled = zgraph.compile(MODELS[model](), plan)
    for number in range(3):
        compiled.train_step(*mine(plan, number))
    weights = of_all(compiled)
    with compiled.zgraph.averaged_weights():
        return weights, of_all(compiled)


def own_loop(mesh: dict[str, int], zero: int) -> tuple[Values, list[torch.Tensor]]:
    """torch's own optimizer and clipping on the parameters as they are: (the weights after three steps, the norms)."""
    plan = plan_of(mesh, zero=zero)
    model = zgraph.compile(pair(), plan, inputs=mine(plan, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    norms = []
    for number in range(3):
        model(*mine(plan, number)).backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return of_all(model), norms


ALONE = {"dp": 1}


def furthest(found: Values, expected: Values) -> float:
    return max(apart(value, expected[name]) for name, value in found.items())


# -- what a user sees ---------------------------------------------------------------------------------------------------
def parameters(mesh: dict[str, int], zero: int) -> tuple[set[str], Values, Values]:
    """(the kinds of their placements, the whole parameters, what a state dict of another model was loaded as)."""
    plan = plan_of(mesh, zero=zero)
    model, other = (zgraph.compile(built(), plan, inputs=mine(plan, 0)) for _ in range(2))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    kinds = {type(k).__name__ for p in model.parameters() for k in p.placements}
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict({n: v.clone() for n, v in model.state_dict().items()})
    return kinds, of_all(model), of_all(other)


def from_meta(mesh: dict[str, int]) -> Values:
    with torch.device("meta"):
        model = Pair()
    torch.manual_seed(5)
    plan = plan_of(mesh, zero=0 if mesh == ALONE else 3)
    return of_all(zgraph.compile(model, plan, inputs=mine(plan, 0)))


def gpt2() -> nn.Module:
    """Queries, keys and values are one weight, stored the other way round; the head is tied."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": 8, "n_embd": WIDTH, "n_layer": 1, "n_head": 4, "use_cache": False}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two layers": lambda: built(layers=2),
    "a layer": built,
    "pair": pair,
    "gpt2": gpt2,
}


def trained(name: str, mesh: dict[str, int], numbers: range, **fields: Any) -> nn.Module:
    plan = plan_of(mesh, optimizer=zgraph.AdamW(lr=1e-2, eps=EPS), ema=0.9, **fields)
    model = zgraph.compile(MODELS[name](), plan)
    go_on(model, numbers)
    return model


def go_on(model: nn.Module, numbers: range) -> list[float]:
    found = []
    for number in numbers:
        words, _ = mine(model.zgraph.plan, number)
        if hasattr(model, "config"):
            found.append(float(model.train_step(input_ids=words, labels=words).loss))
        else:
            found.append(float(model.train_step(words, words)))
    return found


def saved(name: str, mesh: dict[str, int], where: str, fields: dict[str, Any]) -> list[float]:
    """Losses of the steps after a checkpoint, and of a model of transformers' after a folder of its own."""
    model = trained(name, mesh, range(2), **fields)
    model.save_checkpoint(where, "first")
    if hasattr(model, "config"):
        model.save_pretrained(f"{where}/published")
    return go_on(model, range(2, 4))


def loaded(name: str, mesh: dict[str, int], where: str, tag: str, again: str, fields: dict[str, Any]) -> list[float]:
    """Load a checkpoint, save it again at once, and go on."""
    model = trained(name, mesh, range(7, 8), **fields)  # (what is there is to be written over)
    model.load_checkpoint(where, tag)
    model.save_checkpoint(where, again)
    return go_on(model, range(2, 4))


def recompiled(mesh: dict[str, int], stages: tuple[int, ...]) -> tuple[Values, Values]:
    """(the weights after a step of each stage, a deep copy's after one step more)."""
    made = {"optimizer": zgraph.AdamW(lr=1e-2, eps=EPS), "grad_clip": 0.3}
    model = zgraph.compile(pair(), plan_of(mesh, zero=stages[0], **made))
    for number, zero in enumerate(stages):
        if number:
            model.zgraph.recompile(plan_of(mesh, zero=zero, **made))
        model.train_step(*mine(model.zgraph.plan, number))
    twin = copy.deepcopy(model)
    twin.train_step(*mine(twin.zgraph.plan, len(stages)))
    return of_all(model), of_all(twin)


def evaluated(mesh: dict[str, int]) -> list[float]:
    """Losses of rows that all ranks are given (evaluated first, then without gradients, then of longer rows), and how many programs."""
    model = zgraph.compile(pair(dropout=0.5), plan_of(mesh))
    found = [float(model.eval_step(*batch(0)))]
    model.eval()
    with torch.no_grad():
        found.append(float(model(*batch(0))))
    found.append(float(model(*batch(1, length=7))))
    return [*found, len(model.zgraph.programs)]


def told(mesh: dict[str, int]) -> tuple[str, str, str, int]:
    """(the report, why a weight is as it is, timings, of how many ranks)."""
    plan = plan_of(mesh, optimizer=zgraph.AdamW(), grad_clip=1.0)
    model = zgraph.compile(built(), plan)
    for number in range(2):
        model.train_step(*mine(plan, number))
    handle = model.zgraph
    timings = handle.timings(tokens=20)
    return str(handle.report()), str(handle.explain("layers.0.up.weight")), str(timings), len(timings.ranks)


# -- bad input ----------------------------------------------------------------------------------------------------------
def refused(width: int, heads: int, fields: dict[str, Any], again: bool) -> tuple[str, bool]:
    """(what was said, whether the parameters are as they were). It is compiled `again` by another plan."""
    model = built(width=width, heads=heads)
    before = [(p, p.detach().clone()) for p in model.parameters()]
    try:
        zgraph.compile(model, plan_of({"tp": 2}, **fields), inputs=batch(0))
    except zgraph.errors.PlanError as error:
        dist.barrier()  # (all ranks are here)
        same = [p is q and torch.equal(p, old) for p, (q, old) in zip(model.parameters(), before, strict=True)]
        if again:
            zgraph.compile(model, plan_of({"tp": 2}), inputs=batch(0))
        return str(error), all(same)
    return "no error", False


def stale_optimizer() -> str:
    model = zgraph.compile(pair(), plan_of({"tp": 2}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*batch(0)).backward()
    try:
        optimizer.step()
    except zgraph.errors.StepError as error:
        return str(error)
    return "no error"


# -- random numbers -----------------------------------------------------------------------------------------------------
def dropped(mesh: dict[str, int], backend: str) -> Values:
    """Gradients of a model with dropout, all ranks seeded alike."""
    model = zgraph.compile(pair(dropout=0.5), plan_of(mesh, backend=backend))
    torch.manual_seed(3)
    model(*mine(plan_of(mesh), 0)).backward()
    return of_all(model, lambda p: p.grad)


def seeded(mesh: dict[str, int], by_rank: bool) -> str:
    """What is said of seeds of each rank's own, or of each data rank's."""
    plan = plan_of(mesh, optimizer=zgraph.SGD(lr=0.1))
    if str(mesh) not in kept:
        kept[str(mesh)] = zgraph.compile(built(dropout=0.5, layers=2) if "pp" in mesh else pair(dropout=0.5), plan)
    model = kept[str(mesh)]
    torch.manual_seed(dist.get_rank() if by_rank else dist.get_rank() // 2)
    try:
        model.train_step(*mine(plan, 0))
    except (zgraph.errors.RankMismatchError, zgraph.errors.PeerError) as error:
        return str(error)
    return "no error"


TP, DP_TP, PP_TP = {"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}


def worlds(two: Ranks, four: Ranks, mesh: dict[str, int]) -> Ranks:
    return two if mesh == TP else four


@sweep(
    "mesh, fields, layers",
    [
        (TP, {}, 2),
        (TP, {"sequence_parallel": True}, 2),
        (TP, {"sequence_parallel": True, "async_tensor_parallel": 2}, 2),
        (TP, {"sequence_parallel": True, "async_tensor_parallel": 2}, 1),
        ({"tp": 4}, {}, 2),
        (DP_TP, {"zero": 1}, 2),
        (DP_TP, {"zero": 3}, 2),
    ],
    quick=(3,),
    ids=str,
)
def test_gradients_are_those_of_one_process(two, four, mesh, fields, layers):
    name = ("a layer", "two layers")[layers - 1]
    expected, of_one, _ = gradients(ALONE, {}, name)
    for loss, grads, divided in worlds(two, four, mesh).run(gradients, mesh, fields, name):
        assert apart(loss, expected) < 1e-6 and furthest(grads, of_one) < 1e-5
        assert divided >= 2 + 6 * layers  # all matrices, and the biases of their rows


@pytest.mark.parametrize(
    "name, mesh, fields, model",
    [
        ("AdamW", TP, {}, "a layer"),
        ("AdamW", DP_TP, {"zero": 3}, "a layer"),
        ("Muon", DP_TP, {"zero": 1}, "a layer"),
        ("Muon", DP_TP, {"zero": 1}, "pair"),
        ("Muon", PP_TP, {}, "two layers"),
        ("LAMB", DP_TP, {"zero": 3}, "a layer"),
        ("LAMB", PP_TP, {}, "two layers"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_clipped_averaged_steps_are_those_of_one_process(two, four, name, mesh, fields, model):
    weights, averages = steps(ALONE, name, {}, model)
    tolerance = 1e-3 if name == "Muon" else 1e-5  # (Muon's iteration is made of products in bfloat16: 4e-3)
    for found, mean in worlds(two, four, mesh).run(steps, mesh, name, fields, model):
        assert furthest(found, weights) < tolerance and furthest(mean, averages) < tolerance


@pytest.mark.parametrize("mesh, zero", [(TP, 0), (DP_TP, 1), (DP_TP, 3)], ids=str)
@pytest.mark.slow
def test_torchs_own_optimizer_and_clipping_work_on_divided_parameters(two, four, mesh, zero):
    expected, norms_of_one = own_loop(ALONE, 0)
    for weights, norms in worlds(two, four, mesh).run(own_loop, mesh, zero):
        assert furthest(weights, expected) < 1e-5
        assert max(map(apart, norms, norms_of_one)) < 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.slow
def test_low_precision_is_that_of_one_process(two, precision):
    weights, _ = steps(ALONE, "AdamW", {"precision": precision})
    for found, _ in two.run(steps, TP, "AdamW", {"precision": precision}):
        assert furthest(found, weights) < 2e-2  # sums of rounded parts: some updates of AdamW have another sign


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize(("name", "pieces"), [("a layer", "off"), ("a layer", 2), ("pair", 2)])
def test_gradients_with_inductor_are_those_of_one_process(two, name, pieces):
    expected, of_one, _ = gradients(ALONE, {}, name)
    for loss, grads, _ in two.run(gradients, TP, {"backend": "inductor", "async_tensor_parallel": pieces}, name):
        assert apart(loss, expected) < 1e-6 and furthest(grads, of_one) < 1e-5


@pytest.mark.parametrize("mesh, zero", [(TP, 0), (DP_TP, 3)], ids=str)
@pytest.mark.slow
def test_parameters_are_plain_shards_that_a_state_dict_carries(two, four, mesh, zero):
    expected = of_all(built())
    for kinds, values, again in worlds(two, four, mesh).run(parameters, mesh, zero):
        assert kinds == {"Shard", "Replicate"}
        for name, value in expected.items():
            assert torch.equal(values[name], value) and torch.equal(again[name], value)


@pytest.mark.slow
def test_a_model_on_the_meta_device_gets_the_values_of_one_process(four):
    expected = from_meta(ALONE)
    for found in four.run(from_meta, DP_TP):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


OTHERS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp4": ({"tp": 4}, {}),
    "dp4": ({"dp": 4}, {"zero": 2}),
    "dp2tp2": (DP_TP, {"zero": 1}),
    "dp2": ({"dp": 2}, {"zero": 2}),
}


@pytest.mark.parametrize(
    "name, mesh, others",
    [
        ("gpt2", DP_TP, ("tp4", "dp4", "dp2tp2")),
        ("gpt2", DP_TP, ("tp4",)),
        ("pair", DP_TP, ("tp4",)),
        ("pair", TP, ("dp2",)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_any_division_loads_what_any_other_saved(two, four, tmp_path, name, mesh, others):
    """Each loads the one before and saves it again at once, bit for bit the same, and goes on as the first; so does one process."""
    import transformers

    where, ranks, stage = str(tmp_path), worlds(two, four, mesh), {"zero": 3 if "dp" in mesh else 0}
    losses = ranks.run(saved, name, mesh, where, stage)
    mean = [sum(one) / ranks.world for one in zip(*losses, strict=True)]
    before, first = "first", open_checkpoint(Path(where), "first")
    for again in others:
        other, fields = OTHERS[again]
        found = ranks.run(loaded, name, other, where, before, again, fields)
        assert [sum(one) / ranks.world for one in zip(*found, strict=True)] == pytest.approx(mean, rel=1e-5)
        same = compare(first, open_checkpoint(tmp_path, again))
        assert same.equal, (again, same.to_json())
        before = again
    assert loaded(name, ALONE, where, before, "alone", {"zero": 0}) == pytest.approx(mean, rel=1e-5)
    assert compare(first, open_checkpoint(tmp_path, "alone")).equal
    assert ranks.run(loaded, name, mesh, where, "alone", "back", stage) == losses
    if name == "gpt2":
        published = transformers.GPT2LMHeadModel.from_pretrained(f"{where}/published")
        for path, value in published.named_parameters():
            assert torch.equal(value, first.whole(f"model.{path}")), path


@pytest.mark.parametrize("mesh, stages", [(DP_TP, (1, 3)), (TP, (0, 0))], ids=str)
@pytest.mark.slow
def test_recompile_and_deepcopy_go_on_with_divided_weights(two, four, mesh, stages):
    weights, twins = recompiled(ALONE, (0, 0))
    for found, twin in worlds(two, four, mesh).run(recompiled, mesh, stages):
        assert furthest(found, weights) < 1e-5 and furthest(twin, twins) < 1e-5


@pytest.mark.slow
def test_evaluation_gives_all_ranks_what_one_process_gives(two):
    expected = evaluated(ALONE)
    for found in two.run(evaluated, TP):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_reports_timings_and_explanations_know_divided_weights(two):
    size = sum(p.numel() * 4 for p in built().parameters())
    for report, why, timings, ranks in two.run(told, TP):
        assert "divided by 2" in report and f"{size} bytes in all" in report
        assert "divided along dimension 0" in why and "2 ranks of 'tp'" in why
        assert "tokens/s" in timings and ranks == 2


@sweep(
    "heads, fields, said",
    [
        (
            4,
            {"tensor_parallel": {"layers.*.upp": "colwise"}},
            ["'layers.*.upp'", "matches no module", "did you mean", ".up'"],
        ),
        (3, {"tensor_parallel": {"layers.*.qkv": "colwise"}}, ["can't be divided into 2 parts", "heads"]),
        (4, {"tensor_parallel": "model"}, ["Net has no table of its own", "auto"]),
    ],
    ids=["no module", "heads", "no table"],
    quick=(1,),
)
def test_what_does_not_fit_the_model_is_refused_on_all_ranks_and_changes_nothing(two, heads, fields, said):
    for text, same in two.run(refused, 12, heads, fields, heads == 3):
        assert all(part in text for part in said), text
        assert same


def test_what_no_model_fits_is_refused_at_once():
    with pytest.raises(zgraph.errors.PlanError, match="column"):
        plan_of({"tp": 2}, tensor_parallel={"layers.*.up": "column"})
    with pytest.raises(zgraph.errors.PlanError, match="without ranks that divide weights"):
        plan_of({"dp": 2}, tensor_parallel={"layers.*.up": "colwise"})


def test_an_optimizer_that_holds_whole_weights_is_refused(two):
    for said in two.run(stale_optimizer):
        assert "made before the model's weights were divided" in said and "embed.weight" in said


@pytest.mark.parametrize("backend", ["eager"])
def test_dropout_with_equal_seeds_is_that_of_one_process(two, backend):
    expected = dropped(ALONE, backend)
    for found in two.run(dropped, TP, backend):
        assert furthest(found, expected) < 1e-5


@sweep("mesh", [DP_TP, PP_TP, TP], quick=1, ids=str)
def test_ranks_that_would_draw_other_numbers_of_the_same_rows_are_told(two, four, mesh):
    """(In stages it is those of one stage that are compared: the others are told that they have left the step.)"""
    ranks = worlds(two, four, mesh)
    assert {*ranks.run(seeded, mesh, False)} == {"no error"}
    for said in ranks.run(seeded, mesh, True):
        assert "ranks disagree about random numbers" in said and "torch.manual_seed" in said
