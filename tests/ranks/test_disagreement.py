"""Ranks that disagree, and ranks that die, are found: nobody waits for ever for anybody."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, Ranks, die
from sweeps import sweep
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from zgraph.errors import CollectiveError, RankMismatchError
from zgraph.passes import graph_pass
from zgraph.ranks.agreement import Agreement

pytestmark = pytest.mark.gloo
SECONDS = 10.0


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.second = nn.Linear(width, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).square().mean()


@graph_pass("rename_a_relu", "makes one rank's program another", requires=("clean",))
def one_rank_differs(program):
    """Another activation on rank 1."""
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        if dist.get_rank() == 1:
            node.target = torch.ops.aten.sigmoid.default
            node.meta["val"] = node.meta["val"]
    return {}


def rank() -> int:
    return dist.get_rank()


def compiled(zero: int = 3, backend: str = "eager", **plan) -> nn.Module:
    torch.manual_seed(0)
    return zgraph.compile(Net(), zgraph.Plan(zero=zero, backend=backend, **plan))


def other_plan() -> None:
    compiled(zero=2 + rank())


def other_backend() -> None:
    compiled(backend=["eager", "inductor"][rank()])


def other_shape() -> None:
    zgraph.compile(Net(8 + rank()), zgraph.Plan(backend="eager"))


def other_names() -> None:
    model = Net()
    if rank() == 1:
        model.third = model.second
        del model.second
    zgraph.compile(model, zgraph.Plan(backend="eager"))


def other_frozen() -> None:
    model = Net()
    model.second.requires_grad_(rank() == 0)
    zgraph.compile(model, zgraph.Plan(backend="eager"))


def first_batches_differ() -> None:
    compiled(shapes="static")(torch.ones(4 + rank(), 6))


def new_signature_on_one_rank() -> None:
    model = compiled(shapes="static")
    for step in range(4):
        model(torch.ones(5 if step == 3 and rank() == 1 else 4, 6)).backward()


def known_signatures_differ() -> None:
    model = compiled(shapes="static")
    model(torch.ones(4, 6)).backward()
    model(torch.ones(5, 6)).backward()
    model(torch.ones(4 + rank(), 6)).backward()


def one_rank_evaluates() -> None:
    model = compiled()
    model(torch.ones(4, 6)).backward()
    model.train(rank() == 0)
    model(torch.ones(4, 6))


def one_rank_only_accumulates(zero: int) -> None:
    model = compiled(zero)
    model(torch.ones(4, 6)).backward()
    if rank() == 1:
        with model.no_sync():
            model(torch.ones(4, 6)).backward()
    else:
        model(torch.ones(4, 6)).backward()


def one_rank_runs_backward_while_the_other_goes_on() -> None:
    model = compiled()
    loss = model(torch.ones(4, 6))
    if rank() == 1:
        loss.backward()
    else:
        model(torch.ones(4, 6))


def other_recompiled_plan() -> None:
    model = compiled(3)
    model(torch.ones(4, 6)).backward()
    model.zgraph.recompile(zgraph.Plan(zero=1 + rank(), backend="eager"))


def one_rank_flips_a_flag() -> None:
    model = compiled()
    model(torch.ones(4, 6)).backward()
    model.first.extra = rank()
    if rank() == 1:
        model.first.register_forward_hook(lambda module, args, output: output * 2)
    model(torch.ones(4, 6))


def programs_differ() -> None:
    compiled(passes=("test_disagreement:one_rank_differs",))(torch.ones(4, 6))


def votes_on_other_things(ballots: tuple[str, str], teams: tuple[int, int]) -> None:
    """Each rank votes on a thing of its own, in teams of its own number."""
    agreement = Agreement(init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)))
    agreement.vote(
        f"thing {rank()}", ballots[rank()], team=rank() if teams[rank()] > 1 else 0, teams=teams[rank()], hint="agree"
    )


CASES = [
    (other_plan, (), ["the plan"]),
    (other_backend, (), ["the plan"]),
    (other_shape, (), ["the model", "first.weight", "[8, 6]", "[9, 6]"]),
    (other_names, (), ["the model", "third.weight"]),
    (other_frozen, (), ["the model", "second.weight", "frozen"]),
    (first_batches_differ, (), ["the inputs of a call", "[4, 6]", "[5, 6]"]),
    (new_signature_on_one_rank, (), ["the inputs of a call", "[4, 6]", "[5, 6]", "new", "known"]),
    (known_signatures_differ, (), ["the inputs of a call", "[4, 6]", "[5, 6]"]),
    (one_rank_evaluates, (), ["the inputs of a call"]),
    (one_rank_only_accumulates, (0,), ["a backward pass", "only accumulating", "reducing"]),
    (one_rank_only_accumulates, (3,), ["a backward pass", "only accumulating", "reducing"]),
    (one_rank_runs_backward_while_the_other_goes_on, (), ["a backward pass", "the inputs of a call"]),
    (other_recompiled_plan, (), ["the plan of recompile"]),
    (one_rank_flips_a_flag, (), ["the inputs of a call", "new"]),
    (votes_on_other_things, (("same", "same"), (1, 1)), ["thing 0: same", "thing 1: same"]),
    (votes_on_other_things, (("", "x"), (1, 2)), ["thing 0", "thing 1: x"]),
    (programs_differ, (), ["program", "first node that differs", "relu"]),
]


@sweep("function, args, named", CASES, ids=["-".join([f.__name__, *map(str, args)]) for f, args, _ in CASES], quick=8)
def test_a_difference_raises_on_every_rank(two, function, args, named):
    outcomes = two.attempt(function, *args, limit=60, keep=True)
    everything = "\n".join(str(o.error) for o in outcomes)
    for outcome in outcomes:
        assert isinstance(outcome.error, RankMismatchError), outcome.traceback
        assert "to do:" in str(outcome.error)
    assert max(o.seconds for o in outcomes) - min(o.seconds for o in outcomes) < SECONDS
    for text in named:
        assert text in everything
    assert re.search(r"rank(\(s\))? \[?1", everything)


# Ranks that die.


def train_until_one_dies(zero: int, backend: str, how: str, when: str) -> None:
    model = compiled(zero, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        dying = step == 3 and rank() == 1
        if dying and when == "forward":
            _end(how)
        loss = model(torch.ones(4, 6))
        if dying and when == "backward":
            _end(how)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def die_inside_the_program(backend: str) -> None:
    """One rank takes part in the vote, and is gone before the first collective of its program."""
    model = compiled(3, backend)
    for step in range(4):
        if step == 3 and rank() == 1:
            entry = next(iter(model.zgraph.runtime.entries.values()))
            entry.program().forward().function = lambda values: die()
        model(torch.ones(4, 6)).backward()


def hang_inside_the_program() -> None:
    model = compiled(3)
    for step in range(4):
        if step == 3 and rank() == 1:
            time.sleep(8)
        model(torch.ones(4, 6)).backward()


def _end(how: str) -> None:
    if how == "kill":
        die()
    os._exit(3)


@sweep(
    "zero, backend, how, when",
    [
        (3, "eager", "kill", "forward"),
        (3, "eager", "exit", "backward"),
        (0, "eager", "kill", "backward"),
        (1, "eager", "kill", "forward"),
        pytest.param(3, "inductor", "kill", "backward", marks=pytest.mark.inductor),
    ],
    quick=(1,),
)
def test_a_rank_that_dies_ends_the_others(zero, backend, how, when):
    with Ranks(3, timeout=20) as three:
        outcomes = three.attempt(train_until_one_dies, zero, backend, how, when, limit=100)
    assert outcomes[1].died
    for other in (outcomes[0], outcomes[2]):
        assert isinstance(other.error, CollectiveError), other.traceback
        assert other.seconds - outcomes[1].seconds < 25
        said = str(other.error)
        assert "a rank has died or stopped" in said
        assert "module" in said and ("vote" in said or "collective" in said)


@sweep("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)], quick=(0,))
def test_a_collective_that_fails_is_named_with_its_module(backend):
    with Ranks(2, timeout=20) as ranks:
        outcomes = ranks.attempt(die_inside_the_program, backend, limit=100)
    _says_which(outcomes[0])
    assert outcomes[0].seconds - outcomes[1].seconds < 25


def test_a_rank_that_stops_without_dying_ends_the_others_after_the_timeout():
    with Ranks(2, timeout=3) as ranks:
        outcomes = ranks.attempt(hang_inside_the_program, limit=100)
        assert isinstance(outcomes[0].error, CollectiveError)
        assert outcomes[0].seconds < outcomes[1].seconds < 60


def _says_which(outcome: Outcome) -> None:
    assert isinstance(outcome.error, CollectiveError), outcome.traceback
    said = str(outcome.error)
    assert "gather_first_weight" in said or "gather_first_bias" in said
    assert "module first" in said and "parameter first." in said


# Ctrl-C.


def train_until_interrupted(folder: str) -> None:
    """Interrupt this rank in the midst of training, as a terminal does all at once. It ends then, as a script would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = compiled()
    try:
        for step in range(10**6):
            model(torch.ones(4, 6)).backward()
            model.zero_grad()
            if step == 20:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    except KeyboardInterrupt:
        open(os.path.join(folder, f"interrupted{rank()}"), "w").close()
        os._exit(130)


def test_ctrl_c_ends_every_rank(tmp_path):
    with Ranks(2) as ranks:
        outcomes = ranks.attempt(train_until_interrupted, str(tmp_path), limit=60)
    # A rank whose peer was interrupted first may see the broken connection before its own interrupt.
    assert list(tmp_path.iterdir())
    assert all(o.died or isinstance(o.error, CollectiveError) for o in outcomes), outcomes


SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, zgraph
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
zgraph.compile(model, zgraph.Plan(backend="eager"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(10**6):
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 20:
            file = os.path.join(sys.argv[1], f"pid{dist.get_rank()}")
            with open(file + ".part", "w") as part:
                part.write(str(os.getpid()))
            os.rename(file + ".part", file)
except KeyboardInterrupt:
    open(os.path.join(sys.argv[1], f"interrupted{dist.get_rank()}"), "w").close()
    sys.exit(130)
"""


@pytest.mark.slow
def test_ctrl_c_ends_every_process_of_a_launcher(tmp_path):
    """SIGINT to the whole group, as a terminal sends it: ranks get a KeyboardInterrupt, and nothing stays."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [*launch, str(script), str(tmp_path)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            _wait_for(lambda: all((tmp_path / f"pid{r}").exists() for r in range(2)), 90)
            pids = [int((tmp_path / f"pid{r}").read_text()) for r in range(2)]
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=30)
            _wait_for(lambda: not any(_alive(pid) for pid in pids), 10)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = (tmp_path / "log").read_text()
    # A rank whose peer was interrupted first may see the broken connection before its own interrupt.
    assert any((tmp_path / f"interrupted{r}").exists() for r in range(2)), said
    assert "Fatal Python error" not in said and "Segmentation" not in said


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_for(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
