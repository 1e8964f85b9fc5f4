"""Attention as one operator: every kind of mask and of heads, with gradients, against PyTorch's own; and in compiled models."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from processors import FEWER
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import codetta
from codetta.attention import Attention
from codetta.backends import cpu_attention, cpu_build, triton_attention
from codetta.capture.kinds import packet_of
from codetta.integrations.dynamo import backend_of
from codetta.steps import Run

ours = torch.ops.codetta


def tensors(heads: int = 4, shared: int = 4, rows: int = 5, cols: int = 5, width: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, rows, width), (2, shared, cols, width), (2, shared, cols, width)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def masks(rows: int, cols: int) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    allowed = torch.rand(2, 1, rows, cols) > 0.3
    allowed[..., 0] = True
    return {"none": None, "bool": allowed, "added": torch.randn(rows, cols, dtype=torch.float64)}


@pytest.mark.parametrize("kernel", [None, SDPBackend.MATH], ids=["any", "math"])
@pytest.mark.parametrize("mask", ["none", "bool", "added", "causal"])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("width", [8, 7])
def test_gradients(mask: str, heads: int, shared: int, width: int, kernel: SDPBackend | None) -> None:
    """Of the kernel that PyTorch would take, and of those that must be gone through once more."""
    given = tensors(heads, shared, width=width)
    matrix = masks(5, 5).get(mask)
    how = (mask == "causal", 0.3, heads != shared)
    with sdpa_kernel(kernel) if kernel is not None else sdpa_kernel(list(SDPBackend.__members__.values())[1:]):
        found = ours.attention_forward(*given, matrix, *how)[0]
    expected = F.scaled_dot_product_attention(*given, matrix, is_causal=how[0], scale=0.3, enable_gqa=how[2])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.attention(*given, matrix, *how), expected)
    tangent = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, given, tangent), torch.autograd.grad(expected, given, tangent), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal: bool) -> None:
    given = tensors(2, 1, rows=3, cols=3)
    assert torch.autograd.gradcheck(lambda *each: ours.attention_forward(*each, None, causal, None, True)[0], given)


def test_nothing_to_attend_to() -> None:
    query, key, value = tensors(rows=0)
    out, *kept = Attention(False, None, False).forward(query, key, value, None)
    assert out.shape == query.shape
    found = Attention(False, None, False).backward(torch.zeros_like(out), out, *kept, query, key, value, None)
    assert [each.shape for each in found] == [query.shape, key.shape, value.shape]


class Attends(nn.Module):
    """Queries that share heads, a mask of sizes alone or one that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = [each(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for each in (self.q, self.k, self.v)]
        query, key, value = heads[0], *(each.repeat_interleave(2, 1) for each in heads[1:])
        if mask is None:
            mask = torch.arange(x.shape[1])[:, None] >= torch.arange(x.shape[1])
        return F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(given: bool, dynamic: bool) -> None:
    """One call each way; heads are not repeated, and a causal mask is called by its name."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(2, 6, 16, requires_grad=True)
    mask = torch.rand(6, 6) > 0.2 if given else None
    wanted = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x, mask).square().sum(), wanted)
    codetta.compile(model, dynamic=dynamic)
    found = torch.autograd.grad(model(x, mask).square().sum(), wanted)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    backend = backend_of(model)
    assert backend is not None
    (training,) = backend.trainings
    calls = [step.target for step in training.plan.steps if isinstance(step, Run)]
    forward, backward = (
        next(each for each in calls if packet_of(each) is packet)
        for packet in (ours.attention_forward, ours.attention_backward)
    )
    for each in (forward, backward):
        assert each.args[-1] is True and each.args[-6].meta["val"].shape[1] == 2


def test_a_mask_with_gradients_stays() -> None:
    """A learned bias: the kernel that makes its gradient is PyTorch's to choose."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.bias = nn.Linear(8, 24), nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*self.qkv(x)[:, None].chunk(3, -1), self.bias)

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Biased(), torch.randn(2, 5, 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    codetta.compile(model)
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


class Normed(nn.Module):
    """A norm before attention, in one of the ways in which a row of it is not a row of attention's arguments, or not that alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.rand(16) + 0.5)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.prefix = nn.Parameter(torch.randn(1, 2, 3, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = x + self.o(x)
        n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        order = (1, 2, 0, 3) if self.how == "rows first" else (0, 2, 1, 3)
        q, k, v = (each(n).view(*x.shape[:2], 2, 8).permute(order) for each in (self.q, self.k, self.v))
        if self.how == "prefix":
            k, v = (torch.cat((self.prefix.expand(k.shape[0], -1, -1, -1), each), 2) for each in (k, v))
        if self.how == "bent":
            q = q * q.abs()
        y = F.scaled_dot_product_attention(q, k, v)
        y = y + k.flip(2) if self.how == "read elsewhere" else y
        return (h, y, k) if self.how == "handed out" else (h, y)


@pytest.mark.parametrize("how", ["plain", "rows first", "prefix", "bent", "read elsewhere", "handed out"])
def test_norms_before_attention(how: str) -> None:
    """As many rows as samples, so that one taken for the other would fit."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Normed(how), torch.randn(4, 4, 16, requires_grad=True)
    wanted = [x, *(each for name, each in model.named_parameters() if name != "prefix" or how == "prefix")]

    def gradients() -> list[Tensor]:
        found = model(x)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(each.shape, generator=generator) for each in found]
        return list(torch.autograd.grad(sum((a * b).sum() for a, b in zip(found, weights, strict=True)), wanted))

    expected = gradients()
    codetta.compile(model)
    for mine, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    backend = backend_of(model)
    assert backend is not None
    (training,) = backend.trainings
    reasons = {str(reason) for reason in training.plan.graph.refusals.values()}
    assert any("its argument, as it is" in each for each in reasons) == (how == "plain")


# ---- a few queries over a cache: kernels of our own, a GPU's (without one in the interpreter) and the CPU's ---------------------

GPU = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[triton_attention, cpu_attention], ids=["triton", "cpu"])
def few(request: pytest.FixtureRequest) -> ModuleType:
    found: ModuleType = request.param
    return found


def cached(few: ModuleType, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    batch, heads, groups, length, depth, context, width = sizes
    torch.manual_seed(0)
    shapes = (batch, heads, length, depth), (batch, groups, context, depth), (batch, groups, context, width)
    return [torch.randn(shape).to(GPU if few is triton_attention else "cpu", dtype) for shape in shapes]


def seen(kind: str, query: Tensor, key: Tensor) -> Tensor | None:
    """Masks as caches have them: lengths, windows, paddings on the left, numbers that are added, every head its own."""
    batch, heads, length, _ = query.shape
    context = key.shape[2]
    torch.manual_seed(1)
    places, ends = torch.arange(context), torch.randint(0, context, (batch, 1))
    masks: dict[str, Tensor | None] = {
        "none": None,
        "lengths": (places <= ends)[:, None, None],
        "windows": ((places <= ends) & (places > ends - 10))[:, None, None],
        "paddings": (places >= ends)[:, None, None],
        "added": torch.where(places <= ends, torch.randn(batch, context), -torch.inf)[:, None, None].to(query.dtype),
        "finite": torch.where(places <= ends, 0.0, torch.finfo(query.dtype).min)[:, None, None].to(query.dtype),
        "heads": (torch.rand(batch, heads, length, context) > 0.5) | (places == ends)[:, None, None],
        "queries": (places <= ends[:, :, None] - torch.arange(length)[:, None]).unsqueeze(1) | (places == 0),
    }
    mask = masks[kind]
    return None if mask is None else mask.to(query.device)


def exactly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    times = query.shape[1] // key.shape[1]
    wide = [query.double(), *(each.double().repeat_interleave(times, 1) for each in (key, value))]
    added = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return F.scaled_dot_product_attention(*wide, added)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["none", "lengths", "windows", "paddings", "added", "finite", "heads", "queries"])
@pytest.mark.parametrize(
    "sizes", [(1, 4, 2, 1, 16, 100, 16), (2, 8, 2, 1, 64, 131, 64), (3, 4, 4, 2, 96, 65, 96), (1, 6, 1, 3, 40, 1, 24)]
)
def test_a_few_queries(few: ModuleType, sizes: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    query, key, value = cached(few, sizes, dtype)
    mask = seen(kind, query, key)
    assert few.takes(query, key, value, mask)
    found = few.attend(query, key, value, mask, query.shape[-1] ** -0.5)
    truth = exactly(query, key, value, mask)
    limit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    assert (found.double() - truth).norm() <= limit * truth.norm()
    assert found.equal(few.attend(query, key, value, mask, query.shape[-1] ** -0.5))


@pytest.mark.parametrize("kind", ["none", "lengths", "windows", "added", "queries"])
def test_many_pairs_are_not_split(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block reads all of a context and writes the result itself, zeros where nothing is seen."""
    monkeypatch.setattr(triton_attention, "_splits", lambda *_: 1)
    for dtype, limit in ((torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10), (torch.float32, 1e-5)):
        query, key, value = cached(triton_attention, (3, 8, 2, 2, 40, 131, 24), dtype)
        mask = seen(kind, query, key)
        if mask is not None and mask.dtype == torch.bool:
            mask[1] = False
        found = triton_attention.attend(query, key, value, mask, 40**-0.5)
        truth = exactly(query, key, value, mask).nan_to_num(0.0)
        assert (found.double() - truth).norm() <= limit * truth.norm()
        assert mask is None or mask.dtype != torch.bool or not found[1].any()


def test_who_sees_nothing_gets_zeros(few: ModuleType) -> None:
    query, key, value = cached(few, (2, 4, 2, 1, 16, 70, 16), torch.float32)
    mask = torch.zeros(2, 1, 1, 70, dtype=torch.bool, device=query.device)
    mask[1, ..., 3] = True
    found = few.attend(query, key, value, mask, 0.25)
    assert not found[0].any()
    torch.testing.assert_close(found[1], value[1, :, 3:4].repeat_interleave(2, 0))


def test_what_nobody_sees_is_not_read(few: ModuleType) -> None:
    """A cache holds whatever was there before."""
    query, key, value = cached(few, (2, 4, 2, 1, 16, 200, 16), torch.float32)
    mask = seen("windows", query, key)
    assert mask is not None
    want = few.attend(query, key, value, mask, 0.25)
    hidden = ~mask.any(2).any(1)
    for each in (key, value):
        each.transpose(1, 2)[hidden] = torch.inf
    key.transpose(1, 2)[hidden] = torch.nan
    first = hidden.long().argmin(1)  # positions before the first and behind the last that is seen
    last = hidden.shape[1] - hidden.long().flip(1).argmin(1)
    assert all(bool(hidden[at, : first[at]].all()) and bool(hidden[at, last[at] :].all()) for at in range(2))
    found = few.attend(query, key, value, mask, 0.25)
    torch.testing.assert_close(found, want)


def test_a_cache_that_lies_otherwise(few: ModuleType) -> None:
    """Rows before heads in memory, and a part of a longer cache."""
    query, key, value = cached(few, (2, 4, 2, 1, 16, 90, 16), torch.float32)
    turned = [each.transpose(1, 2).contiguous().transpose(1, 2)[:, :, 5:75] for each in (key, value)]
    found = few.attend(query, *turned, None, 0.25)
    torch.testing.assert_close(found, exactly(query, *turned, None).float())


def test_what_the_kernel_leaves_to_others(few: ModuleType) -> None:
    query, key, value = cached(few, (1, 4, 2, 1, 16, 8, 16), torch.float32)
    assert not few.takes(query.double(), key.double(), value.double(), None)
    assert not few.takes(query.expand(-1, -1, 17, -1), key, value, None)  # more queries than a few
    assert not few.takes(query[:, :3], key, value, None)
    assert not few.takes(query[:0], key[:0], value[:0], None)
    assert not few.takes(query, key[:, :, :0], value[:, :, :0], None)


def test_many_parts_and_threads() -> None:
    """Parts of a long context are joined in its order, however many threads there are."""
    query, key, value = cached(cpu_attention, (2, 6, 2, 2, 32, 1301, 48), torch.bfloat16)
    for kind in ("none", "lengths", "windows", "queries"):
        mask = seen(kind, query, key)
        before, results = torch.get_num_threads(), []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(cpu_attention.attend(query, key, value, mask, 32**-0.5))
        torch.set_num_threads(before)
        assert all(each.equal(results[0]) for each in results[1:])
        truth = exactly(query, key, value, mask)
        assert (results[0].double() - truth).norm() <= 2.0**-7 * truth.norm()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "strided"])
def test_masks_of_any_type(kind: str) -> None:
    """Numbers of another type than the queries', and a mask whose positions do not lie side by side."""
    query, key, value = cached(cpu_attention, (2, 4, 2, 3, 16, 70, 16), torch.float32)
    mask = torch.randn(2, 4, 3, 70)
    mask[..., 40:] = -torch.inf
    mask = mask.transpose(1, 3).contiguous().transpose(1, 3) if kind == "strided" else mask.to(getattr(torch, kind))
    found = cpu_attention.attend(query, key, value, mask, 0.25)
    torch.testing.assert_close(found.double(), exactly(query, key, value, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flags", FEWER.values(), ids=FEWER)
def test_portable_attention(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on processors that have less than this one."""
    monkeypatch.setattr(cpu_build, "_machine_flags", lambda: flags)
    library = cpu_build.load_attention()
    monkeypatch.setattr(cpu_attention, "_kernel", lambda: library)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)):
        query, key, value = cached(cpu_attention, (2, 4, 2, 1, 40, 67, 32), dtype)
        for kind in ("none", "windows", "added", "heads"):
            mask = seen(kind, query, key)
            truth = exactly(query, key, value, mask)
            found = cpu_attention.attend(query, key, value, mask, 40**-0.5)
            assert (found.double() - truth).norm() <= limit * truth.norm()


def test_who_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few queries on the CPU are ours, unless somebody insists on a kernel of PyTorch's, or there is no compiler."""
    query, key, value = cached(cpu_attention, (1, 4, 2, 1, 16, 20, 16), torch.float32)
    mask, calls = seen("lengths", query, key), []
    attend = cpu_attention.attend
    monkeypatch.setattr(cpu_attention, "attend", lambda *given: calls.append(1) or attend(*given))
    how = Attention(False, None, True)
    want = how(query, key, value, mask)
    assert calls == [1]
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(how(query, key, value, mask), want)
    monkeypatch.setattr(cpu_attention, "_kernel", lambda: None)
    torch.testing.assert_close(how(query, key, value, mask), want)
    assert calls == [1]


SHAPES = [  # of queries and of keys and values, which PyTorch repeats over what they do not have
    ((2, 4, 6, 8), (2, 1, 9, 8)), ((2, 4, 6, 8), (1, 4, 9, 8)), ((2, 1, 6, 8), (2, 4, 9, 8)), ((2, 4, 6, 8), (4, 9, 8)),
    ((4, 6, 8), (1, 9, 8)), ((2, 3, 4, 6, 8), (2, 3, 1, 9, 8)), ((2, 3, 4, 6, 8), (2, 3, 4, 9, 8)),
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_keys_that_are_broadcast(queries: tuple[int, ...], keys: tuple[int, ...], dynamic: bool) -> None:
    """Without being told that heads are shared: the gradients of keys and values are summed over whatever they were repeated for."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    given = [torch.randn(shape, requires_grad=True) for shape in (queries, keys, keys)]
    mask = torch.randn(queries[-2], keys[-2])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    compiled = codetta.compile(attend, dynamic=dynamic)
    results = [[call(*given), *torch.autograd.grad(call(*given).sin().sum(), given)] for call in (compiled, attend)]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), attend(*given), rtol=1e-4, atol=1e-5)
