"""Bound plans: the same bits as the plain way, whatever lies where at the next call, and a host path that does not grow."""

from __future__ import annotations

import copy
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import ZOO, outputs

import codetta
from codetta.integrations.dynamo import Backend, backend_of
from codetta.runtime import speculation
from codetta.runtime.bindings import MOST, Bindings
from codetta.runtime.bound import ALIGNMENT, Bound, packed
from codetta.runtime.invocation import Address, Invocation, Number, TensorMap
from codetta.runtime.launcher import Launches, library
from codetta.runtime.tape import Root


class Block(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.norm, self.last = nn.RMSNorm(width), nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.down(self.up(self.last(x)))


def all_bindings(model: Any) -> list[Bindings]:
    backend = backend_of(model)
    assert isinstance(backend, Backend)
    training = [each for made in backend.trainings for each in (made.first, made.second)]
    return [made.bindings for made in backend.executors] + training


def bound_of(model: Any) -> list[Bound]:
    return [value for each in all_bindings(model) for value in each.known.values() if isinstance(value, Bound)]


def same(x: list[Tensor], y: list[Tensor]) -> bool:
    return len(x) == len(y) and all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bert", "ada_norm", "post_norm_tied"])
def test_calls_that_come_again_repeat_their_bits(name: str) -> None:
    entry = ZOO[name]
    args, kwargs = entry.example(2, 12)
    with torch.no_grad():
        compiled = codetta.compile(entry.model())
        results = [[each.clone() for each in outputs(compiled(*args, **kwargs))] for _ in range(4)]
        assert bound_of(compiled), [each.known for each in all_bindings(compiled)]
        assert all(same(results[0], each) for each in results)
        # Other inputs of the same sizes, for which nothing was made.
        others, more = entry.example(2, 12)
        change = [each.flip(0) for each in others], {key: each.flip(0) for key, each in more.items()}
        torch.testing.assert_close(
            outputs(compiled(*change[0], **change[1])),
            outputs(entry.model()(*change[0], **change[1])),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "ada_norm"])
def test_steps_that_come_again_repeat_their_bits(name: str) -> None:
    entry = ZOO[name]
    args, kwargs = entry.example(2, 12)
    compiled = codetta.compile(entry.model().train())

    def step() -> list[Tensor]:
        compiled.zero_grad(set_to_none=True)
        loss = sum(each.float().square().mean() for each in outputs(compiled(*args, **kwargs)))
        assert isinstance(loss, Tensor)
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in compiled.parameters() if each.grad is not None)]

    first, *others = [step() for _ in range(4)]
    assert len(bound_of(compiled)) == 2, [each.known for each in all_bindings(compiled)]
    assert all(same(first, each) for each in others)


def test_two_forwards_before_their_backwards_keep_their_own_tensors() -> None:
    model = Block()
    compiled = codetta.compile(copy.deepcopy(model))
    x, y = torch.randn(5, 64), torch.randn(5, 64)
    for _ in range(3):
        compiled(x).sum().backward()
    compiled.zero_grad(set_to_none=True)
    first, second = compiled(x), compiled(y)
    first.sum().backward()
    second.square().sum().backward()
    model(x).sum().backward()
    model(y).square().sum().backward()
    for mine, plain in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-4, atol=1e-4)


def misplaced(x: Tensor) -> Tensor:
    """The same numbers, at an address that is no multiple of 16."""
    return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)


@torch.no_grad()
def test_inputs_may_lie_anywhere() -> None:
    model = Block().eval()
    compiled = codetta.compile(copy.deepcopy(model), dynamic=False)
    x = torch.randn(6, 64)
    for _ in range(3):
        compiled(x)
    assert bound_of(compiled)
    wide = torch.randn(6, 3, 64)
    for each in (torch.randn(6, 64), misplaced(x), torch.randn(20, 64)[7:13], wide[:, 1], torch.randn(64, 6).T):
        torch.testing.assert_close(compiled(each), model(each), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_inputs_that_shared_memory_may_part() -> None:
    w = torch.randn(64, 64)
    compiled = codetta.compile(lambda x, y: F.relu(x @ w) + y, dynamic=False)
    x = torch.randn(8, 64)
    for _ in range(4):
        torch.testing.assert_close(compiled(x, x), F.relu(x @ w) + x, rtol=1e-4, atol=1e-4)
    both = torch.randn(16, 64)
    for a, b in ((x, torch.randn(8, 64)), (both[:8], both[8:]), (both[8:], both[:8])):
        torch.testing.assert_close(compiled(a, b), F.relu(a @ w) + b, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_parameters_may_be_changed_replaced_and_moved() -> None:
    model = Block().eval()
    compiled = codetta.compile(copy.deepcopy(model))
    x = torch.randn(6, 64)
    for _ in range(3):
        compiled(x)

    def change(each: Any) -> None:
        each.down.weight.mul_(1.5)

    def replace(each: Any) -> None:
        torch.manual_seed(1)
        each.up.weight = nn.Parameter(torch.randn_like(each.up.weight))

    def move(each: Any) -> None:
        torch.manual_seed(2)
        each.gate.weight.data = torch.randn_like(each.gate.weight)

    def load(each: Any) -> None:
        torch.manual_seed(3)
        each.load_state_dict({name: torch.randn_like(value) for name, value in each.state_dict().items()}, assign=True)

    for act in (change, replace, move, load):
        act(model), act(compiled)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_memory_that_runs_out_leaves_nothing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block().eval()
    compiled = codetta.compile(copy.deepcopy(model))
    x = torch.randn(6, 64)
    for _ in range(3):
        compiled(x)
    (bound,) = bound_of(compiled)
    scope = bound._function.__globals__

    def full(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setitem(scope, "empty", full)
        with pytest.raises(torch.OutOfMemoryError):
            compiled(x)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_bound_plan_that_fails_is_done_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block().eval()
    compiled = codetta.compile(copy.deepcopy(model))
    x = torch.randn(6, 64)
    for _ in range(3):
        compiled(x)
    (bound,) = bound_of(compiled)

    def broken(*_: Any) -> None:
        raise ValueError("a launch that is broken")

    monkeypatch.delenv("CODETTA_RAISE", raising=False)
    monkeypatch.setitem(bound._function.__globals__, "launch", broken)
    with pytest.warns(RuntimeWarning, match="a call of the plan: ValueError: a launch that is broken"):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_threads_have_memory_of_their_own() -> None:
    model = Block().eval()
    compiled = codetta.compile(copy.deepcopy(model))
    for _ in range(3):
        compiled(torch.randn(33, 64))
    wrong: list[float] = []

    def work(seed: int) -> None:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            for _ in range(20):
                x = torch.randn(33, 64, generator=generator)
                error = float((compiled(x) - model(x)).abs().max())
                if error > 1e-4:
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_calls_of_both_modes(first: Any) -> None:
    model = Block().eval()
    compiled = codetta.compile(copy.deepcopy(model))
    x = torch.randn(6, 64)
    for mode in (first, torch.no_grad, torch.inference_mode, first):
        for _ in range(3):
            with mode():
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_hundred_lengths_are_bounded() -> None:
    model = Block().eval()
    compiled = codetta.compile(copy.deepcopy(model), dynamic=True)
    for _ in range(2):
        for length in range(2, 102):
            x = torch.randn(length, 64)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert all(len(each.known) <= MOST for each in all_bindings(compiled))


@torch.no_grad()
def test_launches_on_another_gpu_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second GPU where there is none: the thread's current device is a number here, and what is launched notes it."""
    current, noted = [0], list[int]()

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, current[0] = current[0], wanted.index
        try:
            yield
        finally:
            current[0] = before

    model = codetta.compile(nn.Sequential(Block(), Block()), dynamic=True)
    x, short = torch.randn(7, 64), torch.randn(3, 64)
    results = [model(x) for _ in range(3)], [model(short)]
    (bindings,) = all_bindings(model)
    (bound,) = bound_of(model)
    launch, plain = Launches.__call__, bindings.plain
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(Launches, "__call__", lambda self, *args: noted.append(current[0]) or launch(self, *args))
    monkeypatch.setattr(bindings, "plain", lambda args: noted.append(current[0]) or plain(args))
    for index in (1, 0):
        bindings.device, began = torch.device("cuda", index), len(noted)
        assert torch.equal(model(x), results[0][0]) and torch.equal(model(short), results[1][0])
        assert set(noted[began:]) == {index} and current == [0]

    def fails(*args: object) -> None:
        noted.append(current[0])
        raise torch.OutOfMemoryError("no memory")

    bindings.device = torch.device("cuda", 1)
    monkeypatch.setattr(Launches, "__call__", fails)
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    assert noted[-1] == 1 and current == [0]
    # What is started before the call has arrived anywhere.
    monkeypatch.setattr(Launches, "__call__", lambda self, *args: noted.append(current[0]) or launch(self, *args))
    monkeypatch.setattr(speculation, "pays_on", lambda device: True)
    monkeypatch.setattr(bindings, "plain", None)
    for _ in range(2):
        began = len(noted)
        assert torch.equal(model(x), results[0][0])
        assert set(noted[began:]) == {1} and current == [0]
    assert model._compiled_call_impl.kinds.tries == {next(iter(model._compiled_call_impl.kinds.tries)): 0}
    assert bound.device.type == "cpu"


def test_a_check_looks_at_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = codetta.compile(Block().eval())
    x = torch.randn(6, 64)
    monkeypatch.setenv("CODETTA_CHECK", "1")
    with torch.no_grad():
        for _ in range(4):
            compiled(x)
    assert not bound_of(compiled)


# ---- the buffer that results share


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 20), st.integers(0, 20)), max_size=30))
@settings(deadline=None)
def test_what_is_in_use_at_once_lies_apart(asked: list[tuple[int, int, int]]) -> None:
    like = torch.empty(0, device="meta")
    roots = [Root(at, "", 0, size, like, min(a, b), max(a, b)) for at, (size, a, b) in enumerate(asked)]
    offsets, total = packed(roots)
    places = [(root, begin, begin + max(root.bytes, 1)) for root, begin in zip(roots, offsets, strict=True)]
    for at, (root, begin, end) in enumerate(places):
        assert begin % ALIGNMENT == 0 and end <= total
        for other, start, stop in places[:at]:
            if root.first <= other.last and other.first <= root.last:
                assert end <= start or stop <= begin


# ---- the C function


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32), ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
)  # fmt: skip


def test_a_kernel_is_given_its_arguments_in_their_places() -> None:
    launched, encoded = [], []

    def launch(config: Any, function: int, parameters: Any, _: int) -> int:
        seen = config.contents
        words = [ctypes.c_uint64.from_address(parameters[at]).value for at in (0, 2)]
        number = ctypes.c_int32.from_address(parameters[1]).value
        mark = ctypes.c_uint64.from_address(parameters[3]).value
        assert parameters[3] % 64 == 0
        launched.append(
            (tuple(seen.grid), tuple(seen.block), seen.shared, seen.stream, seen.count, function, words, number, mark)
        )
        return 0

    def encode(
        where: int, element: int, rank: int, address: int, sizes: Any, strides: Any, box: Any, *rest: Any
    ) -> int:
        encoded.append((element, rank, address, sizes[:2], strides[:1], box[:2], rest[2:]))
        ctypes.c_uint64.from_address(where).value = address + 1
        return 0

    kept = LAUNCH(launch), ENCODE(encode)
    library().codetta_use(*(ctypes.cast(each, ctypes.c_void_p) for each in kept))
    try:
        described = TensorMap(Address(1, 64), 10, (128, 7), (256,), (64, 8), 3, 0)
        arguments = [Address(0, 32), Number(-5, 4), Address(2, 0), described]
        invocation = Invocation(1234, arguments, None, grid=(9, 1, 1), threads=128, shared=99, dependent=True)
        launches = Launches([invocation], lambda place: (place.root, place.offset))
        for first in (1000, 1000, 2000):
            launches(0, 1, (ctypes.c_uint64 * 3)(first, 4096, 5), 77)
        launches(0, 1, (ctypes.c_uint64 * 3)(0, 8192, 5), 77)
        launches(0, 0, (ctypes.c_uint64 * 3)(), 77)
    finally:
        library().codetta_use(None, None)
    assert [each[6] for each in launched] == [[1032, 5], [1032, 5], [2032, 5], [32, 5]]
    assert launched[0][:6] == ((9, 1, 1), (128, 1, 1), 99, 77, 1, 1234)
    assert {each[7] for each in launched} == {-5}
    assert [each[8] for each in launched] == [4161, 4161, 4161, 8257]
    # Encoded when its address has moved, and only then.
    assert [each[2] for each in encoded] == [4160, 8256]
    assert encoded[0] == (10, 2, 4160, [128, 7], [256], [64, 8], (3, 2, 0))


def test_a_launch_that_fails_says_so() -> None:
    kept = LAUNCH(lambda *_: 700), ENCODE(lambda *_: 0)
    library().codetta_use(*(ctypes.cast(each, ctypes.c_void_p) for each in kept))
    try:
        launches = Launches([Invocation(1, [], None, grid=(1, 1, 1), threads=32)], lambda place: (0, 0))
        with pytest.raises(codetta.errors.CodettaError, match="error 700 of the CUDA driver"):
            launches(0, 1, (ctypes.c_uint64 * 1)(), 0)
    finally:
        library().codetta_use(None, None)


# ---- what a call costs the host


class Chain(nn.Module):
    """As many programs as there are layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x)) + x
        return x


def calls_of(work: Callable[[], object]) -> int:
    """Function calls of Python and into C."""
    counted = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        counted[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counted[0]


@torch.no_grad()
def test_the_host_does_little_for_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = codetta.compile(Chain(65).eval())
    x = torch.randn(4, 16)
    for _ in range(3):
        compiled(x)
    (bound,) = bound_of(compiled)
    assert len(bound.launches.owners) == 65
    monkeypatch.setitem(bound._function.__globals__, "launch", lambda *_: None)  # kernels that do nothing
    counted = calls_of(lambda: compiled(x))
    # An address for each of 130 parameters, and next to nothing else: the launches themselves are one call.
    assert counted <= 2 * 65 + 400, counted
