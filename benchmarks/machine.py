"""What a measurement was made on: every table of results says it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

_SOURCES = (":/", ":(top,exclude)benchmarks/results", ":(top,exclude)docs")


def processor() -> str:
    """The processor's name as the system has it, else its architecture."""
    names = Path("/proc/cpuinfo")
    lines = names.read_text().splitlines() if names.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def conditions() -> str:
    """Date, processor, cores and versions, for a sentence."""
    return (
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {processor()}, {os.cpu_count()} cores, "
        f"torch {importlib.metadata.version('torch')}, Python {platform.python_version()}"
    )


def commit() -> str:
    """The commit that is checked out, with "+" where its sources differ from it."""
    folder = Path(__file__).parent
    name, changes = (
        subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
        for command in (
            ["rev-parse", "--short", "HEAD"],
            ["status", "--porcelain", "--untracked-files=no", "--", *_SOURCES],
        )
    )
    return f"{name}+" if changes else name
