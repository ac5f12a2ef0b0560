"""`zgraph launch`: slots, variables, lines; ranks on three "machines" of a fake ssh; a rank that dies, a machine that does not answer."""

import io
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sweeps import product, sweep
from typer.testing import CliRunner

import zgraph.cli.launch as command
import zgraph.launch.run as runs
from zgraph.cli.app import app
from zgraph.errors import MeshError
from zgraph.launch import process_tree
from zgraph.launch.bind_cores import cores_of, share_of
from zgraph.launch.commands import Job, carried, losses_of, remote, torchrun
from zgraph.launch.environment import of_files, passed_on, read
from zgraph.launch.hosts import chosen, limited, read_hostfile
from zgraph.launch.rank_deaths import Death, Deaths

HOSTS = {"worker-1": [0, 1], "worker-2": [0, 1, 2, 3], "worker-3": [0]}


def hostfile(tmp_path, text):
    path = tmp_path / "hostfile"
    path.write_text(text)
    return path


# -- hosts --------------------------------------------------------------------------------------------------------------
def test_a_hostfile_names_machines_and_slots(tmp_path):
    text = "# ours\nworker-1 slots=2\n\nworker-2   slots=4  # new\nworker-3 slots=1\n"
    assert read_hostfile(hostfile(tmp_path, text)) == HOSTS


@pytest.mark.parametrize(
    "text, said, line",
    [
        ("worker-1 slots=2\nworker-1 slots=1", "stands in the hostfile twice", 2),
        ("worker-1 slot=2", "is no line of a hostfile", 1),
        ("worker-1", "is no line of a hostfile", 1),
        ("a slots=1\nb slots=0", "has no slots", 2),
        ("-oProxyCommand=x slots=1", "is no name of a machine", 1),
        ("# nothing\n", "names no machine", None),
    ],
)
def test_a_wrong_hostfile_is_refused_with_its_line(tmp_path, text, said, line):
    with pytest.raises(MeshError, match=said) as caught:
        read_hostfile(hostfile(tmp_path, text))
    assert str(caught.value.where).endswith(f"hostfile:{line}" if line else "hostfile")


@pytest.mark.parametrize(
    "include, exclude, left",
    [
        ("worker-2:0@worker-3", "", {"worker-2": [0], "worker-3": [0]}),
        ("worker-3@worker-1:1,0", "", {"worker-1": [0, 1], "worker-3": [0]}),
        ("", "worker-2:1,3@worker-3", {"worker-1": [0, 1], "worker-2": [0, 2]}),
        ("", "worker-1", {"worker-2": [0, 1, 2, 3], "worker-3": [0]}),
        ("", "", HOSTS),
    ],
)
def test_what_is_included_and_left_out(include, exclude, left):
    found = chosen(HOSTS, include, exclude)
    assert found == left and list(found) == list(left)


@pytest.mark.parametrize(
    "include, exclude, said",
    [
        ("worker-1", "worker-2", "given together"),
        ("worker-4", "", "no machine 'worker-4'"),
        ("worker-1:2", "", "has no slot 2"),
        ("worker-1:a", "", "names no machine"),
        ("", "worker-1@worker-2@worker-3", "no slot is left"),
    ],
)
def test_what_names_nothing_is_refused(include, exclude, said):
    with pytest.raises(MeshError, match=said):
        chosen(HOSTS, include, exclude)
    with pytest.raises(MeshError, match="--num_nodes is 4, and the hostfile has 3 nodes"):
        limited(HOSTS, nodes=4)
    with pytest.raises(MeshError, match="--num_gpus is 2, and worker-3 has 1 slots"):
        limited(HOSTS, each=2)
    assert limited(HOSTS, 2, 1) == {"worker-1": [0], "worker-2": [0]}


# -- variables ------------------------------------------------------------------------------------------------------------
def test_variables_of_files_and_of_this_process(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "A=1\nB=two words\n"), (here, "# ours\nexport B='3'\n")):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(text)
    assert of_files({}, home, here) == {"A": "1", "B": "3"}
    named = tmp_path / "named"
    named.write_text("C=4")
    assert of_files({"DS_ENV_FILE": str(named)}, home, here) == {"C": "4"}
    with pytest.raises(MeshError, match="no environment file"):
        of_files({"DS_ENV_FILE": str(tmp_path / "none")}, home, here)
    named.write_text("C=4\nno line")
    with pytest.raises(MeshError, match="is no line of an environment file") as caught:
        read(named)
    assert str(caught.value.where).endswith("named:2")
    environ = {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/a",
        "PATH": "/bin",
        "PATHS": "x",
        "SECRET": "y",
        "OMP_NUM_THREADS": "1",
    }
    assert passed_on(environ).keys() == {"NCCL_DEBUG", "PYTHONPATH", "PATH", "OMP_NUM_THREADS"}


# -- lines ------------------------------------------------------------------------------------------------------------------
def test_each_node_has_a_line():
    job = Job(
        ["train.py", "--a b"],
        HOSTS,
        "worker-1",
        variables={"NCCL_DEBUG": "a b"},
        folder="/my work",
        slots_are_chosen=True,
    )
    lines = carried(job, "ssh", 2222)
    assert list(lines) == list(HOSTS)
    line = lines["worker-2"]
    assert line[0] == "ssh" and "worker-2" in line and line[line.index("-p") + 1] == "2222"
    remote = line[-1]
    assert remote.startswith("cd '/my work' && export CUDA_VISIBLE_DEVICES=0,1,2,3 && export NCCL_DEBUG='a b' && exec ")
    words = shlex.split(remote.partition("exec ")[2])
    assert words[-2:] == ["train.py", "--a b"] and words[words.index("--node_rank") + 1] == "1"
    assert words[words.index("--nproc_per_node") + 1] == "4" and words[words.index("--nnodes") + 1] == "3"


def test_a_node_without_the_folder_starts_nothing(tmp_path):
    job = Job(
        [f"{tmp_path}/script"],
        {"a": [0]},
        "a",
        no_python=True,
        variables={"A": "1", "B": "2"},
        folder=f"{tmp_path}/no folder",
    )
    done = subprocess.run(["bash", "-c", remote(job, 0)], capture_output=True, text=True)
    assert done.returncode and "no folder" in done.stderr and "torch" not in done.stderr


def test_slurm_and_mpi_start_all_nodes_by_one_line():
    job = Job(["m.train"], {"a": [0, 1], "b": [0, 1]}, "a", module=True)
    assert "--node_rank $SLURM_NODEID" in carried(job, "slurm")["srun"][-1]
    assert "--node_rank $OMPI_COMM_WORLD_RANK" in carried(job, "openmpi")["mpirun"][-1]
    options, *pdsh = carried(job, "pdsh", 2222)["b"][1:-1]
    assert pdsh == ["pdsh", "-S", "-R", "ssh", "-w", "b"]
    assert options.startswith("PDSH_SSH_ARGS_APPEND=-tt ") and options.endswith(" -p 2222")
    with pytest.raises(MeshError, match="slurm uses no ssh"):
        carried(job, "slurm", 2222)
    with pytest.raises(MeshError, match="different numbers of slots"):
        carried(Job(["x"], HOSTS, "a"), "slurm")
    with pytest.raises(MeshError, match="nothing starts nodes by 'rsh'"):
        carried(job, "rsh")
    elastic = torchrun(Job(["x"], {"a": [0]}, "a", elastic="1:4", max_restarts=3), 0)
    assert elastic[elastic.index("--nnodes") + 1] == "1:4" and "c10d" in elastic and "--node_rank" not in elastic


def test_ranks_share_out_cores():
    assert cores_of("all", {3, 1, 2}) == [1, 2, 3] and cores_of("0-2,7", range(8)) == [0, 1, 2, 7]
    assert [share_of([0, 1, 2, 7, 8], rank, 2) for rank in range(2)] == [[0, 1], [2, 7]]
    for text, said in [("0-", "no list"), ("2-1", "no list"), ("a", "no list"), ("0-2,1", "twice"), ("9", "no core 9")]:
        with pytest.raises(MeshError, match=said):
            cores_of(text, range(8))
    with pytest.raises(MeshError, match="1 cores are too few for 2 ranks"):
        share_of([0], 0, 2)
    line = torchrun(Job(["m.train", "--lr", "1"], {"a": [0, 1]}, "a", module=True, cores="0-3"), 0)
    words = [
        "zgraph.launch.watch_rank",
        "--module",
        "zgraph.launch.bind_cores",
        "--module",
        "0-3",
        "m.train",
        "--lr",
        "1",
    ]
    assert line[-9:] == ["--module", *words]


# -- runs -------------------------------------------------------------------------------------------------------------------
SCRIPT = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print(json.dumps({k: os.environ.get(k) for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MINE", "NODE")}), flush=True)
dist.barrier()
if "--die" in sys.argv:
    if rank == 2:
        print("rank 2 has a fault", flush=True)
        open("fault", "w").close()
        os._exit(7)
    if rank == 3:  # (which keeps torchrun on the machine of rank 2 waiting)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)
    dist.all_reduce(torch.ones(1))
"""

PDSH = """#!/bin/bash
shift 4; host=$1
NODE=$1 bash -c "$2" 2>&1 | sed -u "s/^/$host: /"
exit ${PIPESTATUS[0]}
"""
ALL_NODES = """#!/bin/bash
while [[ $1 != bash ]]; do shift; done
for node in 0 1; do %s=$node NODE=n$node "$@" & done
for node in 0 1; do wait -n || { code=$?; kill $(jobs -p); wait; exit $code; }; done
"""


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """Three machines, which are this one: `ssh` is a script that runs the line, does not reach "away", and loses "mute"."""
    binary = tmp_path / "bin" / "ssh"
    binary.parent.mkdir()
    binary.write_text(
        "#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == -tt ]] && shift || shift 2; done\n"
        '[[ $1 == mute ]] && { sleep 2; echo "Timeout, server mute not responding." >&2; exit 255; }\n'
        '[[ $1 == away ]] && { echo "ssh: connect to host away: No route to host" >&2; exit 255; }\n'
        'export NODE=$1; exec bash -c "$2"\n'
    )
    (binary.parent / "pdsh").write_text(PDSH)
    (binary.parent / "srun").write_text(ALL_NODES % "SLURM_NODEID")
    (binary.parent / "mpirun").write_text(ALL_NODES % "OMPI_COMM_WORLD_RANK")
    for program in binary.parent.iterdir():
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / ".deepspeed_env").write_text("MINE=here\n")
    hostfile(tmp_path, "127.0.0.1 slots=1\nn2 slots=2\nn3 slots=1\naway slots=1\nmute slots=1\n")

    def launch(*options, limit=100):
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "zgraph", "launch", *options],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{binary.parent}:{os.environ['PATH']}",
                "HOME": str(tmp_path),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=limit,
        )
        return done, time.monotonic() - begin

    return launch


def ranks_in(text):
    found = [json.loads(line[line.index("{") :]) for line in text.splitlines() if '{"RANK"' in line]
    return sorted(found, key=lambda row: int(row["RANK"]))


@pytest.mark.slow  # (four ranks import torch)
def test_ranks_run_on_three_machines(machines):
    done, _ = machines("--hostfile", "hostfile", "--exclude", "away@mute", "--master_port", "29671", "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = ranks_in(done.stdout)
    assert [(r["RANK"], r["NODE"], r["LOCAL_RANK"]) for r in found] == [
        ("0", "127.0.0.1", "0"),
        ("1", "n2", "0"),
        ("2", "n2", "1"),
        ("3", "n3", "0"),
    ]
    assert all(r["WORLD_SIZE"] == "4" and r["MINE"] == "here" for r in found)


TWO = ["--hostfile", "two", "--master_addr", "127.0.0.1"]


@pytest.mark.slow  # (four ranks import torch)
@pytest.mark.parametrize(
    "options, where",
    [
        (TWO, "n1"),
        ([*TWO, "--launcher", "pdsh"], "n1"),
        ([*TWO, "--launcher", "slurm"], None),
        ([*TWO, "--launcher", "openmpi"], None),
        ([*TWO, "--enable_each_rank_log", "logs"], "n1"),
        (["--num_gpus", "4"], None),
    ],
    ids=["ssh", "pdsh", "slurm", "openmpi", "logs", "one machine"],
)
def test_a_rank_that_dies_ends_the_job_on_all_machines_and_is_shown_first(machines, tmp_path, options, where):
    (tmp_path / "two").write_text("n0 slots=2\nn1 slots=2\n")
    port = 29680 + sum(map(len, options))
    done, _ = machines(*options, "--master_port", str(port), "script.py", "--die", limit=300)
    assert done.returncode == 7, done.stdout + done.stderr
    assert time.time() - (tmp_path / "fault").stat().st_mtime < 60
    before, last = done.stdout.split("zgraph launch: rank 2", 1)
    local = 2 if "--num_gpus" in options else 0
    assert last.startswith(
        f" (local rank {local} on {where or socket.gethostname()}) ended with 7, and the job with it."
    )
    own, _, others = last.partition("zgraph launch: after it")
    assert own.splitlines()[-1] == "    rank 2 has a fault" and "rank 2 has a fault" in before
    assert all("rank 0" in line or "rank 1" in line for line in others.splitlines()[1:]), "(those that had time to)"


def test_a_machine_that_does_not_answer_is_named(machines):
    done, _ = machines("--hostfile", "hostfile", "--include", "away@n2", "--master_port", "29673", "script.py")
    assert done.returncode == 255
    assert "zgraph launch: away ended with 255, which is ssh's own: the node did not answer" in done.stdout
    assert "No route to host" in done.stdout


def test_a_machine_that_falls_silent_ends_the_job_on_all(machines):
    done, seconds = machines("--hostfile", "hostfile", "--include", "n2@mute", "--master_port", "29674", "script.py")
    assert done.returncode == 255 and seconds < 60
    last = done.stdout[done.stdout.index("zgraph launch:") :]
    assert last.startswith("zgraph launch: mute ended with 255") and "server mute not responding" in last


LEAVES = """
(trap "" TERM; exec setsid sleep 300) & echo $! >> {pids}
setsid bash -c 'sleep 300 & echo $! >> {pids}; env -i sleep 300 & echo $! >> {pids}; wait' &
while (( $(wc -l < {pids}) < 3 )); do sleep 0.02; done; {end}
"""


def running(pid):
    """Whether a process runs, and is not one that has ended and that nobody has asked about."""
    try:
        return (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@sweep("end", ["exit 3", "kill -KILL $$", "exit 0", "sleep 300", "trap '' TERM; while :; do sleep 1; done"], quick=3)
def test_what_a_command_has_started_ends_with_the_job(tmp_path, monkeypatch, end):
    """Of a command that failed, was killed, has ended well, or still runs: in sessions of their own, deaf to SIGTERM, of an ended parent."""
    monkeypatch.setattr(runs, "PATIENCE", 0.3)
    pids, other = tmp_path / "pids", subprocess.Popen(["sleep", "300"], start_new_session=True)
    pids.touch()
    fails = f"while (( $(wc -l < {pids}) < 3 )); do sleep 0.02; done; sleep 1; exit 7"  # (behind the other, on a busy machine too)
    lines = {"leaves": ["bash", "-c", LEAVES.format(pids=pids, end=end)], "fails": ["bash", "-c", fails]}
    shown = io.StringIO()
    assert runs.run(lines, out=shown) == {"exit 3": 3, "kill -KILL $$": 137}.get(end, 7)
    assert len(started := pids.read_text().split()) == 3
    assert not [pid for pid in started if running(pid)] and other.poll() is None
    other.kill()
    other.wait()


def test_a_launcher_that_loses_its_terminal_ends_the_job(tmp_path):
    line = ["bash", "-c", f"echo $$ > {tmp_path}/pid; sleep 300"]
    heard = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # (tests may be run by nohup)
    code = f"{heard}; from zgraph.launch.run import run; sys.exit(run({{'one': {line}}}))"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    launcher.send_signal(signal.SIGHUP)
    assert launcher.wait(30) == 128 + signal.SIGHUP and not running((tmp_path / "pid").read_text().strip())


# -- ranks that die ----------------------------------------------------------------------------------------------------------
def watched(rank, text):
    """A shell's script as a rank with its watcher, in a shell that goes on behind it where `text` says so (after a line "---")."""
    inner, _, behind = text.partition("\n---\n")
    words = [sys.executable, "-m", "zgraph.launch.watch_rank", "--no_python", "bash", "-c", inner]
    return ["bash", "-c", f"export RANK={rank} LOCAL_RANK=0; {shlex.join(words)}; code=$?; {behind}\nexit $code"]


def told(tmp_path, *ranks, **how):
    """(the exit code, what is shown, of which what is told at the end) of ranks on nodes n0, n1, …; `DEAD` is a file for them."""
    dead, shown = shlex.quote(str(tmp_path / "dead")), io.StringIO()
    lines = {f"n{rank}": watched(rank, text.replace("DEAD", dead)) for rank, text in enumerate(ranks)}
    code = runs.run(lines, out=shown, **how)
    text = shown.getvalue()
    return code, text, text[text.find("zgraph launch: ") :]


AFTERWARDS = "while [[ ! -e DEAD ]]; do sleep 0.02; done; sleep 1; "  # (a watcher that has next to no processor sees a death late)
LATER = "while [[ ! -e DEAD2 ]]; do sleep 0.02; done; sleep 0.3"
RAISES = "echo 'Traceback (most recent call last):' >&2; echo '{}' >&2; "


DEATHS = [
    ("its node ends last", "echo a fault; touch DEAD; exit 7\n---\n" + LATER, "ended with 7"),
    ("killed", "printf 'a fault'; touch DEAD; kill -KILL $$\n---\n" + LATER, "was ended by SIGKILL, as by the kernel"),
    (
        "Python takes its time to end",
        RAISES.format("ValueError: a fault") + "touch DEAD; " + LATER + "; exit 1",
        "ended with 1",
    ),
]


@product(
    "death, says",
    DEATHS,
    ["RuntimeError: Connection closed by peer [127.0.0.1]:123", "ValueError: no data"],
    together=1,
)
def test_the_rank_that_died_first_is_told_before_those_that_followed(tmp_path, death, says):
    _, first, how = death
    if how == "ended with 1":
        says = f"Connection closed by peer, {says}"  # (else its death, which comes earlier, is the first that is known)
    code, shown, last = told(tmp_path, AFTERWARDS + RAISES.format(says) + "exit 1\n---\ntouch DEAD2", first)
    assert code == {"ended with 7": 7, "ended with 1": 1}.get(how, 137)
    assert last.startswith(f"zgraph launch: rank 1 (local rank 0 on n1) {how}") and "and the job with it" in last
    own, others = last.split("zgraph launch: after it\n")
    assert own.splitlines()[-1].endswith("a fault") and says not in own
    assert others == f"    rank 0 (local rank 0 on n0) ended with 1: {says}\n"
    assert "a fault" in shown[: shown.index(last)] and f"n0: {says}" in shown
    assert "zgraph launch: rank 1 died" not in shown and "rank 1|" not in shown


def test_a_rank_that_lost_another_is_told_after_one_that_says_nothing_of_it(tmp_path, monkeypatch):
    """Also where it printed that first: what comes over the network has no order."""
    monkeypatch.setattr(runs, "FOLLOWING", 60.0)  # (a busy machine starts the other rank late)
    lost = (
        RAISES.format("torch.distributed.DistBackendError: ncclRemoteError: remote process exited")
        + "touch DEAD; exit 1"
    )
    _, _, last = told(tmp_path, lost, AFTERWARDS + "echo a fault; exit 3")
    assert last.startswith("zgraph launch: rank 1 (local rank 0 on n1) ended with 3") and "rank 0" in last


def test_a_node_that_is_silent_of_its_ranks_is_told_where_all_others_lost_one(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "FOLLOWING", 30.0)
    lost = RAISES.format("RuntimeError: Connection reset by peer") + "touch DEAD; exit 1\n---\nsleep 3"
    lines = {"n0": watched(0, lost.replace("DEAD", f"{tmp_path}/dead")), "n1": ["bash", "-c", "sleep 1; exit 255"]}
    shown = io.StringIO()
    assert runs.run(lines, out=shown) == 255
    assert "zgraph launch: n1 ended with 255, which is ssh's own" in shown.getvalue()


def test_a_dead_ranks_job_ends_though_its_node_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "FOLLOWING", 0.3)
    monkeypatch.setattr(runs, "PATIENCE", 0.3)
    code, _, last = told(tmp_path, "trap 'echo ending' TERM; sleep 300", "echo a fault; exit 7\n---\nsleep 300")
    assert code == 7 and last.startswith("zgraph launch: rank 1") and "after it" not in last


def test_a_rank_that_is_asked_to_end_is_not_told(tmp_path):
    script = "trap 'touch DEAD; exit 3' TERM; touch READY; while :; do sleep 0.02; done"
    script = script.replace("DEAD", str(tmp_path / "dead")).replace("READY", str(tmp_path / "ready"))
    words = [sys.executable, "-m", "zgraph.launch.watch_rank", "--no_python", "bash", "-c", script]
    rank = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    os.killpg(rank.pid, signal.SIGTERM)  # (as torchrun does)
    assert (
        "zgraph launch" not in rank.communicate(timeout=60)[1] and rank.returncode == 3 and (tmp_path / "dead").exists()
    )


def test_a_rank_is_warned_as_without_a_watcher(tmp_path):
    """By a signal to all processes of a job, as Slurm's before a time limit: the rank has a handler, the watcher lives on."""
    script = f"trap 'echo saved; exit 0' USR1; touch {tmp_path}/ready; while :; do sleep 0.02; done"
    words = [sys.executable, "-m", "zgraph.launch.watch_rank", "--no_python", "bash", "-c", script]
    rank = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    os.killpg(rank.pid, signal.SIGUSR1)
    assert rank.communicate(timeout=60)[0] == "saved\n" and rank.returncode == 0
    unwarned = [
        *words[:-1],
        f"touch {tmp_path}/other; sleep 300",
    ]  # (without a handler it dies of it, as it would by itself)
    rank = subprocess.Popen(unwarned, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (tmp_path / "other").exists():
        time.sleep(0.02)
    os.killpg(rank.pid, signal.SIGUSR1)
    assert "rank 0 died" in rank.communicate(timeout=60)[1] and rank.returncode == -signal.SIGUSR1


def test_a_rank_that_was_failing_when_it_was_asked_to_end_is_told_first(tmp_path):
    """On one machine torchrun ends it, as soon as a rank that has missed it is faster to end."""
    dead, out = f"{tmp_path}/dead", f"{tmp_path}/pid"
    slow = watched(1, RAISES.format("ValueError: a fault") + f"echo $$ > {out}; touch {dead}; sleep 300")[-1]
    lost = RAISES.format("RuntimeError: Connection closed by peer") + "exit 1"
    lost = watched(0, AFTERWARDS.replace("DEAD", dead) + lost)[-1]
    # (a shell in torchrun's place)
    session = f"$(ps -o sid= -p $(cat {out}) | tr -d ' ')"
    line = f"setsid bash -c {shlex.quote(slow)} & bash -c {shlex.quote(lost)}; kill -TERM -- -{session}; wait; exit 1"
    shown = io.StringIO()
    assert runs.run({"n0": ["bash", "-c", line]}, out=shown) == 1
    last = shown.getvalue()[shown.getvalue().index("zgraph launch: ") :]
    assert "rank 1 (local rank 0 on" in last.splitlines()[0] and "was failing when it was ended" in last.splitlines()[0]
    assert last.splitlines()[2] == "    ValueError: a fault" and "rank 0" in last


def test_processes_are_listed_behind_their_parents(tmp_path, monkeypatch):
    """So a watcher is asked to end before its rank, whatever their numbers; and numbers given anew are no endless circle."""
    monkeypatch.setattr(process_tree, "_PROC", tmp_path)
    for pid, parent, state in (
        (40, 1, "S"),
        (9, 40, "S"),
        (33, 9, "R"),
        (8, 33, "S"),
        (5, 8, "Z"),
        (60, 61, "S"),
        (61, 60, "S"),
        (70, 1, "S"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) {state} {parent} {pid} 0")
        (tmp_path / str(pid) / "environ").write_bytes(b"A=1\0MARK=1\0" if pid in (40, 60) else b"A=1\0")
    *line, one, other = process_tree.tree("MARK")
    assert line == [40, 9, 33, 8] and {one, other} == {60, 61}
    assert process_tree.tree("NONE", leader=9) == [9, 33, 8]


def test_a_rank_ends_with_its_watcher(tmp_path):
    words = [sys.executable, "-m", "zgraph.launch.watch_rank", "--no_python", "bash", "-c"]
    watcher = subprocess.Popen([*words, f"echo $$ > {tmp_path}/pid; exec sleep 300"])
    while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text().strip()):
        time.sleep(0.02)
    watcher.kill()
    watcher.wait()
    limit = time.monotonic() + 30
    while running(pid) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not running(pid)


def test_a_rank_passes_its_output_on_as_it_comes(tmp_path):
    """Bytes and halves of lines too; what a process that it leaves behind holds open does not keep its watcher waiting."""
    script = "printf '\\xff half'; sleep 0.3; printf '\\r100%%\\n'; echo err >&2; sleep 300 & exit 0"
    words = [sys.executable, "-m", "zgraph.launch.watch_rank", "--no_python", "bash", "-c", script]
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        rank = subprocess.Popen(words, stdout=out, stderr=err, start_new_session=True)
        assert rank.wait(60) == 0
    os.killpg(rank.pid, signal.SIGKILL)
    assert (tmp_path / "out").read_bytes() == b"\xff half\r100%\n" and (tmp_path / "err").read_bytes() == b"err\n"


def test_reports_are_read_behind_prefixes_and_among_each_other():
    deaths = Deaths()
    reports = [
        [
            line.decode().rstrip("\n")
            for line in Death(rank, 0, "h", attempt, 1, False, 0.0, [f"{rank} {n}" for n in range(3)]).report()
        ]
        for rank, attempt in ((4, 1), (5, 1), (6, 0))
    ]
    for lines in zip(*reports, strict=True):
        for prefix, line in zip(("[default0]:", "n2: [default1]:", ""), lines, strict=True):
            assert deaths.take("n2", prefix + line)
    assert not deaths.take("n2", "zgraph launch: rank 4 is well")
    for torn in ('{"host": "h"', '{"host": 1}', "{}}", '{"other": 1}'):
        assert not deaths.take("n2", f"zgraph launch: rank 9 died {torn}")
    assert [(death.rank, death.last, node) for death, node in deaths.in_order()] == [
        (rank, [f"{rank} {n}" for n in range(3)], "n2") for rank in (4, 5)
    ], "those of an earlier attempt are not told"
    assert max(map(len, Death(0, 0, "h", 0, 1, False, 0.0, ["x" * 9999]).report())) < 4096


@pytest.mark.parametrize("second, code", [("sleep 1.5", 0), ("sleep 0.5; exit 9", 9)])
def test_an_elastic_job_goes_on_without_a_node(second, code):
    shown = io.StringIO()
    lines = {f"n{node}": ["bash", "-c", line] for node, line in enumerate(("exit 4", second, "sleep 1"))}
    assert runs.run(lines, out=shown, losses=losses_of(Job(["x"], dict(HOSTS), "a", elastic="2:3"))) == code
    assert "zgraph launch: n0 ended with 4; the job goes on without it" in shown.getvalue()
    assert ("zgraph launch: n1 ended with 9; the others were ended" in shown.getvalue()) == bool(code)
    for wrong in ("2", "0:3", "3:2", "a:b"):
        with pytest.raises(MeshError, match="is no range of nodes"):
            losses_of(Job(["x"], HOSTS, "a", elastic=wrong))
    with pytest.raises(MeshError, match="mpirun ends all nodes when one fails"):
        carried(Job(["x"], {"a": [0], "b": [0]}, "a", elastic="1:2"), "openmpi")


def test_a_job_whose_output_nobody_reads_ends(tmp_path):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    line = ["bash", "-c", f"echo $$ > {tmp_path}/pid; echo hello; exec sleep 300"]
    assert runs.run({"one": line}, out=Closed()) == 128 + signal.SIGPIPE
    assert not running((tmp_path / "pid").read_text().strip())


def test_a_program_that_is_not_there_is_named_and_nothing_is_left(tmp_path):
    pid = tmp_path / "pid"
    with pytest.raises(MeshError, match="n2 could not be started") as caught:
        runs.run({"n1": ["bash", "-c", f"echo $$ > {pid}; sleep 300"], "n2": ["no-such-ssh"]}, out=io.StringIO())
    started = pid.read_text().strip() if pid.exists() else ""  # (it may have ended before it wrote its own)
    assert caught.value.where == "no-such-ssh" and not (started and running(started))


def test_a_wrong_hostfile_and_variables_of_a_named_file(machines, tmp_path, monkeypatch):
    (tmp_path / "wrong").write_text("n2 slots=2\nn3 slots=two\n")
    done, _ = machines("--hostfile", "wrong", "script.py")
    assert done.returncode == 2 and "wrong:2" in done.stderr and "is no line of a hostfile" in done.stderr
    gone, _ = machines("--hostfile", "gone", "script.py")
    assert gone.returncode == 2 and "gone" in gone.stderr and "Traceback" not in gone.stderr
    (tmp_path / "variables").write_text("NAMED=a b\n")
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "variables"))
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    shown, _ = machines("--print", "--hostfile", "hostfile", "--num_nodes", "2", "script.py")
    lines = shown.stdout.splitlines()
    assert len(lines) == 2 and all("NAMED=" in line and "a b" in line and "NCCL_DEBUG=WARN" in line for line in lines)
    assert all("ServerAliveInterval=15" in line for line in lines) and "MINE=" not in shown.stdout


def test_lines_are_shown_and_nothing_starts(machines, tmp_path):
    done, _ = machines(
        "--print", "--hostfile", "hostfile", "--include", "n2:1@n3", "--module", "pkg.train", "--lr", "0.1"
    )
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    assert "CUDA_VISIBLE_DEVICES=1" in done.stdout and done.stdout.count("pkg.train --lr 0.1") == 2
    alone, _ = machines("--print", "--num_gpus", "2", "script.py")
    assert "--nproc_per_node 2" in alone.stdout and "ssh" not in alone.stdout
    assert alone.stdout.startswith("env MINE=here ") and "CUDA_VISIBLE_DEVICES" not in alone.stdout
    part, _ = machines("--print", "--num_gpus", "2", "--include", "localhost:1", "script.py")
    assert part.stdout.startswith("env MINE=here CUDA_VISIBLE_DEVICES=1 ") and "--nproc_per_node 1" in part.stdout
    wrong, _ = machines("--hostfile", "hostfile", "--include", "n9", "script.py")
    assert wrong.returncode == 2 and "there is no machine 'n9'" in wrong.stderr and not Path(tmp_path / "n9").exists()


def test_a_script_may_get_its_rank_as_deepspeeds_launcher_gives_it(tmp_path):
    words = ["-m", "zgraph.launch.local_rank", "--no_python", "echo", "--lr", "1"]
    environ = {**os.environ, "LOCAL_RANK": "3"}
    assert subprocess.check_output([sys.executable, *words], env=environ, text=True) == "--local_rank=3 --lr 1\n"
    job = {"hosts": {"a": [0]}, "master_addr": "a", "local_rank": True}
    assert torchrun(Job(["x.py"], **job), 0)[-3:] == ["--module", "zgraph.launch.local_rank", "x.py"]
    both = torchrun(Job(["m"], module=True, cores="all", **job), 0)
    assert " ".join(both).endswith("--module zgraph.launch.bind_cores --module all zgraph.launch.local_rank --module m")


def test_options_are_deepspeeds_or_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_USUAL", hostfile(tmp_path, "n2 slots=2\nn3 slots=1\n"))

    def said(*options):
        return CliRunner().invoke(app, ["launch", "--print", *options, "script.py", "--hostfil"])

    everywhere = said("--num_nodes", "-1", "--num_gpus=-1", "--launcher", "PDSH")
    assert (
        everywhere.output.count("script.py --hostfil") == 2
        and f"the machines are those of {tmp_path}" in everywhere.output
    )
    assert said("--num_accelerators", "1", "--local_rank").output.count("zgraph.launch.local_rank script.py") == 2
    assert "local_rank" not in said("--no_local_rank").output
    assert "No such option: --hostfil" in said("--hostfil", "x").output
    monkeypatch.setattr(command, "_USUAL", tmp_path / "none")
    assert isinstance(said("--num_gpus", "0").exception, (SystemExit, MeshError)) and said("--num_gpus", "0").exit_code
    assert said("--launcher", "rsh", "--num_gpus", "1").exit_code and not said("--num_gpus", "1").exit_code


ALONE = """
import os, sys
print("cores", sorted(os.sched_getaffinity(0)), "threads", os.environ["OMP_NUM_THREADS"], flush=True)
if "--once" in sys.argv and os.environ["RANK"] == "0" and not os.path.exists("tried"):
    open("tried", "w").close()
    sys.exit(3)
print("rank", os.environ["RANK"], "is done", flush=True)
"""


def test_other_launchers_and_elastic_jobs_are_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    hostfile(tmp_path, "n2 slots=2\nn3 slots=1\naway slots=1\n")

    def shown(*options):
        return CliRunner().invoke(app, ["launch", "--print", "--hostfile", "hostfile", *options, "script.py"]).output

    for launcher, begin, names in [
        ("slurm", "srun --nodes 2 --ntasks-per-node 1 --nodelist n3,away", ["$SLURM_NODEID"]),
        ("openmpi", "mpirun -np 2 --host n3,away --map-by ppr:1:node", ["$OMPI_COMM_WORLD_RANK"]),
        ("pdsh", "env 'PDSH_SSH_ARGS_APPEND=-tt", ["--node_rank 0", "--node_rank 1"]),
    ]:
        text = shown("--launcher", launcher, "-i", "n3@away")
        assert text.startswith(begin) and all(name in text for name in names)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    assert shown("--launcher", "slurm", "-i", "n3@away").startswith("env SRUN_CPUS_PER_TASK=16 srun ")
    monkeypatch.setenv("SRUN_CPUS_PER_TASK", "8")
    assert shown("--launcher", "slurm", "-i", "n3@away").startswith("srun ")
    elastic = shown("--elastic", "1:2", "--max_restarts", "3")
    assert elastic.count("--nnodes 1:2") == elastic.count("--max_restarts 3") == 3
    assert shown("--bind_cores_to_rank", "--bind_core_list", "0-3").count("zgraph.launch.bind_cores 0-3 script.py") == 3
    assert shown("--enable_each_rank_log", "logs").count("--log_dir logs") == 3


@pytest.mark.slow  # (torchrun starts, and starts again)
def test_ranks_of_this_machine_have_cores_logs_and_another_try(machines, tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    cores = sorted(os.sched_getaffinity(0))
    options = ["--num_gpus", "2", "--bind_cores_to_rank", "--enable_each_rank_log", "logs", "--elastic", "1:1"]
    done, _ = machines(*options, "--max_restarts", "1", "--master_port", "29675", "alone.py", "--once")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} is done" in done.stdout for rank in range(2))
    logs = {p.parent.name: p.read_text() for p in (tmp_path / "logs").rglob("stdout.log") if "is done" in p.read_text()}
    each = len(cores) // 2
    assert {
        rank: f"cores {cores[int(rank) * each : (int(rank) + 1) * each]} threads 1" in text
        for rank, text in logs.items()
    } == {
        "0": True,
        "1": True,
    }
    refused, _ = machines("--num_gpus", "2", "--bind_core_list", "0", "alone.py")
    assert refused.returncode == 2 and "--bind_core_list needs --bind_cores_to_rank" in refused.stderr
