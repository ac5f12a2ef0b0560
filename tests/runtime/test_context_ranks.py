"""Sequences divided over the ranks of "cp", on real ranks: gradients and steps are those of one process, and ranks that were given other
rows are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from test_tensor_parallel import ALONE, Values, apart, batch, built, furthest, of_all

import zgraph
from zgraph.errors import RankMismatchError

pytestmark = pytest.mark.gloo
LENGTH = 8
CP, DP_CP, CP_TP = {"cp": 2}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}


def mine(plan: zgraph.Plan, number: int) -> tuple[torch.Tensor, ...]:
    """The rows of this rank's place among those of "dp", whole sequences."""
    sizes = plan.resolve_mesh(dist.get_world_size()) if dist.is_initialized() else {}
    team, of = sizes.get("cp", 1) * sizes.get("tp", 1), sizes.get("dp", 1)
    return batch(number, dist.get_rank() // team % of if sizes else 0, of, LENGTH)


def gradients(mesh: dict[str, int], fields: dict[str, Any]) -> tuple[torch.Tensor, Values]:
    plan = zgraph.Plan(**{"backend": "eager", "mesh": mesh, **fields})
    model = zgraph.compile(built(), plan)
    loss = model(*mine(plan, 0))
    loss.backward()
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean, of_all(model, lambda p: p.grad)


@sweep(
    "mesh,fields",
    [
        (CP, {"context_attention": "heads"}),
        (CP, {"context_attention": "ring"}),
        (CP, {"context_attention": "heads", "backend": "inductor"}),
        (CP, {"context_attention": "ring", "backend": "inductor"}),
        ({"cp": 4}, {"context_attention": "ring"}),
        (DP_CP, {"zero": 3, "context_attention": "ring"}),
        (CP_TP, {"context_attention": "heads"}),
    ],
    quick=(1,),
    ids=str,
)
def test_gradients_are_those_of_one_process(two, four, mesh, fields):
    expected, of_one = gradients(ALONE, {})
    for loss, grads in (two if mesh == CP else four).run(gradients, mesh, fields):
        assert apart(loss, expected) < 1e-6 and furthest(grads, of_one) < 1e-5


def steps(mesh: dict[str, int], fields: dict[str, Any], folder: str | None) -> tuple[Values, float]:
    """(the weights after three clipped steps, what an evaluation gives); they are saved."""
    made = {"optimizer": zgraph.AdamW(lr=1e-2, eps=1e-4), "grad_clip": 0.3, "micro_batches": 2}
    plan = zgraph.Plan(**{"backend": "eager", "mesh": mesh, **made, **fields})
    model = zgraph.compile(built(), plan)
    for number in range(3):
        model.train_step(*mine(plan, number))
    if folder is not None:
        model.save_checkpoint(folder)
    return of_all(model), float(model.eval_step(*mine(plan, 9)))


def loaded(folder: str) -> Values:
    model = zgraph.compile(built(), zgraph.Plan(backend="eager", mesh=ALONE, optimizer=zgraph.AdamW(lr=1e-2)))
    model.load_checkpoint(folder)
    return of_all(model)


@pytest.mark.slow
def test_clipped_steps_are_those_of_one_process_and_load_in_it_bit_for_bit(four, tmp_path):
    expected, evaluated = steps(ALONE, {}, None)
    folder = str(tmp_path)
    found = four.run(steps, DP_CP, {"zero": 2}, folder)
    assert all(furthest(weights, expected) < 1e-5 for weights, _ in found)
    assert sum(value for _, value in found) / 4 == pytest.approx(evaluated, rel=1e-5)
    again = loaded(folder)
    assert all(torch.equal(again[name], value) for name, value in found[0][0].items())


def other_rows(mesh: dict[str, int]) -> str:
    model = zgraph.compile(built(), zgraph.Plan(backend="eager", mesh=mesh))
    try:
        model(*batch(dist.get_rank(), 0, 1, LENGTH))
    except RankMismatchError as error:
        return str(error)
    return "no error"


@sweep("mesh", [{"tp": 2}, CP], quick=1, ids=str)
def test_ranks_of_one_sequence_that_were_given_other_rows_are_told(two, mesh):
    for said in two.run(other_rows, mesh):
        assert "ranks disagree about the batch" in said and 'get_local_rank("dp")' in said


class Padded(torch.nn.Module):
    """Attention with a mask that is made of the tokens, and queries of one head: it is computed whole on each rank."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner = torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8)

    def forward(self, words):
        x = self.inner(self.embed(words)).unsqueeze(1)
        kept = (x[:, 0, :, :1] > 0) | (words > 2).unsqueeze(-1)
        mask = kept.transpose(1, 2).unsqueeze(1)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).square().mean()


def masked(mesh: dict[str, int], backend: str) -> Values:
    torch.manual_seed(0)
    plan = zgraph.Plan(backend=backend, mesh=mesh)
    model = zgraph.compile(Padded(), plan)
    words = torch.randint(8, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    model(words).backward()
    return of_all(model, lambda p: p.grad)


@sweep("backend", ["inductor", "eager"], quick=1)
def test_a_mask_that_is_gathered_is_waited_for(two, backend):
    expected = masked(ALONE, "eager")
    for found in two.run(masked, CP, backend):
        assert furthest(found, expected) < 1e-5
