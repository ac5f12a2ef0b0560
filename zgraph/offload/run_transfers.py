"""Runs the operators of `zgraph.program.transfers_to_host`: finds a value's tier, and tracks transfers in flight.

Programs name a tier by the key under which it was opened. A transfer in flight is found by the address that it writes
to: the program holds that memory until the wait, so the address is unique.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from zgraph.errors import OffloadError
from zgraph.offload.files import FileStore, Preflight
from zgraph.offload.host_memory import HostMemory, Wait
from zgraph.plan.offloading import Offload
from zgraph.program import transfers_to_host
from zgraph.program.ops import library

logger = logging.getLogger(__name__)


class Tier(Protocol):
    """A place that stores values outside of the device."""

    def tensor(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...
    def read(self, home: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Wait]: ...
    def write(self, home: torch.Tensor, value: torch.Tensor) -> Wait: ...


class Disk:
    """A `FileStore` as a tier."""

    def __init__(self, store: FileStore) -> None:
        self.store = store

    def tensor(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.store.tensor(shape, stride, dtype)

    def read(self, home: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Wait]:
        reading = self.store.read(home)
        if device.type == "cpu":
            return reading.value, lambda: (reading.wait(), None)[1]
        value = torch.empty_strided(home.shape, home.stride(), dtype=home.dtype, device=device)
        return value, lambda: (value.copy_(reading.wait()), None)[1]

    def write(self, home: torch.Tensor, value: torch.Tensor) -> Wait:
        return self.store.write(home, value if value.device.type == "cpu" else value.cpu()).wait


class Tiers:
    """The tiers that a plan offloads to, open while this lives. `keys` are their names in programs, `preflight` is the
    disk's measurement. `away` bytes are stored there from the first step on. Raises `OffloadError` if the disk has no
    room for them.
    """

    def __init__(self, plan: Offload, device: torch.device, away: int) -> None:
        self.plan = plan
        self.preflight: Preflight | None = None
        self._tiers: dict[str, Tier] = {}
        if "cpu" in plan.tiers() or (plan.tiers() and device.type == "cuda"):  # (updates on the host use it)
            self._tiers["cpu"] = HostMemory(device)
        folder = plan.folder()
        if folder is not None and "nvme" in plan.tiers():
            store = FileStore(folder, checksums=plan.checksums, threads=plan.threads)
            self._tiers["nvme"] = Disk(store)
            self.preflight = store.preflight(away)
            logger.info("offloading: %s", self.preflight)
        self.keys = {kind: register(kind, tier) for kind, tier in self._tiers.items()}

    def of(self, what: str) -> Tier | None:
        """Return the tier of "activations", "optimizer" or "parameters"; None if the plan does not offload them."""
        kind = self.plan.tier(what)
        return None if kind is None else self._tiers[kind]

    def settle(self) -> None:
        """Wait until the host can read what programs have written."""
        host = self._tiers.get("cpu")
        if isinstance(host, HostMemory):
            host.settle()

    def require(self, what: str, size: int) -> None:
        """Raise `OffloadError` if the disk has no room for `size` bytes of this kind."""
        tier = self.of(what)
        if isinstance(tier, Disk):
            tier.store.require(size)

    def reused(self) -> contextlib.AbstractContextManager[None]:
        """Let this thread read from disk into memory of values that it read inside and that were freed since."""
        disk = self._tiers.get("nvme")
        return disk.store.reused() if isinstance(disk, Disk) else contextlib.nullcontext()

    def moved_bytes(self) -> tuple[int, int]:
        """Return the bytes read from disk and written to it so far."""
        disk = self._tiers.get("nvme")
        return (disk.store.read_bytes, disk.store.written_bytes) if isinstance(disk, Disk) else (0, 0)


_open: weakref.WeakValueDictionary[str, Tier] = weakref.WeakValueDictionary()
# by address: the owner (see `apart`), and the function that waits for it
_in_flight: dict[int, tuple[object, Wait]] = {}
_mine = threading.local()


def register(kind: str, tier: Tier) -> str:
    """Open a tier for programs, and return its key: the first of "nvme0", "nvme1", … that is free (so equal code is
    compiled once).
    """
    key = next(k for k in (f"{kind}{i}" for i in itertools.count()) if k not in _open)
    _open[key] = tier
    return key


def tier_of(home: torch.Tensor, device: torch.device) -> Tier | None:
    """Return the tier that moves a tensor between its home and `device`: its disk, else the host's memory for that
    device; None if neither is open.
    """
    tiers = list(_open.values())
    disk = next((t for t in tiers if isinstance(t, Disk) and t.store.holds(home)), None)
    ends = (device, home.device)
    return disk or next((t for t in tiers if isinstance(t, HostMemory) and t.device in ends), None)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Give the transfers that this thread starts inside an owner of their own: programs that fail elsewhere leave them
    alone, and the reverse.
    """
    _mine.owner = object()
    try:
        yield
    finally:
        _mine.owner = None


def in_flight() -> int:
    """Return the number of transfers that nobody has waited for yet."""
    return len(_in_flight)


def _fetch(home: torch.Tensor, device: torch.device) -> torch.Tensor:
    tier = tier_of(home, device)
    if not home.numel():
        return home.to(device, copy=True)
    value, wait = (home.to(device, copy=True), _arrived) if tier is None else tier.read(home, device)
    _flies(value, wait)
    return value


def _offload(x: torch.Tensor, tier: str) -> torch.Tensor:
    open_tier = _open.get(tier)
    if open_tier is None:
        raise OffloadError(
            f"the tier {tier!r} is closed", why="its model is gone", hint="keep the model while it trains"
        )
    home = open_tier.tensor(x.shape, x.stride(), x.dtype)
    if home.numel():
        _flies(home, open_tier.write(home, x))
    return home


def _store(home: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    token = torch.empty(1, dtype=torch.uint8)
    tier = tier_of(home, x.device)
    if tier is None or not home.numel():
        home.copy_(x)
        _flies(token, _arrived)
    else:
        _flies(token, tier.write(home, x))
    return token


def _moved(to: torch.Tensor, of: torch.Tensor) -> None:
    if not to.numel():
        return
    started = _in_flight.pop(to.data_ptr(), None)
    if started is None:
        raise OffloadError(
            "a program waits for a move that nothing started",
            why="the backend copied a value that was on its way",
            hint='use backend="eager", and report this: it is a fault of zgraph or of this torch',
        )
    started[1]()


def _flies(to: torch.Tensor, wait: Wait) -> None:
    _in_flight[to.data_ptr()] = getattr(_mine, "owner", None), wait


def _arrived() -> None:
    """Return at once: the value has arrived already."""


def _abandon() -> None:
    """Wait for the transfers of a program that has failed, and forget them."""
    for to, (owner, wait) in list(_in_flight.items()):
        if owner is getattr(_mine, "owner", None) and _in_flight.pop(to, None) is not None:
            with contextlib.suppress(Exception):
                wait()


transfers_to_host.when_one_fails(_abandon)
_RUNS: dict[str, Callable[..., Any]] = {"fetch": _fetch, "offload": _offload, "store": _store, "moved_": _moved}
for _name, _function in _RUNS.items():
    library.impl(_name, _function, "CompositeExplicitAutograd")
