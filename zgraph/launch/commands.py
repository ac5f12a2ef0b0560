"""The command lines that start a job: torchrun's on each node, and those that run it there."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zgraph.errors import MeshError
from zgraph.launch.hosts import Hosts
from zgraph.launch.run import Losses

_ELASTIC = re.compile(r"(\d+):(\d+)")
CARRIERS = ("ssh", "pdsh", "slurm", "openmpi")
CONNECT_SECONDS = 15  # within which a node has to answer


@dataclass(frozen=True)
class Job:
    """What to start, and where."""

    command: Sequence[str]  # a script, module or program, with its arguments
    hosts: Hosts  # the slots of each machine: one rank is started for each
    master_addr: str  # the address of node 0
    master_port: int = 29500  # the port of node 0
    module: bool = False  # `command` begins with a Python module
    no_python: bool = False  # `command` begins with a program
    elastic: str | None = None  # "MIN:MAX" nodes
    max_restarts: int = 0  # how often torchrun restarts the ranks
    log_dir: str | None = None  # the folder for a log file of each rank
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables of the ranks
    folder: str = "."  # the folder in which the ranks run
    slots_are_chosen: bool = False  # only some slots of a machine are used: its ranks see these devices only
    local_rank: bool = False  # the script gets `--local_rank=N`: see `zgraph.launch.local_rank`
    cores: str | None = None  # the cores that ranks share ("0-7", or "all"): see `zgraph.launch.bind_cores`


def losses_of(job: Job) -> Losses:
    """Return what the job may lose and go on. Raises `MeshError` for an `elastic` that is no MIN:MAX."""
    if job.elastic is None:
        return Losses(ranks=job.max_restarts > 0)
    match = _ELASTIC.fullmatch(job.elastic)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise MeshError(
            f"{job.elastic!r} is no range of nodes", where="--elastic", hint="MIN:MAX, such as 2:4, with MIN at least 1"
        )
    return Losses(max(len(job.hosts) - int(match[1]), 0), job.max_restarts > 0)


def torchrun(job: Job, node: int | str) -> list[str]:
    """Return torchrun's command line for one node, by its rank or by a shell's expression for it ("$SLURM_NODEID")."""
    counts = {len(slots) for slots in job.hosts.values()}
    if isinstance(node, str) and len(counts) > 1:
        raise MeshError(
            "the machines have different numbers of slots",
            where="--launcher",
            why="one line starts all nodes, and can't say another number for each",
            hint="--launcher ssh, or --num_gpus N",
        )
    slots = list(job.hosts.values())[0 if isinstance(node, str) else node]
    line = [sys.executable, "-m", "torch.distributed.run"]
    if job.elastic is not None:
        line += ["--nnodes", job.elastic, "--rdzv_backend", "c10d", "--rdzv_id", f"zgraph-{job.master_port}"]
        line += ["--rdzv_endpoint", f"{job.master_addr}:{job.master_port}", "--max_restarts", str(job.max_restarts)]
    else:
        line += ["--nnodes", str(len(job.hosts)), "--node_rank", str(node), "--max_restarts", str(job.max_restarts)]
        line += ["--master_addr", job.master_addr, "--master_port", str(job.master_port)]
    line += ["--nproc_per_node", str(len(slots))]
    if job.log_dir is not None:
        line += ["--log_dir", job.log_dir, "--redirects", "3", "--tee", "3"]
    kind, command = ["--module"] if job.module else ["--no_python"] if job.no_python else [], list(job.command)
    if job.local_rank:
        kind, command = ["--module"], ["zgraph.launch.local_rank", *kind, *command]
    if job.cores is not None:
        kind, command = ["--module"], ["zgraph.launch.bind_cores", *kind, job.cores, *command]
    return [*line, "--module", "zgraph.launch.watch_rank", *kind, *command]


def remote(job: Job, node: int | str) -> str:
    """Return the command line that a shell on a node runs: it enters the folder, exports variables and runs
    torchrun."""
    slots = list(job.hosts.values())[0 if isinstance(node, str) else node]
    variables = dict(job.variables)
    if job.slots_are_chosen:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    exports = "".join(f"export {name}={shlex.quote(value)} && " for name, value in sorted(variables.items()))
    line = " ".join(part if part == node else shlex.quote(part) for part in torchrun(job, node))
    return f"cd {shlex.quote(job.folder)} && {exports}exec {line}"


def carried(job: Job, carrier: str, ssh_port: int | None = None) -> dict[str, list[str]]:
    """Return the command lines that this machine runs, by name: one for each node, or one for all nodes.

    Raises `MeshError` for an unknown carrier, and for a port of ssh's with one that does not use ssh.
    """
    names = list(job.hosts)
    if carrier not in CARRIERS:
        raise MeshError(f"nothing starts nodes by {carrier!r}", where="--launcher", hint=", ".join(CARRIERS))
    if ssh_port is not None and carrier in ("slurm", "openmpi"):
        raise MeshError(f"--launcher {carrier} uses no ssh", where="--ssh_port", hint="leave it out")
    options = ["-tt", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "BatchMode=yes"]
    # (a node that has fallen silent; and with a terminal, which -tt makes, what runs on a node ends with the connection)
    options += ["-o", f"ServerAliveInterval={CONNECT_SECONDS}", "-o", "ServerAliveCountMax=2"]
    options += ["-p", str(ssh_port)] if ssh_port else []
    if carrier == "ssh":
        return {host: ["ssh", *options, host, remote(job, at)] for at, host in enumerate(names)}
    if carrier == "pdsh":
        line = ["env", f"PDSH_SSH_ARGS_APPEND={' '.join(options)}", "pdsh", "-S", "-R", "ssh", "-w"]
        return {host: [*line, host, remote(job, at)] for at, host in enumerate(names)}
    if carrier == "slurm":
        line = ["srun", "--nodes", str(len(names)), "--ntasks-per-node", "1", "--nodelist", ",".join(names)]
        together = f"--kill-on-bad-exit={int(job.elastic is None)}"
        return {"srun": [*line, together, "bash", "-c", remote(job, "$SLURM_NODEID")]}
    if job.elastic is not None:
        raise MeshError(
            "mpirun ends all nodes when one fails",
            where="--elastic with --launcher openmpi",
            hint="--launcher ssh, pdsh or slurm",
        )
    line = ["mpirun", "-np", str(len(names)), "--host", ",".join(names), "--map-by", "ppr:1:node"]
    return {"mpirun": [*line, "bash", "-c", remote(job, "$OMPI_COMM_WORLD_RANK")]}
