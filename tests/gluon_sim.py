"""Runs the generated text of a warp-specialised kernel on the CPU, since Triton's interpreter does not know Gluon.

The partitions of a block are threads of which one runs at a time; at every barrier, copy or fence any may go on.
Barriers have phases and are waited for by parity. Copies land when it pleases the scheduler, and so is read what a copy
takes away: until then the memory must not change. Matrix instructions read their operands from issue to wait. Shared
memory, and slots that a copy is on its way to, are full of NaN. Blocks run one after another.

Finds deadlocks, wrong phases, slots reused too early, missing fences, wrong addresses, results written twice or never.
Says nothing about speed, register layouts or the compiler.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from codetta.backends import gluon_lib, triton_lib

EAGERNESS = (0.02, 0.3, 0.9)  # how readily copies get on with it, against the threads
SPEEDS = (1.0, 0.1, 0.01)  # of the threads: some leave the others far behind


class KernelError(Exception):
    """The kernel did what it must not do."""


class Actor(threading.Thread):
    """A partition of the block's warps."""

    def __init__(self, block: Block, number: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        super().__init__(name=f"{function.__name__} {number}", daemon=True)
        self.block, self.function, self.arguments = block, function, arguments
        self.go = threading.Semaphore(0)
        self.speed = block.random.choice(SPEEDS)
        self.until: Callable[[], bool] | None = None
        self.line = 0  # of the text, where it waits
        self.products: list[tuple[Smem, Smem, Tensor, Tensor]] = []  # matrix instructions under way
        self.stores: list[Callable[[], None]] = []  # copies to global memory, in the order of issue
        self.unfenced: set[int] = set()  # buffers written since the last fence

    def run(self) -> None:
        self.go.acquire()
        try:
            if not self.block.error:
                self.function(*self.arguments)
                if self.stores or self.products:
                    raise KernelError(f"{self.name} ends with copies or matrix instructions under way")
        except SystemExit:  # the block has failed elsewhere
            pass
        except BaseException as error:
            self.block.error = self.block.error or error
        self.block.alive.remove(self)
        self.block.hand_on(self)


class Block:
    """One block of the grid."""

    def __init__(self, number: int, count: int, seed: int, seconds: float) -> None:
        self.number, self.count = Int(number), Int(count)
        self.random = random.Random(seed)
        self.eagerness = self.random.choice(EAGERNESS)
        self.deadline = time.monotonic() + seconds
        self.alive: list[Actor] = []
        self.current: Actor | None = None
        self.events: list[Callable[[], None]] = []  # what copies have still to do
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.loading = 0  # copies to shared memory on their way

    def pick(self) -> Actor | None:
        """Who runs next; copies take their turns in between."""
        while self.alive and not self.error:
            if time.monotonic() > self.deadline:
                self.error = KernelError("the simulation takes too long")
            ready = [actor for actor in self.alive if actor.until is None or actor.until()]
            if self.events and (not ready or self.random.random() < self.eagerness):
                try:
                    self.events.pop(self.random.randrange(len(self.events)))()
                except KernelError as error:
                    self.error = error
            elif ready:
                return self.random.choices(ready, [actor.speed for actor in ready])[0]
            else:
                waits = [f"{actor.name} at line {actor.line}" for actor in self.alive]
                self.error = KernelError(f"deadlock: {'; '.join(waits)}")
        return self.alive[0] if self.alive else None

    def hand_on(self, me: Actor | None) -> bool:
        """Wake whoever runs next; whether that is somebody else."""
        chosen = self.current = self.pick()
        if chosen is None:
            self.over.set()
        elif chosen is not me:
            chosen.go.release()
        return chosen is not me

    def turn(self, until: Callable[[], bool] | None = None) -> None:
        """Let others run; come back when the condition holds."""
        me = self.current
        if me is None:  # before the partitions start
            return
        me.until = until
        if self.hand_on(me):
            me.go.acquire()
        me.until = None
        if self.error:
            raise SystemExit

    def start(self, jobs: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self.alive = [Actor(self, number, *job) for number, job in enumerate(jobs)]
        threads = list(self.alive)
        for thread in threads:
            thread.start()
        self.hand_on(None)
        if not self.over.wait(max(self.deadline - time.monotonic(), 0) + 10):
            raise KernelError("a thread does not come back")
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        if self.loading:
            raise KernelError("the block ends with copies on their way")


block: Block  # the one that runs
writes: dict[int, Tensor]  # how often each element of a tensor was written, by its storage


class Int(int):
    """A scalar of the kernel."""

    def to(self, dtype: torch.dtype) -> Int:
        return self


def _closed(plain: Callable[[int, Any], Any]) -> Callable[[Int, Any], Any]:
    def method(self: Int, other: Any) -> Any:
        result = plain(self, other)
        return Int(result) if type(result) is int else result

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "radd", "rsub", "rmul", "rfloordiv", "rmod"):
    setattr(Int, f"__{_name}__", _closed(getattr(int, f"__{_name}__")))


def _range(*bounds: int) -> Iterator[Int]:
    return map(Int, range(*bounds))


class Barrier:
    """Counts arrivals and bytes; `phase` is how often it has been completed."""

    def __init__(self) -> None:
        self.phase = self.bytes = self.count = self.missing = 0

    def arrive(self, bytes: int = 0) -> None:
        self.bytes += bytes
        self.missing -= 1
        self.step()

    def step(self) -> None:
        if self.missing < 0:
            raise KernelError("a barrier has more arrivals in a phase than it waits for")
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


class Barriers(tuple[Barrier, ...]):
    def index(self, i: int) -> Barrier:  # type: ignore[override]
        return self[i]


class Smem:
    """Shared memory: runs of columns of at most 128 bytes lie one behind the other, as the copy engine leaves them."""

    def __init__(self, flat: Tensor, shape: list[int], transposed: bool = False) -> None:
        self.flat, self.shape, self.transposed = flat, shape, transposed

    def index(self, i: int) -> Smem:
        assert 0 <= i < self.shape[0]
        size = self.flat.numel() // self.shape[0]
        return Smem(self.flat[i * size : (i + 1) * size], self.shape[1:])

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Smem:
        assert dtype == self.flat.dtype and torch.Size(shape).numel() == self.flat.numel()
        return Smem(self.flat, shape)

    def permute(self, order: tuple[int, int]) -> Smem:
        return Smem(self.flat, self.shape, True)

    def view(self) -> Tensor:
        rows, cols = self.shape
        run = min(cols, 128 // self.flat.element_size())
        return self.flat.view(cols // run, rows, run)

    def bits(self) -> Tensor:
        return self.flat.view(torch.int16)

    def get(self) -> Tensor:
        whole = self.view().transpose(0, 1).reshape(self.shape)
        return whole.T if self.transposed else whole.clone()

    def set(self, x: Tensor) -> None:
        assert list(x.shape) == self.shape and x.dtype == self.flat.dtype, (x.shape, x.dtype, self.shape)
        view = self.view().transpose(0, 1)
        view.copy_(x.reshape(view.shape))

    def load(self, layout: object) -> Tensor:
        assert layout == self.shape[1], (layout, self.shape)
        block.turn()
        return self.get()

    def store(self, x: Tensor) -> None:
        block.turn()
        self.set(x)
        cast(Actor, block.current).unfenced.add(self.flat.data_ptr())


class Matrix:
    """A tensor descriptor."""

    def __init__(self, tensor: Tensor, shape: list[int], layout: object) -> None:
        self.tensor, self.shape, self.layout = tensor, list(shape), layout

    def window(self, at: list[int], whole: Tensor) -> Tensor:
        """What the copy engine reads or writes of a box: the part inside the matrix."""
        assert all(first >= 0 for first in at), at
        return whole[at[0] : at[0] + self.shape[0], at[1] : at[1] + self.shape[1]]


class Pointer:
    """Addresses in a tensor."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Offsets and mask in one shape; all offsets under the mask must exist."""
        mask = torch.as_tensor(True if mask is None else mask)
        offset, mask = torch.broadcast_tensors(torch.as_tensor(self.offset), mask)
        if not ((offset >= 0) & (offset < _flat(self.tensor).numel()) | ~mask).all():
            raise KernelError(f"an address outside of a tensor of {tuple(self.tensor.shape)}")
        return torch.where(mask, offset, 0), mask


def _flat(tensor: Tensor) -> Tensor:
    size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((size,), (1,))


def _counts(tensor: Tensor) -> Tensor:
    """How often each element of a tensor has been written; no result is written twice."""
    storage = tensor.untyped_storage()
    size = storage.nbytes() // tensor.element_size()
    whole = writes.setdefault(storage.data_ptr(), torch.zeros(size, dtype=torch.int32))
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Mbarrier:
    MBarrierLayout = object

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    def wait(self, barrier: Barrier, parity: int) -> None:
        cast(Actor, block.current).line = sys._getframe(1).f_lineno
        block.turn(lambda: barrier.phase & 1 != parity)

    def arrive(self, barrier: Barrier, pred: bool = True) -> None:
        block.turn()
        if pred:
            barrier.arrive()

    def expect(self, barrier: Barrier, bytes: int) -> None:
        block.turn()
        barrier.arrive(bytes)


class Tma:
    def async_copy_global_to_shared(self, matrix: Matrix, at: list[int], barrier: Barrier, slot: Smem) -> None:
        assert slot.shape == matrix.shape, (slot.shape, matrix.shape)

        def land() -> None:
            box = torch.zeros(matrix.shape, dtype=matrix.tensor.dtype)
            part = matrix.window(at, matrix.tensor)
            box[: part.shape[0], : part.shape[1]] = part
            slot.set(box)
            block.loading -= 1
            barrier.bytes -= box.numel() * box.element_size()
            barrier.step()

        slot.flat.fill_(torch.nan)  # the slot is the copy's from now on
        block.loading += 1
        block.events.append(land)
        block.turn()

    def async_copy_shared_to_global(self, matrix: Matrix, at: list[int], slot: Smem) -> None:
        assert slot.shape == matrix.shape, (slot.shape, matrix.shape)
        if any(slot.flat.data_ptr() in actor.unfenced for actor in block.alive):
            raise KernelError("a copy of what was written without a fence")
        issued, pending = slot.bits().clone(), [True]

        def read() -> None:
            if pending:
                pending.clear()
                if not torch.equal(issued, slot.bits()):
                    raise KernelError("a slot changes before the copy has read it")
                target = matrix.window(at, matrix.tensor)
                target.copy_(slot.get()[: target.shape[0], : target.shape[1]])
                if (matrix.window(at, _counts(matrix.tensor)).add_(1) > 1).any():
                    raise KernelError("an element of a result is written twice")

        block.events.append(read)
        cast(Actor, block.current).stores.append(read)
        block.turn()

    def store_wait(self, pendings: int) -> None:
        stores = cast(Actor, block.current).stores
        while len(stores) > pendings:
            stores.pop(0)()
        block.turn()


def fence_async_shared() -> None:
    if block.current:
        block.current.unfenced.clear()
    block.turn()


def warpgroup_mma(a: Smem, b: Smem, acc: Tensor, is_async: bool) -> Tensor:
    assert is_async
    block.turn()
    cast(Actor, block.current).products.append((a, b, a.bits().clone(), b.bits().clone()))
    return acc


def warpgroup_mma_wait(pendings: int, deps: list[Tensor]) -> Tensor:
    block.turn()
    products, acc = cast(Actor, block.current).products, deps[0]
    while len(products) > pendings:
        a, b, a_bits, b_bits = products.pop(0)
        if not (torch.equal(a_bits, a.bits()) and torch.equal(b_bits, b.bits())):
            raise KernelError("an operand changes while a matrix instruction reads it")
        acc = acc + a.get().float() @ b.get().float()
    return acc


class Language(SimpleNamespace):
    """`gl` and `tl`: what generated text and the device functions use of them."""

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: object) -> Smem | Barriers:
        if dtype == torch.int64:
            return Barriers(Barrier() for _ in range(shape[0]))
        return Smem(torch.full((torch.Size(shape).numel(),), torch.nan, dtype=dtype), shape)

    def convert_layout(self, x: Tensor, layout: int | None, assert_trivial: bool = False) -> Tensor:
        assert layout is None or x.shape[1] in (1, layout), (x.shape, layout)
        return x

    def reduce(self, x: Tensor, axis: int, function: Callable[..., Any]) -> Tensor:
        assert function.__name__ == "max_nan"
        return x.amax(axis)

    def load(self, pointer: Pointer, mask: Any = None, other: float = 0) -> Tensor:
        places, mask = pointer.places(mask)
        return torch.where(mask, _flat(pointer.tensor)[places], torch.tensor(other, dtype=pointer.tensor.dtype))

    def store(self, pointer: Pointer, value: Tensor, mask: Any = None) -> None:
        places, mask = pointer.places(mask)
        at = places[mask]
        _flat(pointer.tensor)[at] = value.broadcast_to(mask.shape)[mask].to(pointer.tensor.dtype)
        counts = _flat(_counts(pointer.tensor))
        if (counts.index_add_(0, at, torch.ones_like(at, dtype=counts.dtype)) > 1).any():
            raise KernelError("an element of a result is written twice")


def _either(tensors: Callable[..., Tensor], scalars: Callable[..., Any], x: Any, y: Any) -> Any:
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        found = scalars(x, y)
        return Int(found) if isinstance(found, int) else found
    like = x if isinstance(x, Tensor) else y
    return tensors(*(v if isinstance(v, Tensor) else torch.tensor(v, dtype=like.dtype) for v in (x, y)))


LANGUAGE = Language(
    bfloat16=torch.bfloat16, float16=torch.float16, float32=torch.float32, int8=torch.int8, int64=torch.int64,
    abs=torch.abs, exp=torch.exp, exp2=torch.exp2, log=torch.log, sqrt=torch.sqrt, rsqrt=torch.rsqrt, floor=torch.floor,
    erf=torch.erf, reshape=torch.reshape, permute=torch.permute, broadcast_to=torch.broadcast_to, sum=torch.sum,
    expand_dims=torch.unsqueeze, constexpr=object, static_range=_range, PropagateNan=SimpleNamespace(ALL=True),
    program_id=lambda axis: block.number, num_programs=lambda axis: block.count, cdiv=lambda x, y: Int(-(-x // y)),
    where=lambda ok, x, y: torch.where(torch.as_tensor(ok), x, y) if any(isinstance(v, Tensor) for v in (ok, x, y)) else (x if ok else y),
    maximum=lambda x, y, propagate_nan=True: _either(torch.maximum, max, x, y),
    minimum=lambda x, y, propagate_nan=True: _either(torch.minimum, min, x, y),
    arange=lambda first, end, layout=None: torch.arange(first, end),
    zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
    full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
    split=lambda x: (x[..., 0], x[..., 1]), join=lambda x, y: torch.stack((x, y), -1),
    inline_asm_elementwise=lambda text, constraints, values, **options: 1 / values[0],
    # A layout is known by the columns that it is for.
    NVMMADistributedLayout=lambda version, warps_per_cta, instr_shape: instr_shape[1],
    NVMMASharedLayout=SimpleNamespace(get_default_for=lambda shape, dtype: None),
    SliceLayout=lambda axis, layout: None,
    warp_specialize=lambda jobs, warps, registers: block.start(jobs),
)  # fmt: skip


def simulate(text: str, arguments: list[Any], blocks: int, seed: int, seconds: float = 20.0) -> None:
    """Run a kernel's source on CPU tensors and descriptors of such; a KernelError says what went wrong."""
    global block, writes
    gluon = SimpleNamespace(jit=lambda function=None, **options: function or (lambda given: given))
    names: dict[str, Any] = {
        "tl": LANGUAGE, "gl": LANGUAGE, "triton": gluon, "gluon": gluon, "tma": Tma(),
        "mbarrier": Mbarrier(), "fence_async_shared": fence_async_shared, "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait, "range": _range, "INTERPRETED": False,
    }  # fmt: skip
    for module in (triton_lib, gluon_lib):
        library = Path(str(module.__file__)).read_text()
        exec(library[library.index("@triton.jit") :], names)
    head, rest = text.split("@gluon.jit", 1)
    exec("\n" * head.count("\n") + "@gluon.jit" + rest, names)
    given = [_argument(argument) for argument in arguments]
    threads, writes = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        for number in range(blocks):
            block = Block(number, blocks, seed * 1000 + number, seconds)
            names["kernel"](*given)
    finally:
        torch.set_num_threads(threads)


def _argument(value: Any) -> Any:
    if hasattr(value, "block_shape"):
        return Matrix(value.base, value.block_shape, value.layout)
    return Pointer(value) if isinstance(value, Tensor) else Int(value)
