"""Device functions of the specialised loop that use Hopper's own instructions, in place of those in triton_lib."""

import triton
import triton.language as tl

from codetta.backends.triton_lib import erfc_of


@triton.jit
def reciprocal(x):
    """1 / x to one unit in the last place or two; a full division costs five more instructions for each element."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def erfc(x):
    size = tl.abs(x)
    return erfc_of(x, size, reciprocal(1.0 + 0.33 * size))
