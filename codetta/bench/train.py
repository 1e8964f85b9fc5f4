"""`codetta bench train`: a forward and a backward pass of a published shape, against the peers: time, memory, loss."""

from __future__ import annotations

import copy
import gc
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import codetta
from codetta.bench.prefill import SHAPES, build
from codetta.bench.run import Row
from codetta.errors import ArgumentError

IMPLEMENTATIONS = ("eager", "compile", "liger", "liger-compile", "codetta")


def measure_train(
    name: str,
    device: torch.device,
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    layers: int = 0,
    rounds: int = 10,
) -> list[Row]:
    """One row for each contender: the median time of a step without the optimiser, peak memory on a GPU, and the loss."""
    if name in SHAPES and not SHAPES[name].model.endswith(("CausalLM", "LMHeadModel")):
        raise ArgumentError("model", f"{name!r} has no loss of its own", "use a causal language model")
    gpu = device.type == "cuda"
    model = build(name, device, torch.bfloat16, layers).train()  # Liger leaves out the logits only here
    shape = SHAPES[name]
    batch, length = (shape.batch, shape.length) if gpu else (2, 64)
    tokens = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
    models = {each: made for each in implementations if (made := _contender(each, model)) is not None}
    steps = {each: _step(made, tokens) for each, made in models.items()}
    losses = {each: step() for each, step in steps.items()}  # compiles, too
    times, memory = _turns(models, steps, device, rounds)
    rows: list[Row] = []
    for each in steps:
        row: Row = {"model": name, "layers": model.config.num_hidden_layers, "tokens": batch * length, "impl": each}
        row |= {"ms": round(times[each], 3), "loss": round(losses[each], 5)}
        if gpu:
            row["gib"] = round(memory[each] / 2**30, 3)
        rows.append(row)
    del model, models, steps
    gc.collect()
    torch._dynamo.reset()
    return rows


def _contender(name: str, model: Any) -> Any:
    """The model as somebody runs it; parameters are shared, but for Liger, which changes the modules. None: not installed here."""
    if name.startswith("liger"):
        changed = _Liger(model) if _Liger.is_here() else None
        return changed and (torch.compile(changed, dynamic=False) if name.endswith("compile") else changed)
    if name == "compile":
        return torch.compile(copy.copy(model), dynamic=False)
    if name == "codetta":
        return codetta.compile(copy.copy(model))
    return model


class _Liger(torch.nn.Module):
    """A copy of the model with Liger's kernels. Some of them replace functions of transformers' module: only while this one runs."""

    def __init__(self, model: Any) -> None:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        super().__init__()
        self.model = copy.deepcopy(model)
        self.names = vars(sys.modules[type(model).__module__])
        before = dict(self.names)
        _apply_liger_kernel_to_instance(self.model)
        self.theirs = {name: each for name, each in self.names.items() if before.get(name) is not each}
        self.own = {name: before[name] for name in self.theirs if name in before}
        self.names.update(self.own)

    @staticmethod
    def is_here() -> bool:
        return importlib.util.find_spec("liger_kernel") is not None

    @contextmanager
    def patched(self) -> Iterator[None]:
        self.names.update(self.theirs)
        try:
            yield
        finally:
            self.names.update(self.own)

    def forward(self, **named: Any) -> Any:
        return self.model(**named)


def _step(model: Any, tokens: torch.Tensor) -> Callable[[], float]:
    inside = model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model

    def step() -> float:
        with inside.patched() if isinstance(inside, _Liger) else nullcontext():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        return float(loss.detach())

    return step


def _turns(
    models: dict[str, Any], steps: dict[str, Callable[[], float]], device: torch.device, rounds: int
) -> tuple[dict[str, float], dict[str, int]]:
    """Milliseconds (median) of each, in an order that changes from round to round, and the bytes it needs at most.

    Bytes are those of a process that has this contender alone: its parameters, and what a step adds to all that is there.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    memory = dict.fromkeys(steps, 0)
    order, shuffle = list(steps), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            for model in models.values():
                model.zero_grad(set_to_none=True)
            before = 0
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            begin = time.perf_counter()
            steps[name]()  # ends with a number on the host: everything is done
            times[name].append((time.perf_counter() - begin) * 1000)
            if device.type == "cuda":
                own = sum(each.nbytes for each in models[name].parameters())
                memory[name] = max(memory[name], torch.cuda.max_memory_allocated() - before + own)
    return {name: statistics.median(each) for name, each in times.items()}, memory
