"""Save a checkpoint of all ranks at one step, at once or beside the next steps. It counts as a checkpoint only when it
is complete."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

from zgraph.checkpoint import folder, state
from zgraph.checkpoint.loading import load
from zgraph.checkpoint.tensorfile import checksum, data_of
from zgraph.checkpoint.user_values import KIND, TENSORS, encode
from zgraph.checkpoint.write_native import Writer
from zgraph.errors import CheckpointError
from zgraph.ranks import progress
from zgraph.ranks.agreement import Agreement
from zgraph.torch_compat import dtensors
from zgraph.torch_compat.dtensors import local_of
from zgraph.update.resume import Known, Last

if TYPE_CHECKING:
    from zgraph.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

CLIENT = "client"


@dataclass
class Snapshot:
    """All that this rank writes of one checkpoint. Rank 0 also writes what all ranks have in common."""

    tensors: dict[str, torch.Tensor]  # this rank's parts of tensors, by name in the checkpoint
    known: Known  # what is known of the run besides tensors
    client: dict[str, Any]  # what the user added, encoded, by key
    sums: dict[str, str]  # a checksum of each value in `client`, by key
    own: dict[str, Any]  # this rank's alone: random states, extra states, residuals, local steps


class Staging:
    """Host memory that tensors are copied into, reused by the next save; pinned for tensors on an accelerator."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy all tensors into host memory and return the copies, complete when this returns."""
        copies: dict[str, torch.Tensor] = {}
        devices = set()
        for name, tensor in tensors.items():
            local = local_of(tensor)
            buffer = self._held.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype is not local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._held[name] = buffer
            buffer.copy_(local, non_blocking=local.is_cuda)
            if local.is_cuda:
                devices.add(local.device)
            copies[name] = dtensors.dtensor(buffer, tensor._spec) if isinstance(tensor, DTensor) else buffer
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        for name in self._held.keys() - tensors.keys():
            del self._held[name]
        return copies


class Saver:
    """Saves the checkpoints of one model, at most one at a time. `last` is the newest that is complete, or that was
    loaded."""

    def __init__(self) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "zgraph-checkpoint")
        weakref.finalize(self, self._threads.shutdown, wait=False)
        self.last: Last | None = None
        self._running: concurrent.futures.Future[None] | None = None
        self._saved: Last | None = None  # what `last` becomes when the running save succeeds
        self._staging = Staging()
        self._aside: Agreement | None = None  # (for collectives beside those of steps)

    def wait(self) -> None:
        """Wait for the save in the background, if there is one. Raises its error, on every rank."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
            self.last = self._saved

    def load_last(self, runtime: Runtime) -> dict[str, Any]:
        """Load the last checkpoint and return what the user added to it. All ranks must call it."""
        assert self.last is not None
        return load(runtime, self.last.folder, None, fallback=False, optimizer=self.last.optimizer, client_state=None)

    def save(
        self,
        runtime: Runtime,
        path: Path,
        tag: str | None,
        client_state: dict[str, Any] | None,
        *,
        async_: bool,
        keep_last: int | None,
        frozen: bool,
    ) -> str:
        """Save a checkpoint and return its tag; see `zgraph.api.handle.Handle.save_checkpoint`."""
        self.wait()
        agreement = runtime.everyone
        runtime.updater.settle()
        chosen = f"step{runtime.updates}" if tag is None else tag
        agreement.vote("a checkpoint", f"{path} {chosen} {async_} {keep_last} {frozen}")
        folder.checked_tag(chosen)
        if keep_last is not None and keep_last < 1:
            raise CheckpointError(
                f"keep_last is {keep_last}, and must be at least 1", why="the checkpoint that is saved is one to keep"
            )
        agreement.relax()  # (disks differ)
        taken, sums = agreement.exchange(
            "what is to be saved",
            lambda: snapshot(runtime, client_state, frozen),
            lambda taken: taken.sums,
            _refused("save"),
        )
        share_client(taken, sums, first=agreement.first())
        if not async_:
            write(agreement, path, chosen, taken, keep_last)
            self.last = Last(path / chosen)
            return chosen
        if self._aside is None:
            self._aside = Agreement(agreement.mesh)
        taken.tensors = self._staging.copy(taken.tensors)
        self._saved = Last(path / chosen)
        self._running = self._threads.submit(write_aside, self._aside, path, chosen, taken, keep_last)
        self._running.add_done_callback(_tell)
        return chosen


def snapshot(runtime: Runtime, client_state: dict[str, Any] | None, frozen: bool) -> Snapshot:
    """Collect what this rank has to save now, with frozen weights or without them. Raises `CheckpointError` and
    `StepError`."""
    runtime.shards.refresh()
    runtime.updater.refuse_unusable()
    runtime.refuse_unset()
    state.refuse_unsaved(runtime)
    left_out = [] if frozen else state.frozen_of(runtime)
    tensors = state.tensors_of(runtime, left_out)
    client = {} if client_state is None else client_state
    if not isinstance(client, dict) or not all(isinstance(k, str) for k in client):
        raise CheckpointError("client_state is no dict with names as keys", hint="give a dict")
    added: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        name = f"{CLIENT}.{runtime.everyone.rank()}.{len(added)}"
        added[name] = tensor.cpu().contiguous().clone()
        return name

    given = {k: {"value": encode(v, keep, f"client_state[{k!r}]")} for k, v in client.items()}
    extra = state.extra_states(runtime.module)
    own = {
        "random": state.random_states(runtime.device),
        "extra": encode(extra, keep, "get_extra_state()") if extra else {},
    }
    residuals = runtime.updater.residuals.state()
    if residuals is not None:
        own["residuals"] = encode(residuals, keep, "the residuals")
    if local := runtime.updater.rounds.own():
        own["local"] = encode(local, keep, "the weights of local steps")
    if runtime.held is not None:  # (a stage's ranks run programs of their own)
        own["programs"] = dict(runtime.votes.digests)
    tensors |= added
    sums = {key: _digest(value, tensors) for key, value in given.items()}
    return Snapshot(tensors, state.known_of(runtime, left_out), given, sums, own)


def share_client(taken: Snapshot, sums: Sequence[dict[str, str]], *, first: bool) -> None:
    """Leave values that are equal on every rank to the manifest, and move the others to each rank's own state. `sums`:
    the checksums of all ranks."""
    given = taken.client
    alike = {k for k in given if all(view.get(k) == taken.sums[k] for view in sums)}
    taken.client = {k: v for k, v in given.items() if k in alike}
    taken.own["client"] = {k: v for k, v in given.items() if k not in alike}
    if not first:
        for key in alike:
            for name in _names(given[key]):
                del taken.tensors[name]


def _digest(value: Any, tensors: dict[str, torch.Tensor]) -> str:
    """Return a checksum of an encoded value that does not depend on the names of its tensors."""
    names = _names(value)
    text = json.dumps(value, sort_keys=True)
    for number, name in enumerate(names):
        text = text.replace(json.dumps(name), f'"tensor {number}"')
    parts = [f"{tensors[n].dtype}{list(tensors[n].shape)} {checksum(data_of(tensors[n]))}" for n in names]
    return checksum("\n".join([text, *parts]).encode())


def _names(value: Any) -> list[str]:
    if isinstance(value, dict):
        here = [value["name"]] if value.get(KIND) in TENSORS else []
        return here or [n for v in value.values() for n in _names(v)]
    return [n for v in value for n in _names(v)] if isinstance(value, list) else []


def write(agreement: Agreement, path: Path, tag: str, taken: Snapshot, keep_last: int | None) -> None:
    """Write a checkpoint into a partial folder, and rename that to its final name. Raises `CheckpointError` on every
    rank, and leaves nothing then."""
    partial = folder.partial_of(path, tag)
    writer = Writer(partial, taken.known, taken.client, json.dumps(taken.own, separators=(",", ":")).encode())
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    begun: list[folder.Unfinished] = []

    def begin() -> None:
        if agreement.first():
            try:
                begun.append(folder.begin(path, tag))
            except OSError as error:
                raise failed(path, error) from error

    def attempt() -> None:
        try:
            save_distributed(
                taken.tensors,
                storage_writer=writer,
                planner=planner,
                process_group=agreement.group,
                no_dist=agreement.group is None,
            )
            for unfinished in begun:
                unfinished.commit()
                if keep_last is not None:
                    _retain(path, keep_last)
        except (Exception, CheckpointException) as error:  # (torch's is no Exception)
            raise failed(path, error) from error

    try:
        agreement.together("the folder of the checkpoint", begin, _refused("save"))
        agreement.together("the folder of the checkpoint", lambda: _seen(partial), _refused("save"))
        agreement.together("the checkpoint", attempt, _refused("save"))
    except Exception:
        for unfinished in begun:
            unfinished.discard()
        raise


def write_aside(*given: Any) -> None:
    """Run `write` in a thread beside the steps: its progress is not reported as the rank's."""
    with progress.aside():
        write(*given)


def _tell(running: concurrent.futures.Future[None]) -> None:
    """Log the error of a background save at once, because the process may end before anyone calls `wait`."""
    if (error := running.exception()) is not None:
        logger.error("a checkpoint in the background could not be saved: %s", error)


def _retain(path: Path, keep_last: int) -> None:
    try:
        folder.retain(path, keep_last)
    except OSError as error:
        logger.warning("older checkpoints in %s could not be removed: %s", path, error)


def failed(path: Path, error: BaseException) -> CheckpointError:
    """Return the error for a save that failed; from torch's `CheckpointException` it takes the rank and the cause."""
    where = f"{path}"
    if isinstance(error, CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        where += f", on rank {rank}"
    why = f"{type(error).__name__}: {error}"
    hint = "the checkpoints before are as they were; make room or choose another folder, and save again"
    return CheckpointError("the checkpoint could not be saved", where=where, why=why, hint=hint)


def _refused(what: str) -> Callable[[int, str], CheckpointError]:
    return lambda rank, said: CheckpointError(f"rank {rank} could not {what} the checkpoint", why=said)


def _seen(partial: Path) -> None:
    if not partial.is_dir():
        raise CheckpointError(
            "this rank does not see the checkpoint's folder",
            where=str(partial),
            why="rank 0 has made it, on a disk that this rank does not share",
            hint="a folder on a file system that all ranks share",
        )


# (torch warns of this at every save and load without a process group, which is intended here.)
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
