"""C++ text -> a loaded library: finds the compiler, builds once, keeps the result in the cache.

The main loop is one library for each element type, the epilogues of a program another, so that a new program costs a fraction of
a second. Attention over a cache is a library of its own. This file knows compilers and files, not programs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from codetta.errors import CodettaError
from codetta.runtime.cache import Cache, key_of

HERE = Path(__file__).parent
HEADERS = ("cpu_runtime.h", "cpu_math.h")
MAIN_LOOP = ("cpu_gemm.cpp", "cpu_drive.h", "cpu_sixteen.h")
ATTENTION = ("cpu_attention.cpp", "cpu_sixteen.h")
COMPILERS = ("g++", "c++", "clang++")
# -fno-trapping-math and -fno-math-errno change no value: they only free the order and the vector forms of operations.
FLAGS = ("-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-w")
# The epilogue means what it says: a product and a sum are rounded each. The main loop is one long fused sum.
EPILOGUE_FLAGS = ("-O2", "-ffp-contract=off")  # vectors are spelled out: more is only slower to compile
MAIN_LOOP_FLAGS = ("-O3", "-ffp-contract=fast")


class BuildError(CodettaError):
    """There is no compiler, or it refuses."""


@dataclass(frozen=True)
class Toolchain:
    """Everything that a built library depends on besides its source."""

    command: tuple[str, ...]
    version: str
    machine: tuple[str, ...]  # flags that ask for this processor's instructions
    processor: str
    openmp: str  # the library that PyTorch has loaded: one pool of threads for both


def toolchain() -> Toolchain:
    return _toolchain(os.environ.get("CXX", ""), os.environ.get("PATH", ""), _machine_flags())


def _machine_flags() -> tuple[str, ...]:
    return ("-mcpu=native",) if platform.machine().lower() in ("arm64", "aarch64") else ("-march=native",)


@cache
def _toolchain(chosen: str, path: str, machine: tuple[str, ...]) -> Toolchain:
    wanted = [shlex.split(chosen)] if chosen else [[name] for name in COMPILERS]
    for command in wanted:
        if command and shutil.which(command[0], path=path):
            version = run([*command, "--version"])
            return Toolchain(tuple(command), version, machine, _processor(), _openmp())
    names = chosen or ", ".join(COMPILERS)
    raise BuildError(f"no C++ compiler: {names} not found; install one, or name it in CXX")


@cache
def _processor() -> str:
    """What `native` means here: a library for one processor may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    return "\n".join(sorted({line for line in lines if line.lower().startswith(("model name", "flags", "features"))}))


@cache
def _openmp() -> str:
    folder = Path(torch.__file__).parent
    found = sorted([*(folder / "lib").glob("libgomp*.so*"), *(folder.parent / "torch.libs").glob("libgomp*.so*")])
    return str(found[0]) if found else ""


def run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} fails: {' '.join(said[:3]) or f'exit status {done.returncode}'}")
    return done.stdout


def build_epilogues(source: str, tools: Toolchain) -> Path:
    """The library of a program's epilogues."""

    def build(path: Path) -> None:
        text = path.with_suffix(".cpp")
        text.write_text(source)
        command = [*_epilogue_command(tools), f"-I{HERE}", "-shared", str(text), "-o", str(path)]
        headers = _precompiled_headers(tools)
        if headers is not None:
            try:
                run([*command, "-include", str(headers)])
                return
            except BuildError:
                pass  # the file is gone, or the compiler refuses it: without it the build is only slower
        run(command)

    key = key_of(source=source, headers=_texts(HEADERS), tools=tools, flags=FLAGS + EPILOGUE_FLAGS)
    return Cache("cpu").get_file(key, build, suffix=".so")


def _epilogue_command(tools: Toolchain) -> list[str]:
    return [*tools.command, *FLAGS, *EPILOGUE_FLAGS, *tools.machine]


@cache
def _precompiled_headers(tools: Toolchain) -> Path | None:
    """What `-include` names to take the headers as the compiler has read them before: reading them is nine tenths of a build."""

    def build(path: Path) -> None:
        run([*_epilogue_command(tools), "-x", "c++-header", str(HERE / HEADERS[0]), "-o", str(path)])

    key = key_of(precompiled=HEADERS[0], headers=_texts(HEADERS), tools=tools, flags=FLAGS + EPILOGUE_FLAGS)
    try:
        return Cache("cpu").get_file(key, build, suffix=".h.gch").with_suffix("")
    except BuildError:
        return None


def build_main_loop(element: str, tools: Toolchain) -> Path:
    """The library of the main loop for one element type."""
    return _build_threaded(MAIN_LOOP, tools, f"-DELEMENT={element}")


def build_attention(tools: Toolchain) -> Path:
    """The library of attention over a cache, for all element types."""
    return _build_threaded(ATTENTION, tools)


def _build_threaded(names: tuple[str, ...], tools: Toolchain, *chosen: str) -> Path:
    """The library of the first of these files, which has loops that threads share."""

    def build(path: Path) -> None:
        compiled = str(path.with_suffix(".o"))
        flags = [*FLAGS, *MAIN_LOOP_FLAGS, *tools.machine, *chosen]
        command = [*tools.command, *flags, "-c", str(HERE / names[0]), "-o", compiled]
        link = [*tools.command, "-shared", compiled, "-o", str(path)]
        try:
            run([*command, "-fopenmp"])
            # Named by its path, it is the one that PyTorch uses, whose threads are there already.
            run([*link, tools.openmp or "-fopenmp"])
        except BuildError:
            run(command)  # a compiler without OpenMP: one thread
            run(link)

    key = key_of(
        source=names[0], headers=_texts(HEADERS + names), tools=tools, flags=(*FLAGS, *MAIN_LOOP_FLAGS, *chosen)
    )
    return Cache("cpu").get_file(key, build, suffix=".so")


@cache
def _texts(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(hashlib.sha256((HERE / name).read_bytes()).hexdigest() for name in names)


@dataclass(frozen=True)
class Library:
    """A program that can be run: its plan in memory, and the main loop that takes it."""

    plan: int
    main_loop: ctypes.CDLL
    epilogues: ctypes.CDLL  # kept, since the plan lies in it

    @property
    def function(self) -> int:
        """The address of what runs the plan."""
        return int(ctypes.cast(self.main_loop.codetta_run, ctypes.c_void_p).value or 0)

    def run(self, arguments: list[int]) -> None:
        values = (ctypes.c_int64 * len(arguments))(*arguments)
        if self.main_loop.codetta_run(self.plan, values):
            raise MemoryError("the CPU backend got no memory for packed matrices")

    def first_outside(self, tensor: torch.Tensor, low: int, high: int) -> int:
        """Where the first number that is not in [low, high) is; the number of elements if there is none."""
        size = tensor.numel()
        return int(self.main_loop.codetta_first_outside(tensor.data_ptr(), tensor.element_size(), size, low, high))


_loading = threading.Lock()


def load(source: str, element: str) -> Library:
    """Build what is not in the cache, main loop and epilogues side by side, and load it."""
    tools = toolchain()
    with _loading, ThreadPoolExecutor(1) as pool:
        other = pool.submit(build_main_loop, element, tools)
        epilogues = open_library(build_epilogues(source, tools))
        main_loop = open_library(other.result())
    main_loop.codetta_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    main_loop.codetta_first_outside.argtypes = [ctypes.c_void_p] + [ctypes.c_int64] * 4
    main_loop.codetta_first_outside.restype = ctypes.c_int64
    return Library(ctypes.addressof(ctypes.c_char.in_dll(epilogues, "codetta_plan")), main_loop, epilogues)


def load_attention() -> ctypes.CDLL:
    with _loading:
        library = open_library(build_attention(toolchain()))
    library.codetta_attend.argtypes = [ctypes.c_void_p]
    return library


def open_library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} was built but cannot be loaded: {error}") from None
