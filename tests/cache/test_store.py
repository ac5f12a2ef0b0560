"""Entries of the cache are taken only if they are whole, of the key that is asked for, and nobody else can have written them."""

import os
import random

import pytest

from zgraph.cache.store import SUFFIX, Store, hashed, opened, writable_by_others


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "programs")


def files(store):
    return sorted(store.folder.glob(f"*/*{SUFFIX}"))


def test_what_was_kept_is_given_and_nothing_else(store):
    key, other = hashed("a"), hashed("b")
    assert store.get("step", key) is None
    store.put_json("step", key, {"x": [1, None, "ü"]}, {"model": "M"})
    assert store.get_json("step", key) == {"x": [1, None, "ü"]}
    assert store.get("code", key) is None and store.get("step", other) is None
    assert [(f.kind, dict(f.words), f.fault) for f in store.entries()] == [("step", {"model": "M"}, "")]


def test_keys_of_several_texts_do_not_run_into_each_other():
    assert hashed("ab", "c") != hashed("a", "bc")


def test_200_random_damages_are_seen(store):
    draw = random.Random(0)
    keys = [hashed(str(i)) for i in range(4)]
    bodies = {key: draw.randbytes(draw.randrange(1, 4000)) for key in keys}
    for key, body in bodies.items():
        store.put("code", key, body, {"model": "M"})
    whole = {path: path.read_bytes() for path in files(store)}
    assert len(whole) == 4
    for _ in range(200):
        path = draw.choice(list(whole))
        path.write_bytes(_damaged(whole[path], list(whole.values()), draw))
        key = next(k for k in keys if path.name.startswith(k[:32]))
        assert path.read_bytes() == whole[path] or store.get("code", key) is None
        assert path.read_bytes() == whole[path] or [f.path for f in store.entries() if f.fault] == [path]
        path.write_bytes(whole[path])
    assert all(store.get("code", key) == body for key, body in bodies.items())


def _damaged(data, others, draw):
    at = draw.randrange(len(data))
    match draw.randrange(7):
        case 0:  # a bit
            return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data + draw.randbytes(draw.randrange(1, 50))
        case 3:  # another one's entry
            return draw.choice([o for o in others if o != data])
        case 4:  # a block that the disk lost
            return data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]
        case 5:
            return data[:at] + data[at + 1 + draw.randrange(9) :]
        case _:
            head, _, body = data.partition(b"\n")
            return head.replace(b'"format": 1', b'"format": 2') + b"\n" + body


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, caplog):
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    assert writable_by_others(mine / "programs") is None
    assert opened(mine) is not None
    mine.chmod(0o777)
    assert "chmod go-w" in writable_by_others(mine / "programs")
    assert opened(mine) is None
    assert "nothing compiled is kept" in caplog.text
    mine.chmod(0o700)
    (mine / "programs").mkdir()
    (mine / "programs").chmod(0o770)
    assert writable_by_others(mine / "programs") is not None


def test_a_link_to_a_folder_of_others_is_seen(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    os.symlink(open_to_all, tmp_path / "link")
    assert writable_by_others(tmp_path / "link" / "programs") is not None


def test_what_can_not_be_written_is_not_kept_and_said_once(tmp_path, caplog):
    (tmp_path / "programs").write_text("no folder")
    store = Store(tmp_path / "programs")
    for key in (hashed("a"), hashed("b")):
        store.put("code", key, b"x", {})
        assert store.get("code", key) is None
    assert caplog.text.count("can't be kept") == 1


def test_clear_deletes_entries_and_what_a_writer_left(store):
    store.put("code", hashed("a"), b"x", {})
    store.put("step", hashed("b"), b"y", {})
    (files(store)[0].parent / "z.kept.1.part").write_bytes(b"abc")
    count, size = store.clear()
    assert count == 3 and size > 3 and files(store) == []


def test_all_who_look_into_a_folder_read_the_same_words(store, tmp_path):
    first = store.identity()
    assert first and Store(store.folder).identity() == first
    assert Store(tmp_path / "other").identity() not in ("", first)
