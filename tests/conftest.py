"""For all tests: where their processes find helpers, how often garbage is collected, which shard of them runs, in which order and on how
many workers, and processes over gloo."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import Ranks, measure_disks_briefly
from shards import Shard, longest_first

# (as `pythonpath` in pyproject.toml has it for this process)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parent / "support")]
)

# Schedules, and so what tests see of them, are the same on every machine: nothing is measured but where a test is about that.
os.environ.setdefault("ZGRAPH_HARDWARE", "default")

# What captures cost besides their own work, which is a third of this suite's time otherwise (CONTRIBUTING.md has figures).
# They make and drop many small objects: with Python's own thresholds the search for cycles among them never ends.
gc.set_threshold(20_000, 20, 20)
# pytest listens to loggers that pass nothing on. torch's of structured traces is one, and writes all its graphs where anybody listens.
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", type=Shard.parse, help="k/n: of n parts of the test files, about as long as each other, the kth"
    )


@pytest.hookimpl(trylast=True)  # (when those that a mark leaves out are gone)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard: Shard | None = config.getoption("--shard")
    if shard is not None:
        kept = shard.of(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items)  # (else one worker would end long before another)


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than there are cores: a test that waits for ranks, a compiler or a clock leaves its core to another."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_finish() -> None:
    """Let the collector leave alone what there is by now, and stays: modules, and all tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def brief_disks() -> None:
    measure_disks_briefly()


@pytest.fixture(scope="session")
def kept_ranks() -> Iterator[dict[int, Ranks]]:
    """Ranks that stay between files, by their number: the first capture of a new process takes two or three times as long as the next."""
    kept = {world: Ranks(world) for world in (2, 4)}
    yield kept
    for ranks in kept.values():
        ranks.stop()


@pytest.fixture(scope="module")
def two(kept_ranks: dict[int, Ranks]) -> Iterator[Ranks]:
    yield kept_ranks[2]
    kept_ranks[2].renew()


@pytest.fixture(scope="module")
def four(kept_ranks: dict[int, Ranks]) -> Iterator[Ranks]:
    yield kept_ranks[4]
    kept_ranks[4].renew()


@pytest.fixture(scope="module")
def no_group_left() -> Iterator[None]:
    """DeepSpeed's `initialize` makes a group of this process alone, which no other file expects."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def deepspeeds() -> Iterator[Ranks]:
    """Ranks for DeepSpeed, which leaves groups and hooks behind: none of zgraph's. They stay between files, as it takes seconds to import."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install deepspeed")
    with Ranks(2) as ranks:
        yield ranks
