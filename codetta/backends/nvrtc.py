"""CUDA C++ -> a kernel that can be launched: NVIDIA's run-time compiler and driver, as PyTorch brings them along, called directly.

The compiler needs no GPU: it also serves to see that a text compiles for a target that is not here.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from codetta.errors import LoweringError, Reason
from codetta.plan.target import Target
from codetta.runtime.cache import Cache, key_of

NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
OPTIONS = ("--std=c++17", "-default-device")
SHARED_MEMORY = 8  # the driver's number of the attribute


@cache
def _compiler() -> ctypes.CDLL | None:
    """The library: that which PyTorch has loaded, or one that is installed beside it."""
    for name in NAMES:
        folders = [Path(each) / "nvidia" for each in sys.path if each]
        installed = [
            str(path) for folder in folders if folder.is_dir() for path in sorted(folder.glob(f"*/lib/{name}"))
        ]
        for path in [name, *installed]:
            try:
                return ctypes.CDLL(path)
            except OSError:
                continue
    return None


def is_there() -> bool:
    return _compiler() is not None


@cache
def compiled(source: str, target: Target) -> bytes:
    """The kernel's binary for a target."""
    compiler = _compiler()
    if compiler is None:
        raise LoweringError("CUDA C++", [Reason("NVIDIA's run-time compiler", "libnvrtc is not installed")])
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    arch = f"sm_{target.arch}{'a' if target.arch == 90 else ''}"
    key = key_of(source=source, compiler=(major.value, minor.value), arch=arch, options=OPTIONS)
    return Cache("cuda").get_or_build(key, lambda: _compile(compiler, source, arch))


def _compile(compiler: ctypes.CDLL, source: str, arch: str) -> bytes:
    program = ctypes.c_void_p()
    compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"step.cu", 0, None, None)
    options = [f"--gpu-architecture={arch}", *OPTIONS]
    texts = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
    failed = compiler.nvrtcCompileProgram(program, len(options), texts)
    size = ctypes.c_size_t()
    if failed:
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        raise LoweringError("CUDA C++", [Reason("it compiles", log.value.decode()[:4000])])
    compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetCUBIN(program, binary)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


class Kernel:
    """A kernel on a device, with all its blocks there at once."""

    def __init__(self, source: str, name: str, target: Target, shared: int) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.shared = shared
        self.binary = compiled(source, target)
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream()  # the device's context
        self._call("cuModuleLoadData", ctypes.byref(self.module), self.binary)
        self._call("cuModuleGetFunction", ctypes.byref(self.function), self.module, name.encode())
        self._call("cuFuncSetAttribute", self.function, SHARED_MEMORY, shared)

    def __call__(
        self,
        blocks: int,
        threads: int,
        arguments: Sequence[ctypes.Structure | ctypes.c_void_p | ctypes.Array[ctypes.c_uint64]],
    ) -> None:
        """Launched together (cooperatively): a kernel whose blocks wait for each other must not start with some of them only."""
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call("cuLaunchCooperativeKernel", self.function, blocks, 1, 1, threads, 1, 1, self.shared, stream, places)

    def _call(self, name: str, *arguments: object) -> None:
        failed = getattr(self.driver, name)(*arguments)
        if failed:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(failed, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'').decode()}")
