"""A launch of Triton's as data: which arguments a compiled kernel takes, and in which form.

This is what Triton's own launcher knows (a generated C file that takes Python objects); here it is held to the releases that were looked
at. Others launch through Triton, at every call.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from torch import Tensor

from codetta.runtime.invocation import Argument, Invocation, Number, TensorMap

KNOWN = ((3, 6),)  # releases of Triton
SIZES = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
# The driver's numbers of data types, where they are not the compiler's.
ELEMENTS = {8: 10, 9: 8, 10: 9}


def invocation(compiled: Any, blocks: int, arguments: list[Any]) -> Invocation | None:
    """The launch of a compiled kernel on a row of blocks; None if it needs more than can be told."""
    metadata = getattr(compiled, "metadata", None)
    if not _known() or metadata is None or metadata.target.backend != "cuda":
        return None  # the interpreter, another vendor, another release
    plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
    if not plain or metadata.global_scratch_size or metadata.profile_scratch_size or blocks < 1:
        return None
    maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    found: list[Argument] = []
    for kind, value in zip(compiled.src.signature.values(), arguments, strict=True):
        given = _argument(kind, value, maps)
        if given is None:
            return None
        found += given
    found += [Number(0, 8), Number(0, 8)]  # scratch memory, of which there is none
    return Invocation(
        compiled.function, found, compiled, grid=(blocks, 1, 1), threads=32 * metadata.num_warps, shared=metadata.shared,
        dependent=bool(metadata.launch_pdl),
    )  # fmt: skip


@cache
def _known() -> bool:
    import triton

    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2]) in KNOWN


def _argument(kind: str, value: Any, maps: Any) -> list[Argument] | None:
    """What of the kernel's parameters an argument becomes: none for a constant, several for a descriptor; None if that is not known."""
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [value] if isinstance(value, Tensor) else None
    if kind in SIZES:
        return [Number(int(value), SIZES[kind])]
    if not kind.startswith("tensordesc"):
        return None
    about = next(maps, None)
    if about is None or about["fp4_padded"]:
        return None
    sizes, strides = [int(each) for each in value.shape], [int(each) for each in value.strides]
    width = about["elem_size"]
    bytes_ = [each * width for each in reversed(strides[:-1])]
    bytes_.append(sizes[0] * (bytes_[-1] if bytes_ else width))  # as Triton spells it; nobody reads it
    element = about["elem_type"]
    packed = TensorMap(
        value.base, ELEMENTS.get(element, element), tuple(reversed(sizes)), tuple(bytes_), tuple(reversed(about["block_size"])),
        about["swizzle"], int(value.padding == "nan"),
    )  # fmt: skip
    return [packed, *(Number(each, 4) for each in sizes), *(Number(each, 8) for each in strides)]
