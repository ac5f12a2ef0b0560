"""Tensors in files: what is written comes back bit for bit, in the order of the calls, or an error says why not."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from zgraph.errors import OffloadError
from zgraph.offload import files as files_module
from zgraph.offload.files import BLOCK, PIECE, Backend, FileStore

MIB = 2**20
SMALL = 2**16  # bytes of a piece where many are wanted
ROOT = Path(__file__).parents[2]


class Faulty(Backend):
    """Fails at the n-th call of a kind once it is armed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.faults: dict[str, object] = {}
        self.calls = {"preadv": 0, "pwritev": 0, "fallocate": 0}

    def arm(self, call: str, fault: object, at: int = 1) -> None:
        self.calls[call] = 0
        self.faults[call] = (at, fault)

    def fault(self, call: str) -> object:
        with self.lock:
            self.calls[call] += 1
            at, fault = self.faults.get(call, (0, None))
            if fault is None or self.calls[call] != at:
                return None
            del self.faults[call]
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        return fault

    def preadv(self, fd, buffers, offset):
        fault = self.fault("preadv")
        if fault == "nothing":
            return 0
        if fault == "a part":
            return super().preadv(fd, [buffers[0][: len(buffers[0]) // 2 // BLOCK * BLOCK]], offset)
        count = super().preadv(fd, buffers, offset)
        if fault == "a flipped bit":
            buffers[0][50] ^= 4
        return count

    def pwritev(self, fd, buffers, offset):
        fault = self.fault("pwritev")
        if fault == "nothing":
            return 0
        return super().pwritev(fd, buffers, offset)

    def fallocate(self, fd, offset, length):
        if self.fault("fallocate") == "half":
            super().fallocate(fd, offset, length // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().fallocate(fd, offset, length)


class Gated(Backend):
    """Writes wait until `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.log: list[tuple[str, int]] = []

    def preadv(self, fd, buffers, offset):
        self.log.append(("read", offset))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        assert self.open.wait(10)
        self.log.append(("write", offset))
        return super().pwritev(fd, buffers, offset)


@pytest.fixture(params=["direct", "buffered"])
def store(request, tmp_path, monkeypatch):
    if request.param == "buffered":
        refuse_direct(monkeypatch)
    with FileStore(tmp_path / "tier", checksums=True) as made:
        if request.param == "direct" and not made.direct:
            pytest.skip("the file system of temporary folders has no O_DIRECT")
        assert made.direct == (request.param == "direct")
        yield made


def refuse_direct(monkeypatch) -> None:
    real = os.open

    def refusing(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


def flat(store: FileStore, elements: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return store.tensor((elements,), (1,), dtype)


def noise(elements: int, seed: int = 0) -> torch.Tensor:
    return torch.empty(elements, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(seed))


def values(shape, stride, dtype) -> torch.Tensor:
    """Every bit pattern that a dtype may have, NaNs among them."""
    made = torch.empty_strided(shape, stride, dtype=dtype)
    bits = noise(made.nbytes)
    if dtype == torch.bool:
        bits &= 1
    if made.numel():
        made.as_strided((made.numel(),), (1,)).view(torch.uint8).copy_(bits)
    return made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)


# What comes back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((), ()),
        ((1,), (1,)),
        ((BLOCK,), (1,)),
        ((33, 129), (129, 1)),
        ((129, 33), (1, 129)),
        ((2, 3, 20, 30), (1800, 1, 90, 3)),
        ((1, 5), (77, 1)),
        ((0, 4), (4, 1)),
    ],
    ids=str,
)
def test_what_is_written_is_read_bit_for_bit(store, shape, stride, dtype):
    home, value = store.tensor(shape, stride, dtype), values(shape, stride, dtype)
    store.write(home, value).wait()
    got = store.read(home).wait()
    assert (got.shape, got.stride(), got.dtype) == (home.shape, home.stride(), dtype)
    assert home.shape == torch.Size(shape) and home.dtype == dtype
    assert torch.equal(bits(got), bits(value))
    assert torch.equal(bits(home), bits(value))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float64, torch.complex64], ids=str)
def test_rarer_dtypes_come_back_too(store, dtype):
    home, value = flat(store, 1001, dtype), values((1001,), (1,), dtype)
    store.write(home, value).wait()
    assert torch.equal(bits(store.read(home).wait()), bits(value))


@pytest.mark.parametrize(
    ("extra", "shift"), [(-1, 0), (0, 0), (0, 1), (1, 1), (BLOCK, 64), (12345, 64), (12345, 512), (PIECE + 9, 0)]
)
def test_a_tensor_of_several_pieces_comes_back_from_memory_of_any_alignment(store, extra, shift):
    size = PIECE + extra
    memory = torch.empty(size + 2 * BLOCK, dtype=torch.uint8)
    start = -memory.data_ptr() % BLOCK + shift
    value = memory[start : start + size].copy_(noise(size))
    home = flat(store, size)
    store.write(home, value).wait()
    assert torch.equal(store.read(home).wait(), value)
    assert torch.equal(home, value)


def test_a_value_of_other_strides_is_written_in_those_of_the_tensor(store):
    home = store.tensor((6, 50), (50, 1), torch.float32)
    value = torch.randn(50, 6).t()
    store.write(home, value).wait()
    assert torch.equal(store.read(home).wait(), value)
    store.write(home, torch.ones(50).expand(6, 50)).wait()
    assert torch.equal(store.read(home).wait(), torch.ones(6, 50))


def test_a_value_read_lies_in_aligned_memory_that_is_there_at_once(store):
    home = flat(store, 3 * BLOCK + 5)
    store.write(home, noise(3 * BLOCK + 5))
    reading = store.read(home)
    address = reading.value.data_ptr()
    assert address % BLOCK == 0
    assert reading.wait().data_ptr() == address
    assert reading.done()
    assert not store.holds(reading.value)


def test_a_tensor_of_the_store_can_be_written_to_another_and_to_itself(store):
    one, other = flat(store, 3 * BLOCK), flat(store, 3 * BLOCK)
    value = noise(3 * BLOCK)
    one.copy_(value)
    store.write(other, one)
    store.write(one, one)
    assert torch.equal(store.read(other).wait(), value)
    assert torch.equal(store.read(one).wait(), value)
    assert store.staging_peak > 0 or not store.direct
    turned = store.tensor((BLOCK, 3), (1, BLOCK), torch.uint8)
    store.write(turned, one.view(BLOCK, 3)).wait()
    assert torch.equal(store.read(turned).wait(), value.view(BLOCK, 3))


def test_a_conjugate_view_is_written_as_what_it_means(store):
    home, value = flat(store, 100, torch.complex64), torch.randn(100, dtype=torch.complex64)
    store.write(home, value.conj()).wait()
    assert torch.equal(store.read(home).wait(), value.conj().resolve_conj())


def test_the_mapping_and_direct_transfers_see_what_the_other_did(store):
    home = flat(store, 40 * BLOCK + 7, torch.int32)
    for step in range(20):
        home.copy_(torch.arange(len(home), dtype=torch.int32) + step)
        assert torch.equal(store.read(home).wait(), torch.arange(len(home), dtype=torch.int32) + step)
        store.write(home, torch.arange(len(home), dtype=torch.int32) - step).wait()
        assert home.sum() == (torch.arange(len(home)) - step).sum()
        home[step * 1000] = 5
        got = store.read(home).wait()
        assert got[step * 1000 : step * 1000 + 2].tolist() == [5, 999 * step + 1]


def test_a_store_knows_its_tensors(store, tmp_path):
    home = store.tensor((4, 6), (6, 1), torch.float32)
    assert store.holds(home) and store.holds(home[1:]) and store.holds(home.t())
    assert not store.holds(torch.empty(4, 6))
    assert not store.holds(home.clone())
    with FileStore(tmp_path / "other") as other:
        assert not other.holds(home)
    assert store.holds(home.detach().view(24))
    assert torch.equal(store.read(home.view(24)).wait(), home.view(24))


def test_bytes_are_counted_as_tensors_have_them(store):
    home, none = flat(store, 1001, torch.bfloat16), store.tensor((0,), (1,), torch.float32)
    store.write(home, torch.zeros(1001, dtype=torch.bfloat16)).wait()
    store.write(none, torch.empty(0)).wait()
    for _ in range(3):
        store.read(home).wait()
    assert (store.written_bytes, store.read_bytes, store.held_bytes) == (2002, 6006, BLOCK)


# What is refused


def test_parts_strangers_and_values_that_do_not_fit_are_refused(store):
    home = flat(store, 100, torch.float32)
    for wrong in (home[1:], home[:50], torch.empty(100), home[::2]):
        with pytest.raises(OffloadError, match=str(store.folder)):
            store.read(wrong)
    for value in (torch.empty(99), torch.empty(100, dtype=torch.float64), torch.empty(100, device="meta")):
        with pytest.raises(OffloadError, match="does not fit"):
            store.write(home, value)
    for shape, stride in (((3, 4), (5, 1)), ((3, 4), (0, 1)), ((3,), (2,))):
        with pytest.raises(OffloadError, match="dense"):
            store.tensor(shape, stride, torch.float32)


def test_a_folder_that_can_not_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OffloadError, match=str(folder)):
            FileStore(folder)


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    def refusing(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(OffloadError, match=f"{tmp_path}\n.*Permission denied"):
        FileStore(tmp_path)


@pytest.mark.parametrize("settings", [{"staging_bytes": BLOCK - 1}, {"threads": 0}])
def test_settings_that_could_never_work_are_refused_before_there_is_a_file(tmp_path, settings):
    with pytest.raises(ValueError):
        FileStore(tmp_path / "tier", **settings)
    assert not (tmp_path / "tier").exists()


# Slots


def test_slots_are_used_again_when_their_tensors_die(store):
    kept = flat(store, 10 * BLOCK).fill_(7)
    size = None
    for step in range(100):
        made = [flat(store, n * BLOCK - step) for n in (1, 5, 3)]
        for tensor in made:
            store.write(tensor, noise(len(tensor), step)).wait()
            assert torch.equal(store.read(tensor).wait(), noise(len(tensor), step))
        size = size or store.file_bytes
        assert store.held_bytes == 19 * BLOCK
        del made, tensor
    assert store.file_bytes == size == 19 * BLOCK
    assert store.held_bytes == 10 * BLOCK
    assert kept.eq(7).all()


def test_free_neighbours_are_joined_and_the_best_fit_is_taken(store):
    tensors = [flat(store, n * BLOCK) for n in (4, 1, 2, 1, 3, 1)]
    end = store.file_bytes
    for index in (2, 0, 4):
        tensors[index] = None
    again = flat(store, 2 * BLOCK)  # (into the hole of 2, so that those of 3 and 4 remain)
    others = [flat(store, 4 * BLOCK), flat(store, 3 * BLOCK)]
    assert store.file_bytes == end
    tensors[1] = again = others[0] = None
    joined = flat(store, 7 * BLOCK)
    assert store.file_bytes == end
    del joined
    tensors[5] = others[1] = None
    last = flat(store, 20 * BLOCK)  # (the free end of the file is its beginning)
    assert store.file_bytes == end - 4 * BLOCK + 20 * BLOCK
    assert last.numel() and again is None


def test_a_view_keeps_its_slot_and_a_transfer_keeps_it_until_it_ended(tmp_path):
    files = Gated()
    with FileStore(tmp_path, files=files) as store:
        home = flat(store, BLOCK)
        part = home[7:9]
        del home
        assert store.held_bytes == BLOCK
        del part
        assert store.held_bytes == 0
        home = flat(store, BLOCK)
        files.open.clear()
        writing = store.write(home, noise(BLOCK))
        del home
        assert store.held_bytes == BLOCK
        files.open.set()
        writing.wait()
        assert store.held_bytes == 0


def test_a_value_is_let_go_of_when_it_is_written(store, tmp_path):
    with FileStore(tmp_path / "other") as other:  # (knows when its tensors die)
        home, value = flat(store, BLOCK), flat(other, BLOCK)
        writing = store.write(home, value)
        writing.wait()
        assert other.held_bytes == BLOCK
        del value
        assert other.held_bytes == 0


def test_there_may_be_more_tensors_than_descriptors(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with FileStore(tmp_path) as store:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
        try:
            tensors = [flat(store, 10).fill_(n % 256) for n in range(300)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert [int(tensor[9]) for tensor in tensors] == [n % 256 for n in range(300)]


def test_tensors_and_values_outlive_their_store(tmp_path):
    store = FileStore(tmp_path)
    home = flat(store, BLOCK).fill_(3)
    reading = store.read(home)
    store.close()
    store.close()
    assert reading.done() and reading.value.eq(3).all()
    home += 1
    assert home.eq(4).all()
    with pytest.raises(OffloadError, match="closed"):
        store.read(home)
    with pytest.raises(OffloadError, match="closed"):
        store.write(home, noise(BLOCK))
    with pytest.raises(OffloadError, match="closed"):
        flat(store, 1)
    del store
    assert home.eq(4).all()


def test_a_store_that_is_dropped_closes_its_descriptors_and_ends_its_threads(tmp_path):
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    store = FileStore(tmp_path)
    store.write(flat(store, BLOCK), noise(BLOCK)).wait()
    assert threading.active_count() > before[1]
    del store
    until(lambda: (set(os.listdir("/proc/self/fd")), threading.active_count()) == before)


def until(holds) -> None:
    end = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


# Order


def test_a_read_between_two_writes_gets_the_first(tmp_path):
    files = Gated()
    with FileStore(tmp_path, files=files) as store:
        home = flat(store, 2 * PIECE + 1)
        files.log.clear()
        files.open.clear()
        first, second = noise(len(home), 1), noise(len(home), 2)
        store.write(home, first)
        one = store.read(home)
        store.write(home, second)
        two = store.read(home)
        assert not one.done()
        files.open.set()
        assert torch.equal(two.wait(), second)
        assert torch.equal(one.wait(), first)
    kinds = [kind for kind, _ in files.log]
    writes, reads = ["write"] * (len(kinds) // 2 - 3), ["read"] * 3
    assert kinds == [*writes, *reads, *writes, *reads]


def test_a_write_waits_for_reads_of_the_same_slot_but_for_no_others(tmp_path):
    entered, go = threading.Event(), threading.Event()

    class SlowRead(Backend):
        def preadv(self, fd, buffers, offset):
            if threading.current_thread().name.startswith("zgraph") and not offset:
                entered.set()
                assert go.wait(10)
            return super().preadv(fd, buffers, offset)

    with FileStore(tmp_path, files=SlowRead()) as store:
        slow, other = flat(store, BLOCK).fill_(1), flat(store, BLOCK)
        reading = store.read(slow)
        assert entered.wait(10)
        writing = store.write(slow, noise(BLOCK))
        store.write(other, noise(BLOCK)).wait()
        assert not writing.done()
        go.set()
        assert reading.wait().eq(1).all()
        writing.wait()


def test_a_write_waits_for_writes_that_take_their_value_from_its_slot(tmp_path):
    entered, go = threading.Event(), threading.Event()

    class SlowWrite(Backend):
        slow = -1

        def pwritev(self, fd, buffers, offset):
            if offset == self.slow:
                entered.set()
                assert go.wait(10)
            return super().pwritev(fd, buffers, offset)

    files = SlowWrite()
    with FileStore(tmp_path, files=files) as store:
        one, other, third = flat(store, BLOCK).fill_(1), flat(store, BLOCK), flat(store, BLOCK)
        files.slow = BLOCK
        store.write(other, one)
        assert entered.wait(10)
        writing = store.write(one, noise(BLOCK))
        store.write(third, noise(BLOCK)).wait()
        assert not writing.done()
        go.set()
        writing.wait()
        assert store.read(other).wait().eq(1).all()


def test_a_value_that_is_still_being_written_is_waited_for_before_it_is_copied(tmp_path):
    files = Gated()
    with FileStore(tmp_path, files=files) as store:
        one, turned = flat(store, 3 * BLOCK), store.tensor((BLOCK, 3), (1, BLOCK), torch.uint8)
        later(files)
        store.write(one, noise(3 * BLOCK))
        store.write(turned, one.view(BLOCK, 3)).wait()
        assert torch.equal(turned, noise(3 * BLOCK).view(BLOCK, 3))


def test_closing_waits_for_all_that_was_asked_for(tmp_path):
    files = Gated()
    store = FileStore(tmp_path, files=files)
    home = flat(store, BLOCK)
    later(files)
    store.write(home, noise(BLOCK, 1))
    reading = store.read(home)
    writing = store.write(home, noise(BLOCK, 2))
    store.close()
    assert reading.done() and writing.done()
    writing.wait()
    assert torch.equal(reading.wait(), noise(BLOCK, 1))
    assert torch.equal(home, noise(BLOCK, 2))


def later(files: Gated) -> None:
    files.open.clear()
    threading.Timer(0.1, files.open.set).start()


def test_many_transfers_from_many_threads_keep_their_order(store):
    def work(seed: int) -> None:
        homes = [flat(store, n) for n in (100, BLOCK, 5 * BLOCK + 3, 300_000)]
        flying = []
        for step in range(12):
            for home in homes:
                value = noise(len(home), seed * 100 + step)
                store.write(home, value)
                flying.append((store.read(home), value))
        for reading, value in flying:
            assert torch.equal(reading.wait(), value)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert store.held_bytes == 0


@pytest.mark.parametrize("staging", [BLOCK, 3 * BLOCK + 1, 100_000])
def test_staging_is_bounded_and_can_not_lock_up(tmp_path, staging):
    with FileStore(tmp_path, staging_bytes=staging, threads=8) as store:
        if not store.direct:
            pytest.skip("nothing is staged without O_DIRECT")
        homes = [flat(store, 150_000 + n) for n in range(40)]
        sent = [
            torch.empty(len(home) + 1, dtype=torch.uint8)[1:].copy_(noise(len(home), n)) for n, home in enumerate(homes)
        ]
        for home, value in zip(homes, sent, strict=True):
            store.write(home, value)
        for home, value in zip(homes, sent, strict=True):
            assert torch.equal(store.read(home).wait(), value)
        assert BLOCK <= store.staging_peak <= staging


def test_what_is_aligned_is_not_staged(tmp_path):
    with FileStore(tmp_path) as store:
        home = flat(store, 8 * BLOCK)
        store.write(home, store.read(home).wait()).wait()
        assert store.staging_peak == 0


# Faults


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(files_module, "PIECE", SMALL)


@pytest.fixture
def faulty(tmp_path, small_pieces):
    files = Faulty()
    with FileStore(tmp_path / "tier", checksums=True, files=files) as store:
        yield store, files


def neighbours(store) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three tensors side by side, each written."""
    made = tuple(flat(store, 2 * SMALL + 100) for _ in range(3))
    for seed, home in enumerate(made):
        store.write(home, noise(len(home), seed)).wait()
    return made


def unharmed(store, homes) -> None:
    for seed in (0, 2):
        assert torch.equal(store.read(homes[seed]).wait(), noise(len(homes[seed]), seed))


@pytest.mark.parametrize(
    ("fault", "says"),
    [("nothing", "short read"), (errno.EIO, "Input/output error"), ("a flipped bit", "damaged")],
    ids=["short", "EIO", "flipped"],
)
@pytest.mark.parametrize("at", [1, 3])
def test_a_read_that_fails_says_so_at_each_wait_and_harms_no_other(faulty, fault, says, at):
    store, files = faulty
    homes = neighbours(store)
    files.arm("preadv", fault, at)
    reading = store.read(homes[1])
    for _ in range(2):
        with pytest.raises(OffloadError, match=says) as caught:
            reading.wait()
        assert caught.value.where == str(store.folder)
        assert "offset" in caught.value.why
    assert torch.equal(store.read(homes[1]).wait(), noise(len(homes[1]), 1))
    unharmed(store, homes)


def test_a_short_read_names_the_slot_and_what_was_expected(faulty):
    store, files = faulty
    homes = neighbours(store)
    files.arm("preadv", "nothing")
    with pytest.raises(
        OffloadError, match=rf"(?s){store.folder}.*of {SMALL} bytes at .*a slot at {store.held_bytes // 3}\), only 0"
    ):
        store.read(homes[1]).wait()


def test_a_read_in_parts_is_put_together(faulty):
    store, files = faulty
    homes = neighbours(store)
    files.arm("preadv", "a part", 2)
    assert torch.equal(store.read(homes[1]).wait(), noise(len(homes[1]), 1))
    assert files.calls["preadv"] == 4


def test_a_write_of_odd_length_goes_on_where_it_stopped(tmp_path):
    class Odd(Backend):
        left = 0

        def pwritev(self, fd, buffers, offset):
            if self.left:
                self.left -= 1
                plain = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
                try:
                    return os.pwrite(plain, buffers[0][:1000], offset)
                finally:
                    os.close(plain)
            return super().pwritev(fd, buffers, offset)

    files = Odd()
    with FileStore(tmp_path, files=files) as store:
        home, value = flat(store, 100_000), noise(100_000)
        files.left = 3
        store.write(home, value).wait()
        assert torch.equal(store.read(home).wait(), value)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (errno.ENOSPC, r"No space left on device; \d+ bytes are free"),
        (errno.EIO, "Input/output"),
        ("nothing", "short write"),
    ],
    ids=["ENOSPC", "EIO", "short"],
)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_write_that_fails_says_so_and_its_tensor_can_not_be_read_until_it_is_written_again(faulty, fault, says, at):
    store, files = faulty
    homes = neighbours(store)
    files.arm("pwritev", fault, at)
    writing = store.write(homes[1], noise(len(homes[1]), 7))
    reading = store.read(homes[1])
    for _ in range(2):
        with pytest.raises(OffloadError, match=f"(?s){store.folder}.*{says}|{says}(?s:.*){store.folder}"):
            writing.wait()
        with pytest.raises(OffloadError, match=r"(?s)its last write, .*failed"):
            reading.wait()
    unharmed(store, homes)
    store.write(homes[1], noise(len(homes[1]), 1)).wait()
    assert torch.equal(store.read(homes[1]).wait(), noise(len(homes[1]), 1))


def test_an_error_keeps_no_tensor_alive(faulty, tmp_path):
    store, files = faulty
    with FileStore(tmp_path / "other") as other:  # (knows when its tensors die)
        home, value = flat(store, BLOCK), flat(other, BLOCK)
        files.arm("pwritev", errno.EIO)
        writing = store.write(home, value)
        with pytest.raises(OffloadError):
            writing.wait()
        del home, value
        assert (store.held_bytes, other.held_bytes) == (0, 0)


def test_what_a_backend_raises_by_mistake_is_an_error_at_the_wait(tmp_path):
    class Wrong(Backend):
        def preadv(self, fd, buffers, offset):
            raise ZeroDivisionError("a slip")

    with FileStore(tmp_path) as store:
        store._files = Wrong()
        home = flat(store, BLOCK)
        with pytest.raises(OffloadError, match="a slip"):
            store.read(home).wait()


def test_a_full_disk_is_an_error_when_a_tensor_is_made(faulty):
    store, files = faulty
    homes = neighbours(store)
    held, end = store.held_bytes, store.file_bytes
    files.arm("fallocate", "half")
    with pytest.raises(
        OffloadError, match=rf"(?s){store.folder}.*{BLOCK * 50} bytes .*No space left.*; \d+ bytes are free"
    ):
        flat(store, 50 * BLOCK - 9)
    assert (store.held_bytes, store.file_bytes) == (held, end)
    assert os.fstat(store._fd).st_size == end
    unharmed(store, homes)
    home = flat(store, 50 * BLOCK)
    store.write(home, noise(50 * BLOCK)).wait()
    unharmed(store, homes)


def test_bytes_damaged_on_disk_are_found_by_their_checksum(small_pieces, store):
    homes = neighbours(store)
    offset = store.file_bytes // 3 + SMALL + 77
    byte = os.pread(store._fd, 1, offset)
    os.pwrite(store._fd, bytes([byte[0] ^ 1]), offset)
    for _ in range(2):
        with pytest.raises(
            OffloadError, match=rf"(?s)damaged.*{store.folder}.*at offset {store.file_bytes // 3 + SMALL} "
        ):
            store.read(homes[1]).wait()
    unharmed(store, homes)


def test_a_change_through_the_mapping_is_no_damage(store):
    home = flat(store, 3 * BLOCK)
    store.write(home, noise(3 * BLOCK)).wait()
    home[5:9] = 1
    assert torch.equal(store.read(home).wait(), home)


def test_without_checksums_nothing_is_compared(tmp_path):
    files = Faulty()
    with FileStore(tmp_path, files=files) as store:
        home = flat(store, BLOCK)
        store.write(home, noise(BLOCK)).wait()
        files.arm("preadv", "a flipped bit")
        assert not torch.equal(store.read(home).wait(), noise(BLOCK))


# Files


AT_EXIT = """
import atexit, sys
atexit.register(lambda: print(int(home.sum()), flush=True))
import torch
from zgraph.offload.files import FileStore
home = FileStore(sys.argv[1]).tensor((1000,), (1,), torch.uint8).fill_(3)
"""


@pytest.mark.slow
def test_a_tensor_can_be_used_until_the_process_ends(tmp_path):
    done = subprocess.run([sys.executable, "-c", AT_EXIT, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "3000\n"), done.stderr


KILLED = """
import sys, torch
from zgraph.offload.files import FileStore
store = FileStore(sys.argv[1])
homes = [store.tensor((2**22,), (1,), torch.uint8) for _ in range(4)]
print("writing", flush=True)
while True:
    for home in homes:
        store.write(home, torch.ones(2**22, dtype=torch.uint8))
    store.read(home).wait()
"""


def test_nothing_is_left_when_the_process_is_killed_in_the_middle_of_writing(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout.readline() == b"writing\n"
        time.sleep(0.2)
        assert child.poll() is None
        assert os.listdir(tmp_path) == []
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_nameless_files_leaves_nothing_either(tmp_path, monkeypatch):
    real = os.open

    def refusing(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    with FileStore(tmp_path) as store:
        assert os.listdir(tmp_path) == []
        home = flat(store, 1000)
        store.write(home, noise(1000)).wait()
        assert torch.equal(store.read(home).wait(), noise(1000))


def test_direct_transfers_that_open_but_do_not_work_are_not_used(tmp_path):
    class NoDirect(Backend):
        def pwritev(self, fd, buffers, offset):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().pwritev(fd, buffers, offset)

    with FileStore(tmp_path, files=NoDirect()) as store:
        assert not store.direct
        home = flat(store, 1000)
        store.write(home, noise(1000)).wait()
        assert torch.equal(store.read(home).wait(), noise(1000))


# Before it starts


def test_a_preflight_measures_the_folder_and_leaves_no_trace(store, monkeypatch):
    monkeypatch.setattr("zgraph.offload.files.TRIAL", 64 * MIB)
    found = store.preflight(3 * MIB + 1)
    assert (found.folder, found.direct, found.alignment) == (store.folder, store.direct, BLOCK)
    assert found.free_bytes > 0 and found.read_rate > 0 and found.write_rate > 0
    assert (store.held_bytes, store.read_bytes, store.written_bytes) == (0, 0, 0)
    assert store.file_bytes == 64 * MIB  # (what is put there later lies in it)


def test_a_preflight_refuses_what_the_disk_has_no_room_for(store):
    with pytest.raises(OffloadError, match=rf"(?s){store.folder}.*{2**60} bytes are needed, \d+ are free"):
        store.preflight(2**60)


def test_a_preflight_refuses_what_the_limit_on_files_forbids(store):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    flat(store, MIB)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, limits[1]))
    try:
        with pytest.raises(OffloadError, match="RLIMIT_FSIZE is 2097152"):
            store.preflight(MIB + 1)
        assert store.preflight(MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_preflight_does_not_believe_a_disk_that_loses_data(faulty):
    store, files = faulty
    files.arm("preadv", "a flipped bit")
    with pytest.raises(OffloadError, match="damaged"):
        store.preflight(MIB)


def test_a_limit_on_files_is_an_error_when_a_tensor_is_made(store):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(OffloadError, match=r"(?s)File too large.*ulimit -f"):
            flat(store, 2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert flat(store, 2 * MIB).fill_(1).sum() == 2 * MIB


def test_memory_that_reads_land_in_is_taken_again_once_its_values_are_gone(store):
    homes = [store.tensor((SMALL,), (1,), torch.uint8) for _ in range(4)]
    for i, home in enumerate(homes):
        store.write(home, torch.full((SMALL,), i, dtype=torch.uint8)).wait()
    with store.reused():
        first = store.read(homes[0]).wait()
        view, where = first[10:], first.data_ptr()
        del first
        second = store.read(homes[1]).wait()
        assert second.data_ptr() != where and view.eq(0).all()  # (a view holds it)
        del view
        third = store.read(homes[2]).wait()
        assert third.data_ptr() == where and third.eq(2).all() and second.eq(1).all()
        larger = store.tensor((5 * SMALL,), (1,), torch.uint8)
        del third
        assert store.read(larger).wait().data_ptr() != where
    outside = store.read(homes[3]).wait()
    assert outside.eq(3).all() and second.eq(1).all()
