"""Recorded calls on a GPU: the same bits as without a recording, and nobody's tensors are overwritten."""

from __future__ import annotations

import copy
import ctypes
import gc
import threading
from typing import Any

import pytest
import torch
from test_bound import all_bindings
from torch import Tensor, nn
from zoo import ZOO, outputs

import codetta
from codetta.bench import shapes
from codetta.runtime import recorded
from codetta.runtime.memsets import memsets_become_kernels
from codetta.runtime.replay import Replay
from codetta.runtime.speculation import Call

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

GPU = torch.device("cuda", 0)
CALLS = 7  # until everything has been recorded, and some more


def replays_of(model: Any) -> list[Replay]:
    every = [each for bindings in all_bindings(model) for each in bindings.replays.values()]
    return [each.current for each in every if each.current is not None]


def llama(train: bool = False) -> nn.Module:
    torch._dynamo.reset()
    return shapes.build("tiny", GPU, torch.bfloat16).train(train)


def tokens(batch: int = 2, length: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=GPU).manual_seed(seed)
    return torch.randint(0, 1000, (batch, length), device=GPU, generator=generator)


def both(model: nn.Module) -> tuple[Any, Any]:
    """The model compiled with recorded graphs, and without."""
    plain = codetta.compile(copy.deepcopy(model), options=codetta.Options(graphs="off"))
    return codetta.compile(copy.deepcopy(model)), plain


def gradients(model: Any) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def same(x: list[Tensor], y: list[Tensor]) -> bool:
    return len(x) == len(y) and all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bert", "ada_norm"])
@torch.no_grad()
def test_recorded_calls_repeat_their_bits(name: str) -> None:
    torch._dynamo.reset()
    entry = ZOO[name]
    args, kwargs = entry.example(2, 64, GPU, torch.bfloat16)
    recorded, plain = both(entry.model(torch.bfloat16, GPU))
    want = [each.clone() for each in outputs(plain(*args, **kwargs))]
    results = [outputs(recorded(*args, **kwargs)) for _ in range(CALLS)]
    assert replays_of(recorded), [each.why for b in all_bindings(recorded) for each in b.replays.values()]
    # All of them are still what they were: no call has written over the results of an earlier one.
    assert all(same(want, each) for each in results)


@torch.no_grad()
def test_other_inputs_parameters_and_streams() -> None:
    model = llama()
    recorded, plain = both(model)
    for _ in range(CALLS):
        recorded(tokens(), use_cache=False)
    assert replays_of(recorded)

    def check(seed: int) -> None:
        x = tokens(seed=seed)
        assert torch.equal(recorded(x, use_cache=False).logits, plain(x, use_cache=False).logits)

    check(1)
    for each in (recorded, plain):
        each.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    check(2)
    torch.manual_seed(0)
    new = torch.randn_like(plain.model.layers[0].mlp.up_proj.weight) / 16
    for each in (recorded, plain):
        each.model.layers[0].mlp.up_proj.weight = nn.Parameter(new.clone())
    check(3)
    other = torch.cuda.Stream(GPU)
    other.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(other):
        for seed in range(4, 9):
            check(seed)
    torch.cuda.current_stream(GPU).wait_stream(other)
    for seed in range(9, 9 + CALLS):
        check(seed)


@torch.no_grad()
def test_threads_and_two_streams_at_once() -> None:
    recorded, plain = both(llama())
    want = [plain(tokens(seed=seed), use_cache=False).logits.clone() for seed in range(4)]
    for _ in range(CALLS):
        recorded(tokens(), use_cache=False)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(seed: int, own: bool) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(GPU) if own else torch.cuda.default_stream(GPU)):
            x = tokens(seed=seed)
            for _ in range(30):
                found = recorded(x, use_cache=False).logits
                torch.cuda.current_stream(GPU).synchronize()
                if not torch.equal(found, want[seed]):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed, seed % 2 == 1)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@torch.no_grad()
def test_a_capture_around_a_compiled_model() -> None:
    recorded, plain = both(llama())
    x = tokens()
    for _ in range(CALLS):
        recorded(x, use_cache=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = recorded(x, use_cache=False).logits
    x.copy_(tokens(seed=5))
    graph.replay()
    assert torch.equal(found, plain(x, use_cache=False).logits)


def test_memsets_become_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each width, in memory that is used again behind them."""
    replaced: list[int] = []
    monkeypatch.setattr(
        recorded, "memsets_become_kernels", lambda *given: replaced.append(memsets_become_kernels(*given))
    )
    driver, widths = ctypes.CDLL("libcuda.so.1"), {torch.uint8: "D8", torch.int16: "D16", torch.int32: "D32"}
    made = [torch.empty(size, dtype=dtype, device=GPU) for size in (1, 300, 4097) for dtype in widths]
    sums = torch.empty(len(made), dtype=torch.int64, device=GPU)

    def function() -> torch.Tensor:
        for at, each in enumerate(made):
            stream = ctypes.c_void_p(torch.cuda.current_stream(GPU).cuda_stream)
            memset = getattr(driver, f"cuMemset{widths[each.dtype]}Async")
            assert not memset(ctypes.c_uint64(each.data_ptr()), at + 2, ctypes.c_size_t(each.numel()), stream)
            sums[at] = each.long().sum()
            each.fill_(1)
        return sums

    with recorded.recording:
        graph, found = recorded.record(function, GPU)
    assert replaced == [len(made)]
    for _ in range(3):
        found.fill_(-1)
        graph.replay()
        assert found.tolist() == [(at + 2) * each.numel() for at, each in enumerate(made)]
    assert all(bool((each == 1).all()) for each in made)


@torch.no_grad()
def test_memory_of_many_lengths_is_bounded() -> None:
    recorded, plain = both(llama())
    for _ in range(5):
        for length in range(20, 60):
            recorded(tokens(1, length), use_cache=False, logits_to_keep=1)
    torch.cuda.synchronize()
    assert sum(each.bytes for each in replays_of(recorded)) <= torch.cuda.get_device_properties(GPU).total_memory // 16
    x = tokens(1, 33, seed=3)
    assert torch.equal(recorded(x, use_cache=False).logits, plain(x, use_cache=False).logits)


def loss_of(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(input_ids=x, labels=x, use_cache=False).loss
    return found


def test_recorded_steps_repeat_their_bits() -> None:
    recorded, plain = both(llama(train=True))
    x = tokens(2, 128)
    loss_of(plain, x).backward()
    want = gradients(plain)
    for _ in range(CALLS + 3):
        recorded.zero_grad(set_to_none=True)
        loss_of(recorded, x).backward()
        assert same(gradients(recorded), want)
    assert len(replays_of(recorded)) == 2, [each.why for b in all_bindings(recorded) for each in b.replays.values()]


def test_gradients_add_up_and_stay() -> None:
    recorded, plain = both(llama(train=True))
    for seed in range(CALLS + 3):
        recorded.zero_grad(set_to_none=True)
        loss_of(recorded, tokens(2, 128, seed)).backward()
    kept = gradients(recorded)
    mine = [each.grad for each in recorded.parameters() if each.grad is not None]  # lent
    for each in (recorded, plain):
        each.zero_grad(set_to_none=True)
    for seed in (20, 21, 22):
        for each in (recorded, plain):
            loss_of(each, tokens(2, 128, seed)).backward()
    assert same(gradients(recorded), gradients(plain))
    assert same(mine, kept)
    del recorded
    gc.collect()
    torch.empty(1 << 28, device=GPU).fill_(float("nan"))
    assert same(mine, kept)


def test_two_forwards_before_their_backwards() -> None:
    recorded, plain = both(llama(train=True))
    for seed in range(CALLS + 3):
        recorded.zero_grad(set_to_none=True)
        loss_of(recorded, tokens(2, 128, seed)).backward()
    for each in (recorded, plain):
        each.zero_grad(set_to_none=True)
        losses = [loss_of(each, tokens(2, 128, seed)) for seed in (30, 31)]
        for loss in reversed(losses):
            loss.backward()
    assert same(gradients(recorded), gradients(plain))


def test_training_goes_the_same_way() -> None:
    models = both(llama(train=True))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in models]
    for seed in range(12):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = loss_of(model, tokens(2, 128, seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses), seed


@torch.no_grad()
def test_speculative_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that came before is launched first; whatever has changed since, the answer is that of a plain call."""
    recorded, plain = both(llama())
    served: list[bool] = []
    results = Call.results

    def watched(self: Call, *args: Any) -> Any:
        found = results(self, *args)
        served.append(found is not None)
        return found

    monkeypatch.setattr(Call, "results", watched)

    def check(seed: int, **more: Any) -> bool:
        """Whether the call was launched first."""
        served.clear()
        x = tokens(seed=seed)
        found = [each(x, use_cache=False, **more).logits for each in (recorded, plain)]
        assert torch.equal(*found), seed
        return any(served)

    for seed in range(CALLS):
        check(seed)
    assert all(check(seed) for seed in range(5))
    kept = [recorded(tokens(seed=seed), use_cache=False).logits for seed in range(3)]
    for seed, each in enumerate(kept):
        assert torch.equal(each, plain(tokens(seed=seed), use_cache=False).logits)

    for model in (recorded, plain):  # written to
        model.model.norm.weight.mul_(1.5)
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    for seed in range(CALLS):
        check(seed)
    for model in (recorded, plain):  # replaced
        model.model.layers[1].mlp = copy.deepcopy(plain.model.layers[0].mlp)
    for seed in range(3):
        check(seed)
    for model in (recorded, plain):  # moved
        for each in model.parameters():
            each.data = each.data.clone()
    gc.collect()
    torch.cuda.empty_cache()
    for seed in range(3):
        check(seed)
    for model in (recorded, plain):  # another module, in the middle
        model.model.layers[0].register_forward_hook(lambda module, args, result: result * 0.5)
    for seed in range(3):
        check(seed)
