"""Stores tensors in a file on NVMe, read and written past the page cache by several threads, as in ZeRO-Infinity
(Rajbhandari et al., 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", section 6.3).

A store is one file without a name, so nothing is left behind, however the process ends. A tensor is a slot of the file,
aligned to blocks and mapped: it can be used like any other, through the page cache. `read` and `write` move whole
tensors by O_DIRECT instead, straight between the file and the tensor's memory. Linux keeps both views of the file the
same as long as they are not used at the same time.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import math
import mmap
import os
import resource
import tempfile
import threading
import time
import weakref
import zlib
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, cast

import torch

from zgraph.errors import OffloadError
from zgraph.offload.disk_buffers import BLOCK, PIECE, Landing, Staging, aligned

__all__ = ["Backend", "FileStore", "Preflight", "Reading", "Writing"]

TRIAL = 64 * 2**20  # most bytes that preflight writes and reads
# bytes, tried in order: torch's CPU tensors have 64; what suffices depends on the device
MEMORY_ALIGNMENTS = (64, 512, BLOCK)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Backend:
    """The system calls of a store, made by several threads at once. Another backend can replace them: io_uring, or
    injected faults.
    """

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into `buffers`, and return the number of bytes read, which may be fewer than asked for. Raises
        OSError.
        """
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)


@dataclass(frozen=True)
class Preflight:
    """What a folder's disk can do."""

    folder: Path  # the folder that was measured
    free_bytes: int  # free on its disk
    direct: bool  # whether O_DIRECT works
    alignment: int  # of offsets and sizes in the file, in bytes
    read_rate: float  # bytes per second
    write_rate: float  # bytes per second


class Reading:
    """A tensor that is being read. `value` exists from the start, and is filled when `wait` returns."""

    def __init__(self, job: _Job, value: torch.Tensor) -> None:
        self._job = job
        self.value = value

    def done(self) -> bool:
        return self._job.ended.is_set()

    def wait(self) -> torch.Tensor:
        """Wait for the read, and return the value. Raises `OffloadError`, each time, if it could not be read."""
        self._job.wait()
        return self.value


class Writing:
    """A tensor that is being written."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    def done(self) -> bool:
        return self._job.ended.is_set()

    def wait(self) -> None:
        """Wait for the write. Raises `OffloadError`, each time, if the tensor could not be written."""
        self._job.wait()


class FileStore:
    """A store of tensors in a file without a name in `folder`, which is made if need be. Raises `OffloadError` if that
    fails.

    `checksums` keeps a CRC-32 of each piece that is written, and compares it when the piece is read. `threads` move
    pieces of 8 MiB. Values whose memory is not aligned go through buffers of `staging_bytes` in all. Any thread may
    call any method.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        checksums: bool = False,
        threads: int = 4,
        staging_bytes: int = 64 * 2**20,
        files: Backend | None = None,
    ) -> None:
        self.folder = Path(folder).expanduser()
        self._checksums = checksums
        self._files = files or Backend()
        self._staging = Staging(staging_bytes, threads)
        self._landing = Landing()
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self._under_way = 0
        self._moved = {"read": 0, "write": 0}
        self._space = _Space()
        self._held = 0
        self._slots: dict[int, _Slot] = {}  # by the address of the mapping
        self._dead: deque[_Slot] = deque()  # left by finalizers, which run anywhere and so take no lock

        self._fd = _anonymous(self.folder)
        self._direct_fd, self._alignment = self._try_direct()
        self.direct = self._direct_fd != self._fd
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="zgraph-files")
        self._shut = weakref.finalize(self, _shut, self._pool, {self._fd, self._direct_fd})

    # Slots

    def tensor(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a CPU tensor whose storage is a slot of the file, uninitialised. The slot is freed with the tensor.
        Raises `OffloadError` if the disk has no room, or if strides leave gaps or overlap.
        """
        if not _dense(shape, stride):
            raise OffloadError(
                "only dense tensors can lie in a file",
                where=str(self.folder),
                why=f"shape {tuple(shape)} with strides {tuple(stride)} has gaps or overlaps",
            )
        with torch.inference_mode(False):
            if 0 in shape:
                return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu")
            count = math.prod(shape)
            nbytes = count * dtype.itemsize
            with self._lock:
                self._check_open()
                slot = self._allocate(nbytes)
                try:
                    memory = _mapped(self._fd, slot.offset, slot.length)
                except OSError as error:
                    self._dead.append(slot)
                    raise self._fault("map", error, slot.offset, slot.length) from error
                slot.base = ctypes.addressof(memory)
                self._slots[slot.base] = slot
                weakref.finalize(memory, _unmap, slot, self._dead).atexit = False
            flat = torch.frombuffer(memory, dtype=dtype, count=count)
            return flat.as_strided(tuple(shape), tuple(stride))

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._slot_of(tensor) is not None

    @property
    def held_bytes(self) -> int:
        """The bytes of the slots in use, in whole blocks."""
        with self._lock:
            self._collect()
            return self._held

    @property
    def file_bytes(self) -> int:
        """The bytes of the file: the most that slots ever took."""
        return self._space.end

    def _slot_of(self, tensor: torch.Tensor) -> _Slot | None:
        if tensor.device.type != "cpu":
            return None
        slot = self._slots.get(tensor.untyped_storage().data_ptr())
        return slot if slot is not None and slot.alive else None

    def _whole(self, tensor: torch.Tensor) -> _Slot:
        slot = self._slot_of(tensor)
        if slot is None:
            why = "it is no tensor of this store"
        elif tensor.nbytes != slot.nbytes or not _dense(tensor.shape, tensor.stride()):
            why = "it is a part of a tensor of this store, and only whole ones are read and written"
        else:
            return slot
        raise OffloadError(
            f"a tensor of shape {tuple(tensor.shape)} can't be moved",
            where=str(self.folder),
            why=why,
            hint="make it by FileStore.tensor, or use its mapping: it can be indexed like any tensor",
        )

    def _allocate(self, nbytes: int) -> _Slot:
        self._collect()
        length = _up(nbytes)
        offset, end = self._space.find(length)
        if end > self._space.end:
            try:
                self._files.fallocate(self._fd, self._space.end, end - self._space.end)
            except OSError as error:
                with suppress(OSError):  # (some of it may have been allocated)
                    os.ftruncate(self._fd, self._space.end)
                raise self._fault("allocate", error, offset, length) from error
        self._space.take(offset, length)
        self._held += length
        return _Slot(offset, length, nbytes)

    def _collect(self) -> None:
        while self._dead:
            slot = self._dead.popleft()
            self._space.give(slot.offset, slot.length)
            self._held -= slot.length
            if self._slots.get(slot.base) is slot:  # (the address may have been given to another slot since)
                del self._slots[slot.base]

    # Transfers

    def read(self, tensor: torch.Tensor) -> Reading:
        """Start to read a tensor of this store, after pending writes to it. The value has its shape, strides and dtype,
        in memory of torch's own allocator, aligned to blocks.
        """
        return self._read(tensor, counted=True)

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> Writing:
        """Start to write `value` to a tensor of this store, after its pending reads and writes. `value` is a CPU tensor
        of the same shape and dtype, and must not change until the write has been waited for.
        """
        return self._write(tensor, value, counted=True)

    def reused(self) -> AbstractContextManager[None]:
        """Let this thread read into memory of values that it read inside and that were freed since."""
        return self._landing.reused()

    @property
    def read_bytes(self) -> int:
        """The bytes of tensors read so far."""
        return self._moved["read"]

    @property
    def written_bytes(self) -> int:
        return self._moved["write"]

    @property
    def staging_peak(self) -> int:
        """The most bytes of staging buffers that existed at once."""
        return self._staging.peak

    def _read(self, tensor: torch.Tensor, *, counted: bool) -> Reading:
        if not tensor.numel():
            return Reading(_Job.nothing(), torch.empty_like(tensor))
        slot = self._whole(tensor)
        memory = self._landing.take(slot.length)
        value = memory[: slot.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        job = _Job("read", slot, tensor, _bytes(memory), _version(tensor), counted=counted)
        self._start(job, [slot])
        return Reading(job, value)

    def _write(self, tensor: torch.Tensor, value: torch.Tensor, *, counted: bool) -> Writing:
        if value.shape != tensor.shape or value.dtype != tensor.dtype or value.device.type != "cpu":
            raise OffloadError(
                "a value does not fit the tensor it is written to",
                where=str(self.folder),
                why=f"it is {_described(value)}, the tensor is {_described(tensor)}",
            )
        if not tensor.numel():
            return Writing(_Job.nothing())
        slot = self._whole(tensor)
        source = self._slot_of(value)
        value = value.detach()
        if _layout(value) != _layout(tensor) or value.is_conj() or value.is_neg():
            writer = None if source is None else source.writer
            if writer is not None:  # (the copy below reads it)
                writer.ended.wait()
            source = None
            value = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").copy_(value)
        flat = value.as_strided((value.numel(),), (1,)).view(torch.uint8)
        job = _Job("write", slot, (tensor, flat), _bytes(flat), _version(tensor), counted=counted)
        job.address = flat.data_ptr()
        # A direct write from a mapping of the same file would fault pages in while the file is locked.
        job.straight = not self.direct or (source is None and job.address % self._alignment == 0)
        self._start(job, [slot] if source is None else [slot, source])
        return Writing(job)

    def _start(self, job: _Job, slots: list[_Slot]) -> None:
        """Start a job. Jobs take effect in the order of calls: a write waits for all pending jobs of its slot, a read
        for pending writes. `slots[0]` is read or written by the job; another slot is the source of a write.
        """
        with self._lock:
            self._check_open()
            blockers = {slot.writer for slot in slots if slot.writer is not None}
            if job.kind == "write":
                blockers |= slots[0].readers
                slots[0].writer = job
            for slot in slots if job.kind == "read" else slots[1:]:
                slot.readers.add(job)
            job.slots = slots
            job.blockers = len(blockers)
            for blocker in blockers:
                blocker.followers.append(job)
            self._under_way += 1
            if not blockers:
                self._submit(job)

    def _submit(self, job: _Job) -> None:
        for piece in range(job.pieces):
            try:
                self._pool.submit(self._run, job, piece)
            except RuntimeError as error:  # (the interpreter is exiting)
                self._ended(job, job.pieces - piece, OffloadError(f"a {job.kind} can't be started", why=str(error)))
                return

    def _run(self, job: _Job, piece: int) -> None:
        fault: OffloadError | None = None
        try:
            if job.kind == "read":
                self._read_piece(job, piece)
            else:
                self._write_piece(job, piece)
        except OffloadError as error:
            fault = error
        except Exception as error:
            fault = OffloadError(f"a {job.kind} failed", where=str(self.folder), why=repr(error))
        if fault is not None:
            for each in (fault, fault.__cause__):  # (frames would keep tensors alive)
                if each is not None:
                    each.__traceback__ = None
            fault.__context__ = None
        self._ended(job, 1, fault)

    def _ended(self, job: _Job, pieces: int, fault: OffloadError | None) -> None:
        with self._lock:
            job.error = job.error or fault
            job.left -= pieces
            if job.left:
                return
            slot = job.slots[0]
            if job.kind == "write":
                slot.broken = job.error is not None
                slot.failed = job.version
                slot.sums = job.sums if self._checksums and job.error is None and job.version is not None else None
                slot.version = job.version
                if slot.writer is job:
                    slot.writer = None
            for each in job.slots:
                each.readers.discard(job)
            if job.error is None and job.counted:
                self._moved[job.kind] += slot.nbytes
            for follower in job.followers:
                follower.blockers -= 1
                if not follower.blockers:
                    self._submit(follower)
            job.forget()
            self._under_way -= 1
            self._idle.notify_all()
            job.ended.set()

    def _read_piece(self, job: _Job, piece: int) -> None:
        slot, begin = job.slots[0], piece * PIECE
        # (with another version it was overwritten since, as a tensor)
        if slot.broken and (job.version is None or job.version == slot.failed):
            raise OffloadError(
                "a tensor can't be read",
                where=str(self.folder),
                why=f"its last write, to offset {slot.offset} of the file, failed",
                hint="write it again",
            )
        part = job.memory[begin : begin + PIECE]  # (whole blocks)
        self._move(job, part, begin)
        if slot.sums is not None and job.version == slot.version:
            payload = part[: slot.nbytes - begin]
            if zlib.crc32(payload) != slot.sums[piece]:
                raise OffloadError(
                    "a tensor on disk is damaged",
                    where=str(self.folder),
                    why=f"{len(payload)} bytes at offset {slot.offset + begin} of the file are not what was written there",
                    hint="was it changed in a way that torch does not count (.data, numpy)? Then leave checksums out; else the disk, its "
                    "cable or its driver loses data: see the kernel's log, use another folder",
                )

    def _write_piece(self, job: _Job, piece: int) -> None:
        begin = piece * PIECE
        part = job.memory[begin : begin + PIECE]
        if self._checksums:
            job.sums[piece] = zlib.crc32(part)
        straight = 0
        if job.straight:
            straight = len(part) // BLOCK * BLOCK if self.direct else len(part)
            self._move(job, part[:straight], begin)
        if straight < len(part):
            with self._staging.buffer() as buffer:
                view, step = buffer.view, len(buffer.view)
                for at in range(straight, len(part), step):
                    count = min(step, len(part) - at)
                    ctypes.memmove(buffer.address, job.address + begin + at, count)  # (without the interpreter's lock)
                    view[count : _up(count)] = bytes(_up(count) - count)
                    self._move(job, view[: _up(count)], begin + at)

    def _move(self, job: _Job, memory: memoryview, begin: int) -> None:
        """Move all of `memory` to, or from, `begin` bytes after the slot's start."""
        slot, fd, done = job.slots[0], self._direct_fd, 0
        call = self._files.preadv if job.kind == "read" else self._files.pwritev
        while done < len(memory):
            offset = slot.offset + begin + done
            try:
                count = call(fd, [memory[done:]], offset)
            except OSError as error:
                raise self._fault(job.kind, error, offset, len(memory) - done) from error
            if count <= 0:
                raise OffloadError(
                    f"short {job.kind} of a tensor",
                    where=str(self.folder),
                    why=f"of {len(memory)} bytes at offset {slot.offset + begin} of the file (a slot at {slot.offset}), "
                    f"only {done} were to be had",
                    hint="the file was cut or its disk fails: see the kernel's log",
                )
            done += count
            if count % BLOCK:
                fd = self._fd  # O_DIRECT takes whole blocks only

    def _fault(self, operation: str, error: OSError, offset: int, length: int) -> OffloadError:
        why, hint = f"{length} bytes at offset {offset} of the file: {error.strerror or error}", None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why += f"; {_free(self.folder)} bytes are free"
            hint = "make room, or choose another folder"
        elif error.errno == errno.EFBIG:
            hint = "raise the largest size of a file: ulimit -f"
        return OffloadError(f"can't {operation} a tensor in a file", where=str(self.folder), why=why, hint=hint)

    # The store as a whole

    def preflight(self, needed: int) -> Preflight:
        """Measure what the folder's disk can do by writing and reading up to 64 MiB, which are not counted in
        `read_bytes` and `written_bytes`. Raises what `require` does.
        """
        free, limit = self.require(needed)
        room = min(TRIAL, free // 4, limit)
        size = max(room // BLOCK * BLOCK, BLOCK)
        sent = aligned(size).random_(generator=torch.Generator("cpu"))
        slot = self.tensor((size,), (1,), torch.uint8)
        start = time.perf_counter()
        self._write(slot, sent, counted=False).wait()
        written = time.perf_counter()
        got = self._read(slot, counted=False).wait()
        end = time.perf_counter()
        if not torch.equal(sent, got):
            raise OffloadError("a folder does not give back what is written there", where=str(self.folder))
        return Preflight(self.folder, free, self.direct, BLOCK, size / (end - written), size / (written - start))

    def require(self, needed: int) -> tuple[int, int]:
        """Return (the free bytes, the bytes by which the file may still grow). Raises `OffloadError` if the disk has no
        room for `needed` more bytes, or they would make the file larger than this process may.
        """
        free = _free(self.folder)
        if free < needed:
            raise OffloadError(
                "the disk has no room for what is to be offloaded",
                where=str(self.folder),
                why=f"{needed} bytes are needed, {free} are free",
                hint="make room, choose another folder, or offload less",
            )
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit == resource.RLIM_INFINITY:
            return free, free
        if limit < self.file_bytes + needed:
            raise OffloadError(
                "this process may not make a file as large as what is to be offloaded",
                where=str(self.folder),
                why=f"RLIMIT_FSIZE is {limit} bytes, the file has {self.file_bytes} and {needed} more are needed",
                hint="raise the limit: ulimit -f unlimited",
            )
        return free, limit - self.file_bytes

    def close(self) -> None:
        """Wait for pending reads and writes, and close the file. Tensors can still be used, but not read or written
        here.
        """
        with self._lock:
            self._closed = True
            self._idle.wait_for(lambda: not self._under_way)
        self._pool.shutdown()
        self._shut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise OffloadError("a store of files is used after it was closed", where=str(self.folder))

    def _try_direct(self) -> tuple[int, int]:
        """Return (a descriptor with O_DIRECT, the alignment in memory that it needs), found by trying; the plain
        descriptor and 1 if O_DIRECT does not work.
        """
        try:
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_DIRECT)
        except OSError:
            return self._fd, 1
        memory = aligned(4 * BLOCK)
        for alignment in MEMORY_ALIGNMENTS:
            sent, got = (_bytes(memory[at : at + BLOCK]) for at in (alignment, 2 * BLOCK + alignment))
            sent[:], got[:] = bytes([alignment % 251] * BLOCK), bytes(BLOCK)
            with suppress(OSError):
                wrote = self._files.pwritev(fd, [sent], 0)
                if wrote == self._files.preadv(fd, [got], 0) == BLOCK and sent == got:
                    return fd, alignment
        os.close(fd)
        return self._fd, 1


@dataclass(eq=False)
class _Slot:
    """A range of the file, and what is known of its content."""

    offset: int  # bytes from the file's start
    length: int  # bytes, in whole blocks
    nbytes: int  # bytes of the tensor
    base: int = 0  # address of its mapping
    alive: bool = True  # whether its tensor still lives
    writer: _Job | None = None  # the last write, while it is pending
    readers: set[_Job] = field(default_factory=set)  # pending reads
    broken: bool = False  # whether its last write failed
    failed: int | None = None  # the tensor's version at its last write
    sums: list[int] | None = None  # CRC-32 of each piece, as written
    version: int | None = None  # the tensor's version as written; a change through the mapping increments the tensor's


class _Job:
    """One tensor being read or written. What it holds is released when it ends; until then nobody else gets its
    slot.
    """

    def __init__(
        self, kind: str, slot: _Slot, keep: object, memory: memoryview, version: int | None, *, counted: bool
    ) -> None:
        self.kind = kind
        self.keep: object = keep
        self.memory = memory
        self.version = version
        self.counted = counted
        self.address = 0  # address of `memory`, for a write
        self.straight = True  # whether a write goes from `memory` to the file without a staging buffer
        self.slots: list[_Slot] = []
        self.pieces = self.left = -(-slot.nbytes // PIECE)
        self.sums = [0] * self.pieces
        self.blockers = 0
        self.followers: list[_Job] = []
        self.error: OffloadError | None = None
        self.ended = threading.Event()

    @classmethod
    def nothing(cls) -> _Job:
        job = cls("read", _Slot(0, 0, 0), None, memoryview(b""), None, counted=False)
        job.ended.set()
        return job

    def forget(self) -> None:
        self.keep, self.memory, self.followers, self.slots = None, memoryview(b""), [], []

    def wait(self) -> None:
        self.ended.wait()
        if self.error is not None:
            raise copy.copy(self.error) from self.error.__cause__


class _Space:
    """The free ranges of the file: best fit, neighbours joined."""

    def __init__(self) -> None:
        self.end = 0
        self.free: list[tuple[int, int]] = []  # (offset, length), by offset

    def find(self, length: int) -> tuple[int, int]:
        """Return (an offset at which a range of this length is free, the end of the file once it is taken)."""
        fitting = [(size, offset) for offset, size in self.free if size >= length]
        if fitting:
            return min(fitting)[1], self.end
        offset = self.end
        if self.free and sum(self.free[-1]) == self.end:
            offset = self.free[-1][0]
        return offset, offset + length

    def take(self, offset: int, length: int) -> None:
        at = bisect(self.free, (offset,))
        if at < len(self.free) and self.free[at][0] == offset:
            size = self.free.pop(at)[1]
            if size > length:
                self.free.insert(at, (offset + length, size - length))
        self.end = max(self.end, offset + length)

    def give(self, offset: int, length: int) -> None:
        at = bisect(self.free, (offset,))
        if at < len(self.free) and self.free[at][0] == offset + length:
            length += self.free.pop(at)[1]
        if at and sum(self.free[at - 1]) == offset:
            offset, before = self.free.pop(at - 1)
            length, at = length + before, at - 1
        self.free.insert(at, (offset, length))


# Files


def _anonymous(folder: Path) -> int:
    """Return a descriptor of a new file in `folder` that has no name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
        fd, name = tempfile.mkstemp(dir=folder)  # (a file system without O_TMPFILE)
        os.unlink(name)
        return fd
    except OSError as error:
        raise OffloadError(
            "tensors can't be kept in this folder",
            where=str(folder),
            why=error.strerror or str(error),
            hint="name a folder on a local disk that this process may write to",
        ) from error


def _free(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def _shut(pool: ThreadPoolExecutor, descriptors: set[int]) -> None:
    pool.shutdown(wait=False)
    for fd in descriptors:
        os.close(fd)


# Memory


def _mapped(fd: int, offset: int, length: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Map a range of the file to memory. (Python's mmap would keep a descriptor for each, and descriptors are few.)"""
    address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return (ctypes.c_ubyte * length).from_address(address)


def _unmap(slot: _Slot, dead: deque[_Slot]) -> None:
    slot.alive = False
    _libc.munmap(slot.base, slot.length)
    dead.append(slot)


def _bytes(memory: torch.Tensor) -> memoryview:
    return memoryview(cast("bytearray", memory.numpy()))


def _up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _layout(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected and 0 not in shape:
                return False
            expected *= size
    return True


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device.type}"
