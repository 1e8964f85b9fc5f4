"""A cache on disk for what is expensive to make and cheap to check: kernels (bytes, files) and tuning results (JSON).

    cache = Cache("kernels")
    key = key_of(source=text, compiler=version, flags=("-O3",))
    data = cache.get_or_build(key, lambda: compile(text))

Nothing in it is ever trusted: an entry carries its format, the full text of its key and a checksum, and one that is
truncated, damaged, of another format or of another key is as good as absent. Writes go to a file of their own and
are renamed into place, so that processes can share a directory without locks; the last writer of a key wins, and
all writers of a key write the same thing. A directory that cannot be written means no caching, said once.

This file knows nothing about programs, devices or compilers: whatever must change a key is a field of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FORMAT = b"codetta cache 1\n"  # raise the number when the layout of an entry changes


@dataclass(frozen=True)
class Key:
    """The canonical text of everything that an entry depends on; its digest names the file."""

    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def key_of(**fields: Any) -> Key:
    """The key of these fields, all of them. A value without a canonical text is an error: a key never guesses."""
    if not fields:
        raise TypeError("a cache key of no fields would be the same for everything")
    return Key("\n".join(f"{name}: {_canonical(name, fields[name])}" for name in sorted(fields)))


def _canonical(name: str, value: Any) -> str:
    """A text that differs wherever the value does, in this process and in any other."""
    match value:
        case None | bool() | int():
            return repr(value)
        case float():
            if math.isnan(value):
                raise TypeError(f"cache key field {name!r} is NaN, which does not even equal itself")
            return value.hex()
        case str() | bytes():
            return repr(value)
        case torch.dtype() | torch.device():
            return str(value)
        case Path():
            return f"path {str(value)!r}"
        case tuple() | list():
            inner = ", ".join(_canonical(f"{name}[{i}]", each) for i, each in enumerate(value))
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise TypeError(f"cache key field {name!r} is a dict whose keys are not all strings")
            inner = ", ".join(f"{key!r}: {_canonical(f'{name}.{key}', value[key])}" for key in sorted(value))
            return "{" + inner + "}"
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            inner = ", ".join(
                f"{each.name}={_canonical(f'{name}.{each.name}', getattr(value, each.name))}"
                for each in dataclasses.fields(value)
            )
            return f"{kind}({inner})"
    raise TypeError(
        f"cache key field {name!r} is a {type(value).__name__}, which has no canonical text: "
        "use numbers, strings, bytes, dtypes, tuples, dicts or dataclasses of these"
    )


def default_directory() -> Path:
    """CODETTA_CACHE, or the place where the platform keeps what can be made again."""
    chosen = os.environ.get("CODETTA_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "codetta"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "codetta" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "codetta"


class Cache:
    """One kind of entries in the cache directory. Cheap to create; holds nothing in memory."""

    def __init__(self, kind: str, directory: Path | None = None) -> None:
        if not kind.isidentifier():
            raise ValueError(f"a cache's kind names a folder, {kind!r} does not")
        self.directory = (directory or default_directory()) / kind

    def __repr__(self) -> str:
        return f"Cache({str(self.directory)!r})"

    # ---- bytes

    def get(self, key: Key) -> bytes | None:
        """The data stored under the key, None if there is none that can be believed."""
        try:
            raw = self._path(key).read_bytes()
        except OSError:
            return None
        return _unwrap(raw, key)

    def put(self, key: Key, data: bytes) -> bool:
        """Store data under the key; False where the directory cannot be written."""
        return self._write(self._path(key), _wrap(data, key))

    def get_or_build(self, key: Key, build: Callable[[], bytes]) -> bytes:
        data = self.get(key)
        if data is None:
            data = build()
            self.put(key, data)
        return data

    # ---- JSON

    def get_json(self, key: Key) -> Any:
        """The value stored under the key, None if there is none."""
        data = self.get(key)
        try:
            return None if data is None else json.loads(data)
        except ValueError:
            return None

    def put_json(self, key: Key, value: Any) -> bool:
        return self.put(key, json.dumps(value, sort_keys=True).encode())

    # ---- files

    def get_file(self, key: Key, build: Callable[[Path], None], suffix: str = "") -> Path:
        """The path of a file that `build` wrote once: for shared libraries, which are opened by name.

        `build(path)` makes the file at the path it is given. The file's checksum is an entry of its own, written after the
        file: a file without one, or with another, is built anew. Without a writable directory the file lives in
        a temporary one as long as the system keeps that.
        """
        path = self._path(key).with_suffix(suffix or ".bin")
        if self._file_is_whole(key, path):
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
        except OSError as error:
            self._warn(error)
            scratch = Path(tempfile.mkdtemp(prefix="codetta-")) / path.name
            build(scratch)
            return scratch
        try:
            made = folder / path.name
            build(made)
            if not made.is_file():
                raise FileNotFoundError(f"the build of {path.name} left no file at {made}")
            digest = hashlib.sha256(made.read_bytes()).hexdigest()
            # A library that some process has mapped stays mapped: rename replaces the name, not the file.
            os.replace(made, path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.put(key, digest.encode())
        return path

    def _file_is_whole(self, key: Key, path: Path) -> bool:
        digest = self.get(key)
        if digest is None:
            return False
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest().encode() == digest
        except OSError:
            return False

    # ---- the whole of it

    def size(self) -> tuple[int, int]:
        """How many entries there are, and their bytes on disk."""
        entries, total = 0, 0
        for path in self._files():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
                entries += path.suffix == ".entry"
        return entries, total

    def clear(self) -> None:
        """Forget everything of this kind. Other processes rebuild what they miss."""
        for path in self._files():
            with contextlib.suppress(OSError):
                path.unlink()

    def _files(self) -> list[Path]:
        return [path for path in self.directory.rglob("*") if path.is_file()] if self.directory.is_dir() else []

    def _path(self, key: Key) -> Path:
        # Two levels: some file systems are slow with tens of thousands of names in one folder.
        return self.directory / key.digest[:2] / f"{key.digest[2:]}.entry"

    def _write(self, path: Path, raw: bytes) -> bool:
        temporary: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            self._warn(error)
            return False
        return True

    def _warn(self, error: OSError) -> None:
        if self.directory not in _warned:
            _warned.add(self.directory)
            warnings.warn(
                f"nothing is cached in {self.directory} ({error.strerror or error}): set CODETTA_CACHE to a directory "
                "that can be written",
                RuntimeWarning,
                stacklevel=4,
            )


_warned: set[Path] = set()


def _wrap(data: bytes, key: Key) -> bytes:
    """format, sizes of key and data, checksum of all that follows it, key, data."""
    text = key.text.encode()
    sizes = len(text).to_bytes(8, "little") + len(data).to_bytes(8, "little")
    return FORMAT + hashlib.sha256(sizes + text + data).digest() + sizes + text + data


def _unwrap(raw: bytes, key: Key) -> bytes | None:
    if not raw.startswith(FORMAT) or len(raw) < len(FORMAT) + 48:
        return None
    checksum, rest = raw[len(FORMAT) : len(FORMAT) + 32], raw[len(FORMAT) + 32 :]
    if hashlib.sha256(rest).digest() != checksum:
        return None
    text_size = int.from_bytes(rest[:8], "little")
    data_size = int.from_bytes(rest[8:16], "little")
    if len(rest) != 16 + text_size + data_size or rest[16 : 16 + text_size] != key.text.encode():
        return None
    return rest[16 + text_size :]
