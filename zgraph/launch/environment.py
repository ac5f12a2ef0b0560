"""Environment variables for ranks on other machines: those of a file, and those of this process with known prefixes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from zgraph.errors import MeshError

PASSED = ("NCCL", "GLOO", "TORCH", "OMP", "MKL", "PYTHON", "UCX", "MV2", "MLFLOW", "ZGRAPH", "LD_LIBRARY_PATH", "PATH")
"""Prefixes of the names that are passed on. (PATH is a whole name.)"""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FILES = (".deepspeed_env",)


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that the ranks get as well."""
    return {k: v for k, v in environ.items() if k == "PATH" or (k.startswith(PASSED[:-1]) and _NAME.fullmatch(k))}


def of_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what srun has to be told of the allocation that it is started in: since Slurm 22.05 a step has one core for a task, whatever
    sbatch was asked for."""
    cores = environ.get("SLURM_CPUS_PER_TASK")
    return {} if cores is None or "SRUN_CPUS_PER_TASK" in environ else {"SRUN_CPUS_PER_TASK": cores}


def of_files(environ: Mapping[str, str], home: Path, here: Path) -> dict[str, str]:
    """Return the variables of the environment files.

    These are the file that DS_ENV_FILE names, or else `.deepspeed_env` in the home folder and in the current one, whose
    values win. Raises `MeshError` if the named file does not exist.
    """
    named = environ.get("DS_ENV_FILE")
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise MeshError("there is no environment file", where=f"DS_ENV_FILE={named}")
        return read(path)
    variables: dict[str, str] = {}
    for folder in (home, here):
        for name in FILES:
            if (folder / name).is_file():
                variables |= read(folder / name)
    return variables


def read(path: Path) -> dict[str, str]:
    """Return the variables of a file's lines NAME=VALUE; `#` begins a comment. Raises `MeshError` with file and
    line."""
    variables: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.removeprefix("export ").partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise MeshError(f"{text!r} is no line of an environment file", where=f"{path}:{number}", hint="NAME=VALUE")
        variables[name.strip()] = value.strip().strip("\"'")
    return variables
