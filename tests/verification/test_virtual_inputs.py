"""What `verify` gives each of the runs that it compares: inputs of its own, which share memory as the user's do."""

import pytest
import torch
from torch import nn

import zgraph


class WritesToItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x, k):
        h = x * 1.0
        x.mul_(0.5)
        return self.head((h + k) * x)


@pytest.mark.parametrize("world", [1, 2])
def test_a_written_input_is_that_of_one_run_for_each_that_is_compared(world):
    """(The plain model, its flat graph, and double precision each run on it.)"""
    x, k = torch.randn(8, 4), torch.randn(8, 4)
    before = x.clone()
    plan = zgraph.Plan(backend="eager", mesh={"replicate": world}, zero=0)
    found = zgraph.verify(WritesToItsInput(), plan, world, (x, k), lambda out: out.square().mean())
    assert found.ok and any(d.what == "changed input" for d in found.worst(100))
    assert torch.equal(x, before)


@pytest.mark.parametrize("world", [1, 2])
def test_inputs_share_memory_as_the_users_do(world):
    x = torch.randn(8, 4)
    plan = zgraph.Plan(backend="eager", mesh={"replicate": world}, zero=0)
    with pytest.raises(zgraph.errors.SignatureError, match="forward writes to x, which shares memory with k"):
        zgraph.verify(WritesToItsInput(), plan, world, (x, x[:]), lambda out: out.square().mean())
    c = torch.randn(8, 4)
    assert zgraph.verify(WritesToItsInput(), plan, world, (c, c), lambda out: out.square().mean()).ok


class ReadsValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x, sizes):
        return torch.cat([part.mean(0, keepdim=True) for part in self.head(x).split(sizes.tolist())])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.gloo)])
def test_values_of_rows_that_are_split_are_given_for_each_rank(compiled, request):
    found = request.getfixturevalue("two").run(each_rank, True) if compiled else [each_rank(False)]
    for refused, of_lists, right in found:
        assert "the model takes the batch whole, and not the part of it that rank 0 of 2 would compute" in refused
        assert "split_sizes to sum exactly to 4" in refused
        assert "1 batches are given for 2 ranks" in of_lists[0]
        assert "inputs[0][0] is [8, 4], inputs[1][0] [7, 4]" in of_lists[1]
        assert right


def each_rank(compiled):
    torch.manual_seed(0)
    plan, model = zgraph.Plan(backend="eager", zero=3, dynamic={"sizes": "value"}), ReadsValues()
    x, sizes = torch.randn(8, 4), torch.tensor([3, 5])

    def verify(inputs):
        return zgraph.verify(model, plan, 2, inputs, lambda out: out.square().mean(), compiled=compiled)

    with pytest.raises(zgraph.errors.SignatureError) as refused:
        verify((x, sizes))
    others = []
    for wrong in ([(x, sizes)], [(x, sizes), (x[1:], sizes)]):
        with pytest.raises(zgraph.errors.SignatureError) as caught:
            verify(wrong)
        others.append(str(caught.value))
    return str(refused.value), others, verify([(x, sizes), (torch.randn(8, 4), sizes)]).ok


def test_values_that_decide_are_declared_and_alike_on_all_ranks():
    plan = zgraph.Plan(backend="eager", zero=3, dynamic={"sizes": "value"})
    x = torch.randn(8, 4)
    assert zgraph.verify(ReadsValues(), plan, 2, (x, torch.tensor([1, 3])), lambda out: out.square().mean()).ok
    eight = torch.tensor([1, 0, 0, 3, 1, 0, 3, 0])
    with pytest.raises(zgraph.errors.SignatureError, match="other values of an input that is a constant"):
        zgraph.verify(ReadsValues(), plan, 2, (x, eight), lambda out: out.square().mean())
