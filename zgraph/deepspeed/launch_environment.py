"""The rank of a process, as the system that started it gives it: torchrun, Slurm, MPI, AzureML, SageMaker.

variables = rank_variables(os.environ)    # {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": …, "MASTER_PORT": …}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from zgraph.errors import MeshError

TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # (torchrun sets them)


class _System(NamedTuple):
    """The environment variables that a system sets for a process."""

    name: str  # the system's name, for errors
    rank: str  # its variable for RANK
    world: str  # its variable for WORLD_SIZE
    local: str  # its variable for LOCAL_RANK
    locals: str  # its variable for the number of ranks on this machine; "": none
    address: tuple[str, ...]  # its variables that name rank 0's host, or a list of hosts that begins with it


_SYSTEMS = (
    _System(
        "MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE", "SM_HOSTS"),
    ),
    _System("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ()),
    _System(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        (),
    ),
    _System(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "",
        ("SLURM_LAUNCH_NODE_IPADDR", "SLURM_STEP_NODELIST"),
    ),
)


def rank_variables(environ: Mapping[str, str], port: int = 29500) -> dict[str, str]:
    """Return torch's variables for this process from those that its launcher has set; {} if no launcher is known.

    `port` is rank 0's, unless MASTER_PORT is set. Raises `MeshError` for several ranks without an address of rank 0.
    """
    if all(name in environ for name in TORCH):
        return {name: environ[name] for name in TORCH} | {"LOCAL_RANK": environ.get("LOCAL_RANK", "0")}
    system = next((s for s in _SYSTEMS if s.rank in environ and s.world in environ), None)
    if system is None:
        return {}
    variables = {
        "RANK": environ[system.rank],
        "WORLD_SIZE": environ[system.world],
        "LOCAL_RANK": environ.get(system.local, "0"),
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }
    address = environ.get("MASTER_ADDR") or next(
        (first_host(environ[name]) for name in system.address if environ.get(name)), None
    )
    if address is None and environ.get(system.locals, "1") != variables["WORLD_SIZE"]:
        raise MeshError(
            f"nothing says where rank 0 of {variables['WORLD_SIZE']} is",
            where="MASTER_ADDR",
            why=f"{system.name} has started this process, and says no address",
            hint="set MASTER_ADDR to the first node's name, for all processes",
        )
    return variables | {"MASTER_ADDR": address or "127.0.0.1"}


def first_host(text: str) -> str:
    """Return the first host of a list as systems write it: "node[003-007,9],other", '["algo-1","algo-2"]',
    "10.0.0.4:6000"."""
    text = text.strip().strip("[]") if text.strip().startswith("[") else text.strip()
    prefix, bracket, rest = text.partition("[")
    if bracket and "," not in prefix:
        number = re.split(r"[-,\]]", rest, maxsplit=1)[0]
        return prefix + number + rest.partition("]")[2].partition(",")[0]
    return text.split(",")[0].strip().strip('"').split(":")[0]
