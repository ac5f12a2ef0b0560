"""A rank that is stuck, stopped or gone is named by all the others, with where it was; heartbeats end with what they watch.

Functions at the top of this file run on the ranks.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, die
from sweeps import sweep
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zgraph
from zgraph.errors import CollectiveError, PlanError
from zgraph.ranks import heartbeat
from zgraph.ranks.thread_stacks import stack_of

STUCK = 1  # the rank
LOOP = next(
    f"{__file__}:{i}" for i, t in enumerate(Path(__file__).read_text().splitlines(), 1) if t.endswith("# the loop")
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).square().mean()


def rank() -> int:
    return dist.get_rank()


def compiled(
    backend: str = "eager", timeout: float | None = 3.0, interval: float = 0.4, mesh: DeviceMesh | None = None, **plan
) -> nn.Module:
    torch.manual_seed(0)
    watch = {"timeout": timeout, "interval": interval}
    optimizer = plan.pop("optimizer", zgraph.SGD(lr=0.1))
    return zgraph.compile(Net(), zgraph.Plan(backend=backend, watch=watch, optimizer=optimizer, **plan), mesh=mesh)


def _end(how: str) -> None:
    time.sleep(0.6)  # (what is known of a rank that is gone is as old as its last heartbeat)
    if how == "kill":
        die()
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while how == "loop":
        time.sleep(0.05)  # the loop


def train(backend: str, how: str, plan: dict) -> None:
    model = compiled(backend, **plan)
    for step in range(1, 6):
        if step == 4 and rank() == STUCK:
            _end(how)
        model.train_step(torch.ones(4, 6))


def train_in_a_loop_of_its_own(how: str) -> None:
    model = compiled(optimizer=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 6):
        for micro_batch in range(2):
            if (step, micro_batch) == (4, 1) and rank() == STUCK:
                _end(how)
            with model.no_sync() if micro_batch == 0 else contextlib.nullcontext():
                model(torch.ones(4, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()


def stuck_inside_a_program(backend: str) -> None:
    """One rank takes part in the vote, and never gets to the first collective of its program."""
    model = compiled(backend)
    for step in range(1, 5):
        if step == 4 and rank() == STUCK:
            entry = next(iter(model.zgraph.runtime.entries.values()))
            entry.program().backward().function = lambda values: _end("loop")
        model.train_step(torch.ones(4, 6))


def train_a_model_of_its_own_besides(who: int) -> None:
    """One rank has made more steps than the others when one is stuck, but in a model that is its own."""
    model = compiled()
    model.train_step(torch.ones(4, 6))
    if rank() == who:
        own = compiled(mesh=DeviceMesh("cpu", [rank()], mesh_dim_names=("dp",)))
        for _ in range(9):
            own.train_step(torch.ones(4, 6))
    model.train_step(torch.ones(4, 6))
    if rank() == STUCK:
        _end("loop")
    model.train_step(torch.ones(4, 6))


def train_in_two_groups() -> None:
    """All ranks have a model, ranks 0 and 1 another one besides, in which rank 1 is stuck. Rank 2 has nothing to do."""
    everybodys = compiled()
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    everybodys.train_step(torch.ones(4, 6))
    if rank() == 2:
        return
    model = compiled(mesh=mesh)
    for step in range(1, 6):
        if step == 4 and rank() == STUCK:
            _end("loop")
        model.train_step(torch.ones(4, 6))


def said_while_another_compiles() -> list[str]:
    """One rank compiles for longer than a collective may take."""
    lines = _logged()
    model = compiled(timeout=3.0)
    runtime = model.zgraph.runtime
    prepare = runtime.prepare

    def slow(step) -> None:
        if rank() == STUCK:
            time.sleep(4.5)
        prepare(step)

    runtime.prepare = slow
    model.train_step(torch.ones(4, 6))
    return lines


def _logged() -> list[str]:
    """What is logged about heartbeats from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zgraph.ranks.heartbeat").addHandler(handler)
    return lines


def said_while_waiting() -> list[str]:
    """What a rank logs before it fails."""
    lines = _logged()
    model = compiled(timeout=4.0)
    for _ in range(2):  # (the plan's time holds again from the first vote after what was compiled)
        model.train_step(torch.ones(4, 6))
    while rank() == STUCK:
        time.sleep(0.05)
    with pytest.raises(CollectiveError):
        model.train_step(torch.ones(4, 6))
    return lines


def several_models() -> tuple[int, int, int, int, bool]:
    """Threads with one model, with three (one a copy, one recompiled), with one of them left, and without heartbeats."""
    first = compiled()
    one = _threads()
    second = copy.deepcopy(first)
    third = compiled(interval=0.1)
    third.zgraph.recompile(third.zgraph.plan.model_copy(update={"zero": 2}))
    for model in (first, second, third):
        model.train_step(torch.ones(4, 6))
    three = _threads()
    same = first.zgraph.runtime.agreement.heart is third.zgraph.runtime.agreement.heart
    del first, second, model
    gc.collect()
    left = _threads()
    third.zgraph.recompile(third.zgraph.plan.model_copy(update={"watch": zgraph.Watch(interval=0)}))
    gc.collect()
    return one, three, left, _threads(), same


def watched_and_gone() -> bool:
    """A model that has been watched for several beats, some beats after its last name is gone: is it?"""
    model = compiled(interval=0.05)
    for _ in range(3):
        model.train_step(torch.ones(4, 6))
    held = weakref.ref(model.zgraph.runtime)
    time.sleep(0.3)
    del model
    gc.collect()
    time.sleep(0.3)
    gc.collect()
    return held() is None


def timeouts() -> list[float]:
    model = compiled(timeout=7.0)
    groups = [model.zgraph.runtime.agreement.group, model.zgraph.mesh.get_group("dp")]
    found = [_timeout(g) for g in groups]
    model.zgraph.recompile(model.zgraph.plan.model_copy(update={"watch": zgraph.Watch()}))
    return found + [_timeout(g) for g in groups]


def the_process_group_goes() -> tuple[int, str]:
    """The model outlives its process group, and the store."""
    model = compiled()
    model.train_step(torch.ones(4, 6))
    dist.destroy_process_group()
    gc.collect()
    time.sleep(1.0)
    alive = _threads()
    error = "none"
    try:
        model.zgraph.runtime.agreement.heart.pulse.report(None, [0, 1])
    except BaseException as other:
        error = repr(other)
    return alive, error


def the_store_goes(port: str) -> tuple[str, list[str]]:
    """What a rank's step raises, and what threads raise, when the rank is killed that holds the store."""
    complaints: list[str] = []
    threading.excepthook = lambda args: complaints.append(repr(args.exc_value))
    number = rank()
    dist.destroy_process_group()
    if number == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        Path(port + ".part").write_text(str(store.port))
        os.rename(port + ".part", port)
    else:
        while not os.path.exists(port):
            time.sleep(0.05)
        store = dist.TCPStore("127.0.0.1", int(Path(port).read_text()), 2, False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    model = compiled(interval=0.2)
    error = "none"
    try:
        for step in range(5):
            if step == 3 and number == 0:
                die()
            model.train_step(torch.ones(4, 6))
    except CollectiveError as found:
        error = str(found)
    time.sleep(0.6)  # (three beats)
    return error, complaints


def forked() -> tuple[bool, int]:
    model = compiled()
    model.train_step(torch.ones(4, 6))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        gc.collect()
        os.write(write, f"{heartbeat._heart is None}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(read, 100) == b"True"
    model.train_step(torch.ones(4, 6))
    return told, _threads()


def weights(interval: float) -> list[float]:
    model = compiled(interval=interval, timeout=None)
    for _ in range(3):
        model.train_step(torch.ones(4, 6) * (rank() + 1))
    return [p.full_tensor().sum().item() for p in model.parameters()]


def _timeout(group) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def _threads() -> int:
    return sum(t.name == "zgraph-heartbeat" for t in threading.enumerate())


# -- a rank that does not come ----------------------------------------------------------------------------------------
def check(outcomes, world: int, *texts: str) -> None:
    for number in range(world):
        if number == STUCK:
            continue
        error = outcomes[number].error
        assert isinstance(error, CollectiveError), outcomes[number].traceback
        said = str(error)
        assert error.absent == (STUCK,), said
        assert f"rank {STUCK} is" in said
        for text in texts:
            assert text in said, said


def run(world: int, function, *args):
    """Each rank's outcome, but the stuck one's, which is killed when the others are done."""
    with Ranks(world, timeout=60) as ranks:
        return ranks.attempt(function, *args, limit=100, lost=(STUCK,))


@pytest.mark.gloo
@sweep("world", [2, 4], quick=(0,))
@sweep(
    "how, text",
    [("kill", "is gone: no heartbeat"), ("stop", "is stopped, by SIGSTOP"), ("loop", "is alive, and has not arrived")],
    quick=1,
)
def test_the_others_name_the_rank_and_where_it_is(world, how, text):
    outcomes = run(world, train, "eager", how, {})
    check(
        outcomes,
        world,
        text,
        "at step 3" if how != "loop" else f"at step 3, micro-batch 0, between two programs, in _end, {LOOP}",
    )


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"zero": 0}, {"zero": 2, "micro_batches": 2}], ids=str)
def test_whatever_the_plan(plan):
    check(run(2, train, "eager", "loop", plan), 2, "is alive, and has not arrived", LOOP)


@pytest.mark.gloo
@pytest.mark.slow
def test_micro_batches_of_a_loop_of_ones_own_are_counted():
    outcomes = run(2, train_in_a_loop_of_its_own, "loop")
    check(outcomes, 2, "this rank is at step 4, micro-batch 1", "at step 4, micro-batch 0, between two programs")


@pytest.mark.gloo
@sweep("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)], quick=(0,))
def test_the_collective_that_a_rank_waits_in_is_named_with_its_module_and_line(backend):
    outcomes = run(2, stuck_inside_a_program, backend)
    check(outcomes, 2, "rank 1 is alive, and has not arrived", "in train0.backward")
    said = str(outcomes[0].error)
    assert "this rank is at step 4, micro-batch 0, in train0.backward at scatter_grad_" in said
    assert re.search(
        r"at scatter_grad_(\w+) \(module (first|second), parameter \w+\.\w+ .*test_heartbeat.py:\d+\)", said
    ), said


@pytest.mark.gloo
def test_a_rank_that_waits_says_for_whom_before_it_gives_up():
    lines = run(2, said_while_waiting)[0].value
    (line,) = [text for text in lines if "has not moved" in text]
    assert f"waits for rank(s) {STUCK}" in line and "may take 4 s" in line and "in said_while_waiting" in line


@pytest.mark.gloo
@sweep("who", [0, STUCK], quick=1)
@pytest.mark.slow
def test_what_a_rank_does_alone_is_not_counted(who):
    check(run(3, train_a_model_of_its_own_besides, who), 3, "is alive, and has not arrived")


@pytest.mark.gloo
@pytest.mark.slow
def test_only_ranks_of_the_group_that_is_waited_in_are_judged():
    with Ranks(3, timeout=60) as ranks:
        outcomes = ranks.attempt(train_in_two_groups, limit=100, lost=(STUCK,))
    assert outcomes[2].error is None and not outcomes[2].died
    check(outcomes[:2], 2, "is alive, and has not arrived")
    assert "rank 2" not in str(outcomes[0].error)


@pytest.mark.slow
@pytest.mark.gloo
def test_nobody_warns_while_a_rank_compiles():
    with Ranks(2, timeout=60) as ranks:
        assert ranks.run(said_while_another_compiles) == [[], []]


@pytest.mark.gloo
def test_the_store_that_went_with_its_rank_is_told(tmp_path):
    """Under a TCPStore that rank 0 holds: when that rank is killed, the other's error says so, and no thread complains."""
    with Ranks(2, timeout=60) as ranks:
        outcomes = ranks.attempt(the_store_goes, str(tmp_path / "port"), limit=100)
    assert outcomes[0].died and not outcomes[1].died
    error, complaints = outcomes[1].value
    assert "the store that they tell it to is gone" in error and complaints == []


@pytest.mark.slow
def test_a_process_ends_well_whose_store_went(tmp_path):
    """Under a TCPStore that rank 0 holds: when that rank is killed, the other's error says so, and no thread complains."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    processes = [
        subprocess.Popen([sys.executable, str(script), str(r), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    said = processes[1].communicate(timeout=120)[1]
    processes[0].communicate(timeout=120)
    assert "the store that they tell it to is gone" in said
    assert "Exception in thread" not in said and "Fatal Python error" not in said
    assert processes[1].returncode == 1


SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist, zgraph
from torch import nn
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False) if rank == 0 else None
if rank == 0:
    open(sys.argv[2] + "/port.part", "w").write(str(store.port))
    os.rename(sys.argv[2] + "/port.part", sys.argv[2] + "/port")
while not os.path.exists(sys.argv[2] + "/port"):
    time.sleep(0.05)
store = store or dist.TCPStore("127.0.0.1", int(open(sys.argv[2] + "/port").read()), 2, False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = zgraph.compile(nn.Linear(4, 4), zgraph.Plan(backend="eager", optimizer=zgraph.SGD(), watch={"interval": 0.2}), loss_fn=lambda out: out.sum())
for step in range(5):
    if step == 3 and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    model.train_step(torch.ones(2, 4))
"""


# -- threads and timeouts ---------------------------------------------------------------------------------------------
@pytest.mark.gloo
def test_one_thread_watches_for_all_models_and_ends_with_the_last(two):
    assert two.run(several_models) == [(1, 1, 1, 0, True)] * 2


@pytest.mark.gloo
def test_the_thread_that_watches_keeps_no_model(two):
    assert two.run(watched_and_gone) == [True] * 2


@pytest.mark.gloo
def test_timeouts_are_the_plans_and_go_back():
    with Ranks(2, timeout=180) as ranks:
        assert ranks.run(timeouts) == [[7.0, 7.0, 180.0, 180.0]] * 2


@pytest.mark.gloo
def test_a_forked_process_has_no_heartbeat(two):
    assert two.run(forked) == [(True, 1)] * 2


@pytest.mark.gloo
def test_heartbeats_change_no_number(two):
    assert two.run(weights, 0.05) == two.run(weights, 0.0)


@pytest.mark.gloo
def test_a_model_outlives_its_process_group():
    with Ranks(2) as ranks:
        for threads, error in ranks.run(the_process_group_goes):
            assert threads <= 1 and error == "none"


@pytest.mark.core
def test_one_process_has_no_heartbeat():
    before = _threads()
    zgraph.compile(Net(), zgraph.Plan(backend="eager")).train_step(torch.ones(4, 6))
    assert _threads() == before


@pytest.mark.core
@pytest.mark.parametrize("watch", [{"timeout": 0}, {"timeout": -1.0}, {"interval": -1}, {"every": 1}])
def test_a_watch_that_means_nothing_is_refused(watch):
    with pytest.raises(PlanError, match="watch"):
        zgraph.Plan(watch=watch)


# -- where a thread is ----------------------------------------------------------------------------------------------------
def _waiting(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    end.wait()  # here it is


def test_the_stack_of_a_thread_is_its_lines_the_innermost_first():
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=_waiting, args=(begun, end), name="a thread that waits")
    thread.start()
    begun.wait()
    time.sleep(0.05)
    found = stack_of(thread.ident)
    end.set()
    thread.join()
    own = [line for line in found if line.file == __file__]
    number = next(i for i, t in enumerate(Path(__file__).read_text().splitlines(), 1) if t.endswith("# here it is"))
    assert [(line.function, line.number) for line in own] == [("_waiting", number)]
    assert found.index(own[0]) > 0 and found[0].function == "wait"
    assert stack_of(0) == []
    mine = stack_of(threading.get_ident())
    assert any(line.function == "test_the_stack_of_a_thread_is_its_lines_the_innermost_first" for line in mine)


CHURN = """
import ctypes, sys, threading, time
from zgraph.ranks.thread_stacks import stack_of

libc, end = ctypes.CDLL(None), time.monotonic() + 2
routine = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda given: None)


def begin_and_end_threads():
    while time.monotonic() < end:
        thread = ctypes.c_ulong()
        assert libc.pthread_create(ctypes.byref(thread), None, routine, None) == 0
        libc.pthread_join(thread, None)


def wait():
    while time.monotonic() < end:
        time.sleep(0.001)


for begin in (begin_and_end_threads, begin_and_end_threads, begin_and_end_threads, wait):
    waiting = threading.Thread(target=begin, daemon=True)
    waiting.start()
reads = 0
while time.monotonic() < end - 0.1:
    assert any(line.function == "wait" for line in stack_of(waiting.ident))
    reads += 1
print(reads)
"""


def test_a_stack_is_read_while_threads_of_c_begin_and_end():
    """(faulthandler's way dies of it within a second.)"""
    done = subprocess.run([sys.executable, "-c", CHURN], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
