"""A plugin of pytest's that writes the outcome of each of DeepSpeed's tests as a line of JSON, as soon as it is known."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

_PATH = Path(os.environ["DEEPSPEED_TEST_RESULTS"])


def pytest_configure(config: pytest.Config) -> None:
    # (each test starts processes: let them begin with what all of them load)
    mp.set_forkserver_preload(
        ["torch", "deepspeed", "deepspeed.runtime.engine", "deepspeed.pipe", "torch.distributed.tensor", "unit.common"]
    )


def _write(node: str, outcome: str, why: str = "") -> None:
    with _PATH.open("a") as file:
        file.write(json.dumps({"test": node, "outcome": outcome, "why": why}) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    if call.when == "setup":
        _write(item.nodeid, "begun")
    outcome = yield
    report = outcome.get_result()
    if report.skipped and call.excinfo is not None:
        _write(item.nodeid, "skipped", str(call.excinfo.value)[:300])
    elif report.failed and call.excinfo is not None:
        name = type(call.excinfo.value).__name__
        if name == "Exit":
            _write(item.nodeid, "hung")
            return
        kind = "not here" if name == "NotHere" else "failed"
        _write(item.nodeid, kind, f"{name}: {call.excinfo.value!s}"[:600])
    elif call.when == "call":
        _write(item.nodeid, "passed")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "not collected", str(report.longrepr).strip().splitlines()[-1][:300])
