"""Whole tensors of DTensors are those that were cut, however they were cut, stored and sent."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from zgraph.parameters import whole_tensors
from zgraph.parameters.reused_memory import LEAST, RestingMemory, ReusedMemory
from zgraph.parameters.whole_tensors import Wanted, gathered
from zgraph.program.tolerance import equal_bits
from zgraph.torch_compat import process_groups

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
# sizes with rows for all ranks, uneven ones, fewer rows than ranks, a single one, none, and more dimensions
SHAPES = ((8, 6), (5, 3), (3, 4), (1, 7), (0, 4), (9,), (6, 4, 2, 2), (2, 5, 1))


def whole(shape: tuple[int, ...], dtype: torch.dtype, turned: bool) -> torch.Tensor:
    """A tensor whose memory order is another if it is `turned`."""
    torch.manual_seed(sum(shape))
    made = torch.randn(shape) * 3
    made = (made > 0) if dtype is torch.bool else made.to(dtype)
    return made.transpose(0, -1).contiguous().transpose(0, -1) if turned else made


def cut_in_all_ways(
    sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], some: tuple[tuple[int, ...] | None, ...] = (None,)
) -> bool:
    """Compare whole tensors with those that were cut, in buckets of all sizes, sent in both ways, to all ranks or to some."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("tp", "dp")[-len(sizes) :])
    tensors, given = [], []
    for at, (shape, dtype) in enumerate(itertools.product(SHAPES, dtypes)):
        for placements in itertools.product((Shard(0), Shard(len(shape) - 1), Replicate()), repeat=len(sizes)):
            tensors.append(whole(shape, dtype, turned=at % 3 == 0))
            given.append(distribute_tensor(tensors[-1], mesh, placements, src_data_rank=None))
    known = process_groups.backend_of
    try:
        ways = itertools.product(("gloo", "other"), (1, 64, 2**20), (2**9, 2**28), some)
        for backend, packed, most, ranks in ways:
            process_groups.backend_of = lambda *_, name=backend: (name, 0)
            whole_tensors.UNPACKED = packed
            found = gathered([Wanted(t, t.dtype) for t in given], CPU, most, ranks=ranks)
            for made, tensor, cut in zip(found, tensors, given, strict=True):
                if ranks is not None and dist.get_rank() not in ranks:
                    assert made is None
                    continue
                assert type(made) is torch.Tensor and made.dtype is tensor.dtype, (tensor.shape, cut)
                assert equal_bits(made, tensor), (tensor.shape, tensor.dtype, cut.placements, backend, packed)
                divided = tensor.numel() and any(isinstance(p, Shard) for p in cut.placements)
                assert not divided or made.stride() == tensor.stride(), (tensor.stride(), cut.placements)
    finally:
        process_groups.backend_of, whole_tensors.UNPACKED = known, 256 << 10
    return True


@pytest.mark.gloo
def test_two_ranks_have_what_was_cut(two: Ranks):
    assert two.run(cut_in_all_ways, (2,), DTYPES[1::3]) == [True] * 2


@pytest.mark.gloo
def test_four_ranks_have_what_was_cut_twice(four: Ranks):
    assert four.run(cut_in_all_ways, (2, 2), DTYPES[:1]) == [True] * 4


@pytest.mark.gloo
def test_four_ranks_of_one_dimension_have_what_was_cut(four: Ranks):
    assert four.run(cut_in_all_ways, (4,), DTYPES[:1]) == [True] * 4


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_that_need_whole_tensors_have_them_and_others_nothing(two: Ranks, four: Ranks):
    assert two.run(cut_in_all_ways, (2,), DTYPES[:1], ((0,), (1,))) == [True] * 2
    assert four.run(cut_in_all_ways, (2, 2), DTYPES[:1], ((0,), (1, 2), (0, 1), (3, 1, 2))) == [True] * 4
    assert four.run(cut_in_all_ways, (4,), DTYPES[:1], ((3,), (0, 2))) == [True] * 4


def others(_: None) -> list[bool]:
    """Tensors that are no shards, other dtypes than those held, and a sum of parts."""
    mesh, wide = init_device_mesh("cpu", (2,)), torch.randn(6, 4, generator=torch.manual_seed(0))
    shard = distribute_tensor(wide, mesh, [Shard(0)], src_data_rank=None)
    low = distribute_tensor(wide.bfloat16(), mesh, [Shard(1)], src_data_rank=None)
    parts = torch.distributed.tensor.DTensor.from_local(wide, mesh, [Partial()], run_check=False)
    wanted = [
        (wide, wide.dtype),
        (shard, torch.bfloat16),
        (low, torch.float32),
        (parts, wide.dtype),
        (shard, wide.dtype),
    ]
    found = list(gathered([Wanted(*one) for one in wanted], CPU))
    expected = [wide, wide.bfloat16(), wide.bfloat16().float(), 2 * wide, wide]
    return [found[0] is not shard, *(equal_bits(*pair) for pair in zip(found, expected, strict=True))]


@pytest.mark.gloo
def test_plain_tensors_casts_and_sums_among_shards(two: Ranks):
    assert two.run(others, None) == [[True] * 6] * 2


def transfers(_: None) -> list[int]:
    """The transfers for many small tensors of several dtypes among large ones, and those of a tensor with one row."""
    mesh, sent, broadcast = init_device_mesh("cpu", (2,)), [], dist.broadcast
    small = [distribute_tensor(torch.ones(3, 2, dtype=d), mesh, [Shard(0)], src_data_rank=None) for d in DTYPES * 3]
    large = distribute_tensor(torch.ones(512, 512), mesh, [Shard(0)], src_data_rank=None)
    row = distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)], src_data_rank=None)

    def noted(tensor, *args, **options):
        sent.append(tensor.nbytes)
        return broadcast(tensor, *args, **options)

    dist.broadcast, found = noted, []
    try:
        for group in ([*small[:9], large, *small[9:]], [row]):
            for made in gathered([Wanted(t, t.dtype) for t in group], CPU):
                assert equal_bits(made, torch.ones_like(made))
            found.append(len(sent))
    finally:
        dist.broadcast = broadcast
    return found


def received(ranks: tuple[int, ...] | None) -> int:
    """The bytes that this rank receives of a matrix of 64 KB on two ranks."""
    mesh, came = init_device_mesh("cpu", (2,)), []
    cut = distribute_tensor(torch.arange(2.0**14).reshape(128, 128), mesh, [Shard(0)], src_data_rank=None)
    broadcast, exchange = dist.broadcast, dist.batch_isend_irecv

    def noted(tensor, *args, **options):
        came.extend([tensor.nbytes] * (options["group_src"] != dist.get_rank()))
        return broadcast(tensor, *args, **options)

    def exchanged(messages):
        came.extend(m.tensor.nbytes for m in messages if m.op is dist.irecv)
        return exchange(messages)

    dist.broadcast, dist.batch_isend_irecv = noted, exchanged
    try:
        assert len(list(gathered([Wanted(cut, cut.dtype)], CPU, ranks=ranks))) == 1
    finally:
        dist.broadcast, dist.batch_isend_irecv = broadcast, exchange
    return sum(came)


@pytest.mark.gloo
def test_parts_are_sent_only_to_ranks_that_need_them(two: Ranks):
    assert two.run(received, None) == [2**15, 2**15]
    assert two.run(received, (1,)) == [0, 2**15]


@pytest.mark.gloo
def test_small_tensors_of_all_dtypes_are_sent_at_once_and_empty_parts_are_not(two: Ranks):
    assert two.run(transfers, None) == [[4, 5]] * 2


def streamed(keep: bool) -> tuple[int, bool]:
    """(How many pieces of memory eight large tensors had, whether all have the right numbers in the end)."""
    mesh = init_device_mesh("cpu", (2,))
    given = [
        distribute_tensor(torch.full((1024, 512 + at % 2), float(at)), mesh, [Shard(at % 3 // 2)], src_data_rank=None)
        for at in range(8)
    ]
    kept, places, right = [], set(), True
    for at, made in enumerate(gathered([Wanted(t, t.dtype) for t in given], CPU, 2**24)):
        places.add(made.data_ptr())
        right &= bool((made == at).all())
        if keep:
            kept.append(made[1:])
        del made
    right &= all(
        bool((t == at).all()) and t.untyped_storage().nbytes() == 2**12 * (512 + at % 2) for at, t in enumerate(kept)
    )
    return len(places), right


@pytest.mark.gloo
def test_memory_that_nobody_holds_is_used_again_and_what_is_kept_stays(two: Ranks):
    for pieces, right in two.run(streamed, False):
        assert right and pieces <= 5
    assert two.run(streamed, True) == [(8, True)] * 2


# -- memory -------------------------------------------------------------------------------------------------------------
def test_memory_is_used_again_when_neither_a_view_nor_an_array_holds_it():
    memory = ReusedMemory(CPU, 4 * LEAST)
    first = memory.take(2 * LEAST)
    place = first.data_ptr()
    assert memory.take(2 * LEAST).data_ptr() != place
    view = first.view(torch.float32)[5:]
    del first
    assert memory.take(2 * LEAST).data_ptr() != place
    array = view.numpy()
    del view
    assert memory.take(2 * LEAST).data_ptr() != place
    del array
    held = [memory.take(2 * LEAST) for _ in range(2)]
    assert place in [piece.data_ptr() for piece in held]


def test_memory_for_another_size_replaces_what_is_free_once_the_bound_is_reached():
    memory = ReusedMemory(CPU, 4 * LEAST)
    for size in (2, 1, 3, 1, 8):
        assert memory.take(size * LEAST).untyped_storage().nbytes() == size * LEAST
        assert sum(p.numel() for p in memory._pieces) <= max(size, 4) * LEAST
    assert [p.numel() for p in memory._pieces] == [8 * LEAST]
    assert memory.take(5).numel() == 5 and memory.take(0).numel() == 0 and len(memory._pieces) == 1


def test_memory_that_nobody_holds_rests_until_later_uses():
    resting = RestingMemory()
    memory = ReusedMemory(CPU, 8 * LEAST, resting)
    held, other = memory.take(2 * LEAST).fill_(7), memory.take(2 * LEAST)
    place = other.data_ptr()
    del other
    memory.rest()
    later = ReusedMemory(CPU, 8 * LEAST, resting)
    assert later.take(3 * LEAST).numel() == 3 * LEAST
    pieces = [later.take(2 * LEAST).fill_(1) for _ in range(2)]
    assert (place in [piece.data_ptr() for piece in pieces]) == (sys.platform == "linux")
    assert bool((held == 7).all())


# -- bits ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_equal_where_every_element_is_the_same(dtype, turned):
    one = whole((5, 7), dtype, turned)
    assert equal_bits(one, one.clone()) and equal_bits(one, one.contiguous()) and equal_bits(one[:0], one[:0].clone())
    assert equal_bits(one[1:, 2:], one.clone()[1:, 2:])
    other = one.clone()
    other[4, 6] = ~other[4, 6] if dtype is torch.bool else 100
    assert not equal_bits(one, other) and not equal_bits(one[:, 3:], other[:, 3:])
    assert equal_bits(one[:4], other[:4]) and equal_bits(one[:, :3], other[:, :3])


def test_bits_of_nan_are_equal_and_those_of_zeros_with_a_sign_are_not():
    nan = torch.tensor([float("nan"), 1.0])
    assert equal_bits(nan, nan.clone()) and not equal_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
