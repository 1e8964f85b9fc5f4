"""The disk cache: nothing in it is trusted, and processes share it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from codetta.runtime import cache as cache_module
from codetta.runtime.cache import Cache, Key, default_directory, key_of


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache("kernels", tmp_path)


@dataclass(frozen=True)
class Fact:
    name: str
    warps: int


def entry_of(cache: Cache) -> Path:
    (path,) = cache.directory.rglob("*.entry")
    return path


def test_data_comes_back(cache: Cache) -> None:
    key = key_of(source="x", flags=("-O3",))
    assert cache.get(key) is None
    assert cache.put(key, b"\x00binary\xff")
    assert cache.get(key) == b"\x00binary\xff"
    assert cache.get(key_of(source="x", flags=("-O2",))) is None
    assert Cache("tuning", cache.directory.parent).get(key) is None


def test_empty_data_is_data(cache: Cache) -> None:
    cache.put(key_of(a=1), b"")
    assert cache.get(key_of(a=1)) == b""


def test_json_comes_back(cache: Cache) -> None:
    cache.put_json(key_of(a=1), {"ms": 1.5, "tile": [128, 256]})
    assert cache.get_json(key_of(a=1)) == {"ms": 1.5, "tile": [128, 256]}
    cache.put(key_of(a=2), b"no json {")
    assert cache.get_json(key_of(a=2)) is None


def test_built_once(cache: Cache) -> None:
    built = []

    def build() -> bytes:
        built.append(1)
        return b"kernel"

    assert [cache.get_or_build(key_of(a=1), build) for _ in range(3)] == [b"kernel"] * 3
    assert len(built) == 1


def damage_truncated(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def damage_one_bit(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


def damage_nothing_left(raw: bytes) -> bytes:
    return b""


def damage_header_only(raw: bytes) -> bytes:
    return cache_module.FORMAT


def damage_other_format(raw: bytes) -> bytes:
    return raw.replace(b"cache 1", b"cache 0", 1)


def damage_foreign(raw: bytes) -> bytes:
    return b"\x7fELF" + os.urandom(500)


def damage_other_key(raw: bytes) -> bytes:
    return cache_module._wrap(b"kernel", key_of(other=True))


@pytest.mark.parametrize(
    "damage", [damage_truncated, damage_one_bit, damage_nothing_left, damage_header_only, damage_other_format, damage_foreign, damage_other_key]
)  # fmt: skip
def test_damaged_entries_are_rebuilt(cache: Cache, damage) -> None:
    key = key_of(a=1)
    cache.put(key, b"kernel")
    path = entry_of(cache)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(key) is None
    assert cache.get_or_build(key, lambda: b"again") == b"again"
    assert cache.get(key) == b"again"


def test_a_folder_in_the_way_is_ignored(cache: Cache) -> None:
    key = key_of(a=1)
    cache._path(key).mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cache.get_or_build(key, lambda: b"built") == b"built"


def test_unwritable_directory_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file where the directory should be stops root too, which permissions would not.
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cache_module, "_warned", set())
    cache = Cache("kernels", tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="CODETTA_CACHE"):
        assert cache.get_or_build(key_of(a=1), lambda: b"built") == b"built"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build(key_of(a=2), lambda: b"built") == b"built"
        path = cache.get_file(key_of(a=3), lambda p: p.write_bytes(b"library") and None)
    assert path.read_bytes() == b"library"
    assert cache.size() == (0, 0)


def test_file_is_built_once_and_rebuilt_when_damaged(cache: Cache) -> None:
    built = []

    def build(path: Path) -> None:
        built.append(path)
        path.write_bytes(b"library")

    key = key_of(source="c++")
    path = cache.get_file(key, build, ".so")
    assert path.suffix == ".so"
    assert cache.get_file(key, build, ".so") == path
    assert len(built) == 1
    assert built[0] != path, "a build must not be visible before it is complete"
    path.write_bytes(b"libr")
    assert cache.get_file(key, build, ".so").read_bytes() == b"library"
    path.unlink()
    assert cache.get_file(key, build, ".so").read_bytes() == b"library"
    assert len(built) == 3


def test_failed_build_leaves_nothing(cache: Cache) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half of it")
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        cache.get_file(key_of(a=1), fail)
    with pytest.raises(FileNotFoundError, match="left no file"):
        cache.get_file(key_of(a=1), lambda path: None)
    assert cache.size() == (0, 0)


def test_size_and_clear(cache: Cache) -> None:
    for number in range(5):
        cache.put(key_of(number=number), b"x" * 100)
    entries, size = cache.size()
    assert entries == 5
    assert size > 500
    cache.clear()
    assert cache.size() == (0, 0)
    assert cache.get(key_of(number=0)) is None


def test_keys_cover_every_field() -> None:
    keys = [
        key_of(a=1), key_of(a=1.0), key_of(a="1"), key_of(a=b"1"), key_of(a=True), key_of(a=None), key_of(a=(1,)), key_of(a=[1]),
        key_of(b=1), key_of(a=1, b=1), key_of(a={"x": 1}), key_of(a={"x": 2}), key_of(a=torch.float16), key_of(a=torch.bfloat16),
        key_of(a=0.0), key_of(a=-0.0), key_of(a=Fact("k", 4)), key_of(a=Fact("k", 8)), key_of(a="1\nb: 1"), key_of(a=("1", "2")), key_of(a=("1, 2",)),
    ]  # fmt: skip
    assert len({key.text for key in keys}) == len(keys)
    assert key_of(a=1, b=2) == key_of(b=2, a=1)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, float("nan"), lambda: 0, {1: 2}, (object(),), Fact, torch.zeros(1)]
)
def test_keys_fail_closed(value: object) -> None:
    with pytest.raises(TypeError, match="cache key field 'what"):
        key_of(what=value)


def test_a_key_of_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="no fields"):
        key_of()


def test_directory_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CODETTA_CACHE", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("CODETTA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert default_directory() == tmp_path / "xdg" / "codetta"


HAMMER = """
import sys
from pathlib import Path
from codetta.runtime.cache import Cache, key_of
cache = Cache("kernels", Path(sys.argv[1]))
for turn in range(150):
    key = key_of(number=turn % 7)
    expected = bytes([turn % 7]) * 20000
    assert cache.get_or_build(key, lambda: expected) == expected
    if turn % 10 == int(sys.argv[2]):
        cache.put(key, expected)
    path = cache.get_file(key_of(file=turn % 3), lambda p: p.write_bytes(bytes([turn % 3]) * 9000) and None, ".so")
    assert path.read_bytes() == bytes([turn % 3]) * 9000
    if turn % 50 == 49 and sys.argv[2] == "1":
        cache.clear()
        cache = Cache("kernels", Path(sys.argv[1]))
"""


def test_two_processes_share_it(tmp_path: Path) -> None:
    """Both write, read and rebuild the same keys, one of them clears: neither ever sees half an entry.

    A file can vanish between get_file and its use only if somebody clears the cache, so the reader in this test retries.
    """
    code = HAMMER.replace(
        "    assert path.read_bytes() == bytes([turn % 3]) * 9000\n",
        "    try:\n        assert path.read_bytes() == bytes([turn % 3]) * 9000\n    except FileNotFoundError:\n        pass\n",
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(n)], stderr=subprocess.PIPE, text=True) for n in (1, 2)
    ]  # fmt: skip
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def test_key_is_its_text() -> None:
    assert Key("a").digest != Key("b").digest
    assert len(Key("a").digest) == 64
