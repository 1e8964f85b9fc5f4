"""`codetta bench train`: a forward and a backward pass of a published shape, against the peers: time, memory, loss."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from codetta.bench.peers import contender, training_step
from codetta.bench.run import Row
from codetta.bench.shapes import SHAPES, build, has_loss
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
    if name in SHAPES and not has_loss(name):
        raise ArgumentError("model", f"{name!r} has no loss of its own", "use a causal language model")
    gpu = device.type == "cuda"
    model = build(name, device, torch.bfloat16, layers).train()  # Liger leaves out the logits only here
    shape = SHAPES[name]
    batch, length = (shape.batch, shape.length) if gpu else (2, 64)
    tokens = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
    models = {each: made for each in implementations if (made := contender(each, model)) is not None}
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


def _step(run: Callable[..., Any], tokens: torch.Tensor) -> Callable[[], float]:
    step = training_step(run, tokens)
    return lambda: float(step())


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
