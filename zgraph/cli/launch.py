"""`zgraph launch`: starts a script on the ranks of one machine or several, by DeepSpeed's options."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path
from typing import Annotated

import typer

from zgraph.errors import MeshError
from zgraph.launch import environment
from zgraph.launch.bind_cores import ALL
from zgraph.launch.commands import Job, carried, losses_of, torchrun
from zgraph.launch.hosts import Hosts, chosen, limited, read_hostfile
from zgraph.launch.run import run

_HERE = ("localhost", "127.0.0.1")
_USUAL = Path("/job/hostfile")  # where DeepSpeed's launcher looks for one that is not named
_ALL = -1  # DeepSpeed's number for all nodes or slots


def launch(
    context: typer.Context,
    command: Annotated[str, typer.Argument(help="The script; what follows is its own.")],
    hostfile: Annotated[Path | None, typer.Option(help='Machines: a line "NAME slots=N" for each.')] = None,
    include: Annotated[str, typer.Option("--include", "-i", help='Only these: "worker-1@worker-2:0,2".')] = "",
    exclude: Annotated[str, typer.Option("--exclude", "-e", help="All but these.")] = "",
    num_nodes: Annotated[
        int | None, typer.Option("--num_nodes", "--num-nodes", help="Only the first machines.")
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(
            "--num_gpus",
            "--num-gpus",
            "--num_accelerators",
            help="Ranks on each machine; without a hostfile: on this one.",
        ),
    ] = None,
    master_addr: Annotated[str | None, typer.Option("--master_addr", "--master-addr", help="Where rank 0 is.")] = None,
    master_port: Annotated[
        int, typer.Option("--master_port", "--master-port", help="A free port on that machine.")
    ] = 29500,
    module: Annotated[bool, typer.Option("--module", help="The script is a module's name.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no_python", "--no-python", help="The script is an executable, not Python.")
    ] = False,
    local_rank: Annotated[
        bool,
        typer.Option(
            "--local_rank/--no_local_rank", help="The script gets --local_rank=N, as from DeepSpeed's launcher."
        ),
    ] = False,
    launcher: Annotated[str, typer.Option(help="What starts nodes: ssh, pdsh, slurm or openmpi.")] = "ssh",
    ssh_port: Annotated[int | None, typer.Option("--ssh_port", "--ssh-port", help="ssh's port.")] = None,
    elastic: Annotated[
        str | None, typer.Option(help="MIN:MAX nodes: torchrun starts again with those that there are.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max_restarts", "--max-restarts", help="How often ranks start again.")
    ] = 0,
    enable_each_rank_log: Annotated[
        str | None,
        typer.Option(
            "--enable_each_rank_log",
            "--enable-each-rank-log",
            help="Write the output of each rank to a file in this folder.",
        ),
    ] = None,
    bind_cores_to_rank: Annotated[
        bool, typer.Option("--bind_cores_to_rank", "--bind-cores-to-rank", help="Each rank runs on cores of its own.")
    ] = False,
    bind_core_list: Annotated[
        str | None, typer.Option("--bind_core_list", "--bind-core-list", help='Of these cores: "0-7,16-23".')
    ] = None,
    show: Annotated[bool, typer.Option("--print", help="Show the lines, and start nothing.")] = False,
) -> None:
    """Start a script on ranks: torchrun on each machine of a hostfile, or on this one.

    When a rank dies all nodes end within seconds, and what that rank printed last is shown first. Variables of files (.deepspeed_env, or
    DS_ENV_FILE) and those that begin with NCCL, GLOO, TORCH, OMP, PYTHON, … are passed on.
    """
    if module and no_python:
        raise MeshError("--module and --no_python are given together", hint="give one of them")
    if bind_core_list is not None and not bind_cores_to_rank:
        raise MeshError("--bind_core_list needs --bind_cores_to_rank", hint="give both")
    hosts, whole = _hosts(hostfile, include, exclude, num_nodes, num_gpus)
    alone = len(hosts) == 1 and next(iter(hosts)) in _HERE
    job = Job(
        [command, *context.args],
        hosts,
        master_addr or ("127.0.0.1" if alone else next(iter(hosts))),
        master_port,
        module,
        no_python,
        elastic,
        max_restarts,
        enable_each_rank_log,
        environment.passed_on(os.environ) | environment.of_files(os.environ, Path.home(), Path.cwd()),
        str(Path.cwd()),
        not whole,
        local_rank,
        (bind_core_list or ALL) if bind_cores_to_rank else None,
    )
    own = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, next(iter(hosts.values()))))} if alone and not whole else {}
    lines, losses = carried(job, launcher.lower(), ssh_port), losses_of(job)
    if alone:
        lines = {socket.gethostname(): torchrun(job, 0)}
    of_srun = environment.of_srun(os.environ) if launcher.lower() == "slurm" else {}
    variables = {**job.variables, **own} if alone else of_srun
    if show:
        new = [f"{name}={value}" for name, value in variables.items() if os.environ.get(name) != value]
        for line in lines.values():
            typer.echo(shlex.join([*(["env", *new] if new else []), *line]))
        return
    raise typer.Exit(run(lines, variables, losses=losses))


def _hosts(
    hostfile: Path | None, include: str, exclude: str, num_nodes: int | None, num_gpus: int | None
) -> tuple[Hosts, bool]:
    """Return the chosen slots, and whether they are all slots of each machine."""
    num_nodes, num_gpus = (None if n == _ALL else n for n in (num_nodes, num_gpus))
    if hostfile is None and _USUAL.is_file():
        hostfile = _USUAL
        typer.echo(f"zgraph launch: the machines are those of {hostfile}", err=True)
    if hostfile is None:
        if num_gpus is not None and num_gpus < 1:
            raise MeshError(f"--num_gpus is {num_gpus}", where="--num_gpus", hint="1 and more; left out: all GPUs")
        known: Hosts = {"localhost": list(range(num_gpus or max(_devices(), 1)))}
        if num_nodes not in (None, 1):
            raise MeshError(f"{num_nodes} nodes need a hostfile", where="--num_nodes", hint="--hostfile FILE")
        hosts = chosen(known, include, exclude)
    else:
        known = read_hostfile(hostfile)
        hosts = limited(chosen(known, include, exclude), num_nodes, num_gpus)
    return hosts, all(slots == known[host] for host, slots in hosts.items())


def _devices() -> int:
    """Count the GPUs of this machine. (Only this needs torch.)"""
    import torch

    return torch.cuda.device_count()
