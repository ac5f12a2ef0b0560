"""Masks that say the same to several queries, keys, heads or rows of a batch."""

from __future__ import annotations

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import captured_program
from zgraph.passes.canonicalize.cleanup import cleanup
from zgraph.passes.canonicalize.compact_masks import compact_masks
from zgraph.program.node import tensor

ROWS, HEADS, LENGTH, WIDTH = 3, 2, 12, 8
WHOLE = (ROWS, HEADS, LENGTH, LENGTH)


class Masked(nn.Module):
    """Attention with a mask that is made of which positions a row has."""

    def __init__(self, made) -> None:
        super().__init__()
        self.inner, self.made = nn.Linear(WIDTH, WIDTH), made

    def forward(self, x, shown):
        q = self.inner(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.made(shown)).square().mean()


def queries(length: int = LENGTH):
    return torch.arange(length).view(1, 1, -1, 1)


def by_number(shown: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)


MASKS = {
    # what the model makes, and the mask's sizes afterwards
    "padding": (lambda s: s[:, None, None, :].expand(*WHOLE), (ROWS, 1, 1, LENGTH)),
    "padding, as numbers": (
        lambda s: by_number(s[:, None, None, :].expand(ROWS, 1, LENGTH, LENGTH)),
        (ROWS, 1, 1, LENGTH),
    ),
    "as transformers has it": (
        lambda s: by_number(
            s[:, None, None, :].expand(ROWS, 1, LENGTH, LENGTH) & (queries() >= 0).expand(ROWS, 1, LENGTH, LENGTH)
        ),
        (ROWS, 1, 1, LENGTH),
    ),
    "everything": (lambda s: by_number((queries() + 2 >= 1).expand(ROWS, -1, -1, LENGTH)), (1, 1, 1, 1)),
    "added and scaled": (
        lambda s: (1.0 - s[:, None, None, :].float().expand(ROWS, 1, LENGTH, LENGTH)) * -3.0 + 0.5,
        (ROWS, 1, 1, LENGTH),
    ),
    "a number for each head": (
        lambda s: torch.arange(HEADS).view(-1, 1, 1).expand(HEADS, LENGTH, LENGTH)[None] * 1.0,
        (1, HEADS, 1, 1),
    ),
    "of queries and keys": (lambda s: by_number(s[:, None, None, :] & s[:, None, :, None]), (ROWS, 1, LENGTH, LENGTH)),
    "causal and padding": (
        lambda s: s[:, None, None, :] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
        (ROWS, 1, LENGTH, LENGTH),
    ),
    "two sizes": (lambda s: by_number(s[0].expand(LENGTH, LENGTH)), (1, LENGTH)),
    "positions of eight bits wrap around": (
        lambda s: by_number(
            (queries().to(torch.int8) + 127 >= 100).expand(ROWS, -1, -1, LENGTH)
            | (torch.arange(LENGTH, dtype=torch.int8) + 120 >= 100).view(1, 1, -1, 1)
            | s[:, None, None, :]
        ),
        (ROWS, 1, LENGTH, LENGTH),
    ),
    "some positions are below": (
        lambda s: by_number((queries() - 1 >= 0).expand(ROWS, -1, -1, LENGTH) | s[:, None, None, :]),
        (ROWS, 1, LENGTH, LENGTH),
    ),
}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    shown = torch.arange(LENGTH) < torch.tensor([LENGTH, 5, 9]).unsqueeze(1)
    return torch.randn(ROWS, LENGTH, WIDTH), shown


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_has_the_least_sizes(name):
    made, sizes = MASKS[name]
    program = captured_program(Masked(made), zgraph.Plan(backend="eager"), inputs(), 1)
    cleanup()(program)
    compact_masks()(program)
    masks = [n.kwargs["attn_mask"] for n in program.nodes if "attention" in str(n.target)]
    assert len(masks) == 2
    for mask in masks:
        shape = tuple(tensor(mask).shape)
        assert (1,) * (len(sizes) - len(shape)) + shape == sizes or shape == sizes
    if sizes[-2:] != (LENGTH, LENGTH):
        large = [
            n
            for n in program.nodes
            if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].shape[-2:] == (LENGTH, LENGTH)
        ]
        assert not large


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@sweep("sparse", [False, True], ids=["whole", "sparse"], quick=1)
def test_numbers_are_those_of_plain_pytorch(sparse, backend):
    """Of whole attention bit for bit on eager; of a sparse one that shows all blocks within float32's rounding."""
    attention = (
        {"*": zgraph.LocalWindow(block=8, num_sliding_window_blocks=5, attention="bidirectional")} if sparse else {}
    )
    for made, _ in MASKS.values():
        x, shown = inputs()
        torch.manual_seed(1)
        plain, model = Masked(made), Masked(made)
        model.load_state_dict(plain.state_dict())
        model = zgraph.compile(model, zgraph.Plan(backend=backend, attention=attention))
        losses = [m(x, shown) for m in (plain, model)]
        for loss in losses:
            loss.backward()
        expected, computed = (
            [loss, *(p.grad for p in m.parameters())] for loss, m in zip(losses, (plain, model), strict=True)
        )
        for one, other in zip(expected, computed, strict=True):
            if sparse or backend == "inductor":
                assert (one - other).abs().max() <= 1e-5 * max(1.0, float(one.abs().max()))
            else:
                assert torch.equal(one, other)


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize(
    "name", ["as transformers has it", "a number for each head", "two sizes", "causal and padding"]
)
def test_ranks_that_divide_a_sequence_or_heads_have_their_part(name, mesh):
    torch.manual_seed(0)
    assert zgraph.verify(Masked(MASKS[name][0]), zgraph.Plan(mesh=mesh, backend="eager"), 2, inputs()).ok


def bert(implementation: str):
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=implementation,
    )
    return transformers.BertForMaskedLM(config)


@sweep("implementation, sparse", [(name, sparse) for name in ("eager", "sdpa") for sparse in (False, True)], quick=1)
@pytest.mark.slow
def test_a_padded_encoder_holds_no_mask_of_length_by_length(implementation, sparse):
    """For each length: one program has symbols for them."""
    layout = zgraph.LocalWindow(block=8, num_sliding_window_blocks=15, attention="bidirectional")
    plan = zgraph.Plan(backend="eager", attention={"*": layout} if sparse else {})
    plain, model = bert(implementation), zgraph.compile(bert(implementation), plan)
    for length in (20, 33, 47):
        tokens = torch.randint(50, (ROWS, length))
        batch = {
            "input_ids": tokens,
            "labels": tokens,
            "attention_mask": (torch.arange(length) < torch.tensor([[9], [length], [17]])).long(),
        }
        plain.zero_grad()
        model.zero_grad()
        losses = [m(**batch).loss for m in (plain, model)]
        for loss in losses:
            loss.backward()
        assert abs(losses[0] - losses[1]) < 1e-5
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert (one.grad - other.grad).abs().max() < 1e-5
    if sparse or implementation == "sdpa":
        for step in model.zgraph.programs.values():
            for node in (n for executable in step.executables() for n in executable.program.graph.nodes):
                shape = getattr(node.meta.get("val"), "shape", ())
                assert len(shape) < 4 or str(shape[-2]) != str(shape[-1]) or shape[-1] == 1
