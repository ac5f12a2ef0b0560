"""Checkpoints of several ranks: any number of them, any stage, and what happens when one rank can't."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from sweeps import sweep
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import zgraph
from zgraph.checkpoint import folder
from zgraph.checkpoint.read_native import Checkpoint
from zgraph.checkpoint.user_values import PerRank
from zgraph.checkpoint.write_native import Writer
from zgraph.errors import CheckpointError
from zgraph.update.resume import Known

pytestmark = pytest.mark.gloo
WORLDS, STAGES = (1, 2, 3, 5, 8), range(4)


class Uneven(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a scalar, no elements, three dimensions."""

    SHAPES = ((13, 3), (3,), (1, 5), (), (0, 4), (7, 2, 3), (9, 1))

    def __init__(self, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> None:
        super().__init__()
        self.them = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        return sum(p.sum() for p in self.them) * x.sum()


def part_of(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """This rank's part of the tensor that has this name in every world."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    whole = torch.rand(tensor.shape, generator=generator)
    if not isinstance(tensor, DTensor):
        return whole
    shape, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return whole[tuple(slice(o, o + n) for o, n in zip(first, shape, strict=True))]


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    model.zgraph.runtime.updater.make_states()
    for name, param in model.named_parameters():
        states = model.zgraph.optimizer.state[param]
        found |= {f"{name}.{key}": value for key, value in states.items() if key != "step"}
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def model_of(zero: int, shapes=Uneven.SHAPES, **fields) -> Uneven:
    plan = zgraph.Plan(backend="eager", zero=zero, optimizer=zgraph.AdamW(lr=1e-3), **fields)
    return zgraph.compile(Uneven(shapes), plan)


def save_all(where: str) -> list[str]:
    made = []
    for zero in STAGES:
        model = model_of(zero)
        for name, tensor in tensors(model).items():
            local(tensor).copy_(part_of(tensor, name))
        made.append(model.save_checkpoint(where, f"world{dist.get_world_size()}-zero{zero}"))
    return made


def load_all(where: str, tags: list[str]) -> list[str]:
    """What differs from what was saved, in any bit, of every pair of this world's stages and the checkpoints."""
    wrong = []
    for zero in STAGES:
        model = model_of(zero)
        for tag in tags:
            held = tensors(model)
            for tensor in held.values():
                local(tensor).fill_(-1.0)
            model.load_checkpoint(where, tag)
            wrong += [
                f"{tag} in stage {zero}: {name}"
                for name, tensor in held.items()
                if not torch.equal(local(tensor), part_of(tensor, name))
            ]
    return wrong


@pytest.mark.slow
def test_every_world_and_stage_loads_every_other_bit_for_bit(tmp_path):
    """400 pairs: worlds of 1 to 8 ranks at stages 0 to 3, saved by one and loaded by the other."""
    tags: list[str] = []
    for world in WORLDS:
        with Ranks(world) as ranks:
            tags += ranks.run(save_all, str(tmp_path))[0]
    assert len(tags) == len(WORLDS) * len(STAGES)
    for world in WORLDS:
        with Ranks(world) as ranks:
            assert ranks.run(load_all, str(tmp_path), tags, limit=900) == [[]] * world


def random_cases(seed: int, count: int) -> list[tuple[tuple[int, ...], ...]]:
    source = random.Random(seed)
    return [
        tuple(
            tuple(source.choice((0, 1, 2, 3, 5, 8, 13)) for _ in range(source.randrange(4)))
            for _ in range(source.randrange(1, 6))
        )
        for _ in range(count)
    ]


def save_random(where: str, seed: int, count: int) -> None:
    for number, shapes in enumerate(random_cases(seed, count)):
        model = model_of(number % 4, shapes)
        for name, tensor in tensors(model).items():
            local(tensor).copy_(part_of(tensor, name))
        model.save_checkpoint(where, f"case{number}")


def load_random(where: str, seed: int, count: int) -> list[str]:
    wrong = []
    for number, shapes in enumerate(random_cases(seed, count)):
        model = model_of((number // 4) % 4, shapes)
        model.load_checkpoint(where, f"case{number}")
        wrong += [f"{shapes}: {n}" for n, t in tensors(model).items() if not torch.equal(local(t), part_of(t, n))]
    return wrong


@pytest.mark.slow
def test_random_shapes_are_resharded_bit_for_bit(two, four, tmp_path):
    two.run(save_random, str(tmp_path), 2, 16)
    assert four.run(load_random, str(tmp_path), 2, 16) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("of, to", [(3, 2), (2, 5), (4, 1)])
def test_random_shapes_are_resharded_from_and_to_any_number_of_ranks(of, to, tmp_path):
    with Ranks(of) as ranks:
        ranks.run(save_random, str(tmp_path), of, 16)
    with Ranks(to) as ranks:
        assert ranks.run(load_random, str(tmp_path), of, 16) == [[]] * to


# -- other meshes than compiled models have: tensor, pipeline and context parallel layouts of the same tensors

MESHES = {
    "one rank": (1, (), None),
    "dp": (4, (4,), [Shard(0)]),
    "tp by columns": (4, (4,), [Shard(1)]),
    "dp x tp": (4, (2, 2), [Shard(0), Shard(1)]),
    "tp x dp": (4, (2, 2), [Shard(1), Shard(0)]),
    "dp beside tp on rows": (6, (3, 2), [Replicate(), Shard(0)]),
    "replicated x dp": (4, (2, 2), [Replicate(), Shard(0)]),
    "cp: whole on each": (3, (3,), [Replicate()]),
    "pp x dp": (4, (2, 2), "pp"),
}
SHAPES = {"model.a": (13, 7), "model.b": (4, 9, 2), "model.c": (2, 3), "optimizer.state.a.exp_avg": (13, 7)}


def laid_out(kind: str) -> dict[str, torch.Tensor]:
    """This rank's tensors on such a mesh; a stage has those of its own alone."""
    _, sizes, placements = MESHES[kind]
    wholes = {n: torch.rand(s, generator=torch.Generator().manual_seed(len(n))) for n, s in SHAPES.items()}
    if placements is None:
        return wholes
    names = ("pp", "dp") if placements == "pp" else ("one", "two")[: len(sizes)]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if placements != "pp":
        return {n: distribute_tensor(t, mesh, placements) for n, t in wholes.items()}
    stage, mine = mesh.get_local_rank("pp"), mesh["dp"]
    return {n: distribute_tensor(t, mine, [Shard(0)]) for i, (n, t) in enumerate(wholes.items()) if i % 2 == stage}


def save_mesh(where: str, kind: str) -> None:
    place = Path(where) / kind.replace(" ", "-").replace(":", "")
    if dist.get_rank() == 0:
        place.mkdir()
    dist.barrier()
    alone = dist.get_world_size() == 1
    dcp.save(laid_out(kind), storage_writer=Writer(place, Known(), {}, b"{}"), no_dist=alone)


def load_mesh(where: str, kind: str) -> list[str]:
    wrong = []
    for place in sorted(Path(where).iterdir()):
        source = Checkpoint(place)
        source.verify()
        wanted = laid_out(kind)
        held = {n: torch.zeros_like(t) for n, t in wanted.items()}
        dcp.load(held, storage_reader=source.reader(), no_dist=True)
        wrong += [f"{place.name} as {kind}: {n}" for n in wanted if not torch.equal(local(held[n]), local(wanted[n]))]
    return wrong


@pytest.mark.slow
def test_meshes_of_every_kind_load_each_others(four, tmp_path):
    worlds = {world: [k for k, m in MESHES.items() if m[0] == world] for world in {m[0] for m in MESHES.values()}}
    with contextlib.ExitStack() as stack:
        ranks = {world: four if world == 4 else stack.enter_context(Ranks(world)) for world in worlds}
        for step, (world, kinds) in itertools.product((save_mesh, load_mesh), worlds.items()):
            for kind in kinds:
                assert not any(found for found in ranks[world].run(step, str(tmp_path), kind))
    assert len(list(tmp_path.iterdir())) == len(MESHES)


# -- runs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(10, 13), nn.BatchNorm1d(13), nn.Dropout(0.2)
        self.last = nn.Linear(13, 7)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)))).square().mean()


def compiled(seed: int = 0, **fields) -> Net:
    torch.manual_seed(seed)
    return zgraph.compile(Net(), zgraph.Plan(**{"backend": "eager", "optimizer": zgraph.AdamW(lr=1e-2)} | fields))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: local(t).clone() for n, t in model.state_dict().items()}
    for name, param in model.named_parameters():
        states = model.zgraph.optimizer.state[param]
        found |= {f"{name}.{k}": local(v).clone() for k, v in states.items()}
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def resumed(where: str, fields: dict, async_: bool) -> tuple[list[float], list[float], list[str]]:
    """The losses of a run that goes straight on, those of one that goes on from its checkpoint, and what differs at their ends."""
    torch.manual_seed(dist.get_rank())
    model = compiled(**fields)
    torch.manual_seed(dist.get_rank() + 10)  # (each rank drops out by itself)
    for step in range(3):
        model.train_step(batch(step))
    model.save_checkpoint(where, async_=async_)
    straight = [float(model.train_step(batch(step))) for step in range(3, 6)]
    model.zgraph.finish()
    other = compiled(seed=1, **fields)
    other.load_checkpoint(where)
    again = [float(other.train_step(batch(step))) for step in range(3, 6)]
    other.zgraph.finish()
    buffers = {n for n, _ in model.named_buffers()}
    one, two = ({n: t for n, t in everything(m).items() if n not in buffers} for m in (model, other))
    return straight, again, sorted(n for n in one.keys() | two.keys() if not same({n: one.get(n)}, {n: two.get(n)}))


@sweep(
    "fields, async_",
    [
        ({"zero": 0}, False),
        ({"zero": 1}, True),
        ({"zero": 2, "micro_batches": 3}, False),
        ({"zero": 3, "ema": 0.9}, False),
        ({"zero": 3, "precision": "fp16"}, True),
    ],
    quick=(0,),
)
def test_a_resumed_run_goes_on_bit_for_bit(two, fields, async_, tmp_path):
    for straight, again, differing in two.run(resumed, str(tmp_path), fields, async_):
        assert straight == again and not differing


@pytest.mark.slow
def test_replicas_of_shards_write_each_a_part(four, tmp_path):
    fields = {"mesh": {"replicate": 2, "dp": 2}, "zero": 3}
    for straight, again, differing in four.run(resumed, str(tmp_path), fields, False):
        assert straight == again and not differing
    found = Checkpoint(tmp_path / "step3")
    written = [sum(p.nbytes for p in e.pieces) for e in found.manifest.files.values() if e.pieces]
    assert len(written) == 4 and max(written) < 0.5 * sum(written)
    assert sum(written) == sum(info.nbytes for info in found.tensors.values())


def buffers_of(where: str) -> tuple[list[float], list[float]]:
    model = compiled()
    model.norm.running_mean.fill_(float(dist.get_rank() + 1))
    model.save_checkpoint(where)
    before = model.norm.running_mean.tolist()
    model.load_checkpoint(where)
    return before, model.norm.running_mean.tolist()


def test_buffers_are_those_of_rank_0(two, tmp_path):
    for rank, (before, after) in enumerate(two.run(buffers_of, str(tmp_path))):
        assert set(before) == {rank + 1.0} and set(after) == {1.0}


def save_own(where: str) -> None:
    rank = dist.get_rank()
    state = {"alike": {"t": torch.arange(3)}, "own": {"rank": rank, "t": torch.full((2,), rank)}}
    compiled().save_checkpoint(where, client_state=state | ({"only": 1} if rank == 1 else {}))


def load_own(where: str) -> dict:
    return compiled(seed=1).load_checkpoint(where)


def test_client_state_is_each_ranks_own(two, tmp_path):
    two.run(save_own, str(tmp_path))
    for rank, found in enumerate(two.run(load_own, str(tmp_path))):
        assert found["alike"]["t"].tolist() == [0, 1, 2] and found["own"]["rank"] == rank
        assert found["own"]["t"].tolist() == [rank] * 2 and ("only" in found) == (rank == 1)
    assert len([n for n in Checkpoint(tmp_path / "step0").tensors if n.startswith("client.")]) == 3
    with Ranks(1) as one:
        found = one.run(load_own, str(tmp_path))[0]
    assert isinstance(found["own"], PerRank) and [v["rank"] for v in found["own"]] == [0, 1]
    assert found["alike"]["t"].tolist() == [0, 1, 2] and found["only"] == [None, 1]


def one_rank_fails(where: str, async_: bool) -> tuple[str, bool]:
    model = compiled()
    for step in range(2):
        model.train_step(batch(step))
    model.save_checkpoint(where, "good")
    import zgraph.checkpoint.write_native as storage

    original = storage.write

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    storage.write = full if dist.get_rank() == 1 else original
    try:
        model.save_checkpoint(where, "bad", async_=async_)
        model.zgraph.finish()
        said = "nothing"
    except CheckpointError as error:
        said = str(error)
    finally:
        storage.write = original
    before = everything(model)
    model.train_step(batch(3))  # (the run goes on)
    model.load_checkpoint(where)
    return said, same({n: t for n, t in before.items() if "running" not in n}, {
        n: t for n, t in everything(model).items() if "running" not in n
    })  # fmt: skip


@pytest.mark.parametrize("async_", [False, True])
def test_a_disk_full_on_one_rank_is_an_error_on_all(two, async_, tmp_path):
    for said, whole in two.run(one_rank_fails, str(tmp_path), async_):
        assert "on rank 1" in said and "No space left" in said and whole
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "latest"]


def damaged_for_one(where: str) -> str:
    model = compiled()
    if not (Path(where) / "latest").exists():
        model.save_checkpoint(where)
        dist.barrier()
        if dist.get_rank() == 0:
            path = sorted(Path(where).glob("*/*.safetensors"))[1]
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
    dist.barrier()
    before = everything(model)
    try:
        model.load_checkpoint(where)
    except CheckpointError as error:
        return str(error) if same(before, everything(model)) else "changed"
    return "nothing"


def test_damage_in_one_ranks_file_is_refused_by_all(two, tmp_path):
    for said in two.run(damaged_for_one, str(tmp_path)):
        assert "shard-00002-model-00001-of-00001.safetensors is damaged" in said


def disagree(where: str) -> str:
    model = compiled()
    try:
        model.save_checkpoint(where, f"tag{dist.get_rank()}")
    except zgraph.errors.RankMismatchError as error:
        return str(error)
    return "nothing"


def test_ranks_that_want_different_tags_are_told(two, tmp_path):
    assert all("disagree about a checkpoint" in said for said in two.run(disagree, str(tmp_path)))
    assert not list(tmp_path.iterdir())


class Raises:
    def state_dict(self):
        if dist.get_rank() == 1:
            raise ValueError("not mine")
        return {}

    def load_state_dict(self, state):
        self.state_dict()


def users_fault(where: str) -> list[str]:
    model, said = compiled(), []
    model.save_checkpoint(where, client_state={"it": 1})
    for call in (
        lambda: model.save_checkpoint(where, "bad", client_state={"it": Raises()}),
        lambda: model.load_checkpoint(where, client_state={"it": Raises()}),
    ):
        try:
            call()
            said.append("nothing")
        except (ValueError, CheckpointError) as error:
            said.append(f"{type(error).__name__}: {error}")
    model.train_step(batch(0))
    return said


def test_a_fault_of_one_ranks_own_objects_is_told_to_all(two, tmp_path):
    first, second = two.run(users_fault, str(tmp_path), limit=60)
    assert all("CheckpointError" in said and "ValueError: not mine" in said for said in first)
    assert second == ["ValueError: not mine"] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step0"]


def on_a_half(where: str) -> bool:
    """Two meshes of two ranks each train, save and load beside each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "dp"))["dp"]
    half = dist.get_rank() // 2
    torch.manual_seed(half)
    plan = zgraph.Plan(backend="eager", mesh={"dp": 2}, optimizer=zgraph.AdamW(lr=1e-2))
    model = zgraph.compile(Net(), plan, mesh=mesh)
    for step in range(2 + half):  # (not the same work)
        model.train_step(batch(step))
    model.save_checkpoint(f"{where}/{half}", async_=True)
    saved = everything(model)
    model.train_step(batch(9))
    model.load_checkpoint(f"{where}/{half}")
    buffers = {n for n, _ in model.named_buffers()}
    return same({n: t for n, t in saved.items() if n not in buffers}, {
        n: t for n, t in everything(model).items() if n not in buffers
    })  # fmt: skip


@pytest.mark.slow
def test_meshes_beside_each_other_save_and_load(four, tmp_path):
    assert four.run(on_a_half, str(tmp_path), limit=120) == [True] * 4


def not_shared(where: str) -> str:
    model = compiled()
    original = Path.is_dir
    if dist.get_rank() == 1:
        Path.is_dir = lambda self: not self.name.endswith(folder.PARTIAL) and original(self)
    try:
        model.save_checkpoint(where)
    except CheckpointError as error:
        return str(error)
    finally:
        Path.is_dir = original
    return "nothing"


def test_a_folder_that_ranks_do_not_share_is_refused(two, tmp_path):
    assert all("does not share" in said for said in two.run(not_shared, str(tmp_path)))


# -- a disk that is really full


def fill(where: str) -> tuple[list[str], bool]:
    """Save until the disk is full; then go on training, and load what was saved last."""
    torch.manual_seed(0)
    model = zgraph.compile(
        nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1)),
        zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(lr=1e-3)),
        loss_fn=lambda y: y.mean(),
    )
    said, kept = [], {}
    for step in range(12):
        model.train_step(torch.ones(2, 300) * (dist.get_rank() + 1))
        try:
            tag = model.save_checkpoint(where, async_=bool(step % 2))
            model.zgraph.finish()
            kept[tag] = everything(model)
        except CheckpointError as error:
            said.append(str(error))
    fresh = zgraph.compile(
        nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1)),
        zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(lr=1e-3)),
    )
    fresh.load_checkpoint(where)
    return said, same(kept[folder.latest(Path(where))], everything(fresh))


def test_a_small_disk_that_fills_up_keeps_its_last_good_checkpoint(two, tmp_path):
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(tmp_path)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        for said, whole in two.run(fill, str(tmp_path)):
            assert whole and len(said) > 5 and all("No space left" in s for s in said)
        assert not list(tmp_path.glob(".*partial"))
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
    assert os.access(tmp_path, os.R_OK) and shutil.disk_usage(tmp_path).total > 5 << 20 and sys.platform == "linux"
