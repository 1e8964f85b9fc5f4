"""`codetta bench decode`: one more token for each sequence, of a published shape, against eager and torch.compile, and the read stream."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import codetta
from codetta.bench.prefill import SHAPES, build
from codetta.bench.run import Row
from codetta.errors import ArgumentError
from codetta.integrations.huggingface import Causal, Slots
from codetta.runtime.recorded import Recorded

IMPLEMENTATIONS = ("eager", "compile", "codetta")
SPAN = 0.3  # seconds that a contender runs in each round
MOST = 256  # steps in that time


@torch.no_grad()
def measure_decode(
    name: str,
    device: torch.device,
    batch: int,
    context: int,
    read_tbs: float,
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    layers: int = 0,
    rounds: int = 3,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Row]:
    """One row for each contender: milliseconds from token to token with so much context, and the share of the read stream that the bytes
    of weights and cache make of it."""
    if name in SHAPES and not SHAPES[name].model.endswith(("CausalLM", "LMHeadModel")):
        raise ArgumentError("model", f"{name!r} writes no text", "use a causal language model")
    model = build(name, device, dtype, layers)
    causal = Causal(model)
    _, keys, values = causal.prompt(torch.zeros((1, 1), dtype=torch.int64, device=device))
    slots = causal.slots(batch, context, keys, values)
    for room in [*slots.keys, *slots.values]:
        room.normal_()
    slots.places.fill_(context - 1)
    tokens = torch.randint(0, model.config.vocab_size, (batch,), device=device)
    turns = {each: _turn(each, causal, slots, tokens.clone()) for each in implementations}
    first = {each: turn().tolist() for each, turn in turns.items()}  # compiles, too
    times = _turns(turns, device, rounds)
    moved = weight_bytes(model) + slots.bytes
    rows: list[Row] = []
    for each, ms in times.items():
        share = moved / ms / 1e9 / read_tbs
        row: Row = {
            "model": name,
            "layers": model.config.num_hidden_layers,
            "batch": batch,
            "context": context,
            "dtype": str(dtype).removeprefix("torch."),
            "impl": each,
        }
        row |= {
            "ms": round(ms, 4),
            "stream_share": round(share, 4),
            "same": first[each] == first[next(iter(first))],
        }
        rows.append(row)
    del model, causal, slots, turns
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _turn(name: str, causal: Causal, slots: Slots, tokens: Tensor) -> Callable[[], Tensor]:
    """A token to the next, at a place that stays the same."""
    step: Any = causal.step(slots)
    if name == "compile":
        step = torch.compile(step, mode="reduce-overhead" if tokens.is_cuda else "default", dynamic=False)
    elif name == "codetta":
        step = codetta.compile(step, dynamic=False)

    def turn() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return tokens.copy_(step(tokens, slots.places).argmax(-1))

    return Recorded(turn, [tokens]) if name == "codetta" else turn


def _turns(turns: dict[str, Callable[[], Tensor]], device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds of each (median of rounds, in an order that changes), the host's share included where it shows."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def run(turn: Callable[[], Tensor], steps: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(steps):
            turn()
        wait()
        return (time.perf_counter() - begin) / steps

    counts = {}
    for name, turn in turns.items():
        run(turn, 3)
        counts[name] = max(3, min(MOST, int(SPAN / run(turn, 3))))
    times: dict[str, list[float]] = {name: [] for name in turns}
    order, shuffle = list(turns), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(run(turns[name], counts[name]) * 1000)
    return {name: statistics.median(each) for name, each in times.items()}


def weight_bytes(model: Any) -> int:
    """Bytes of parameters that a step reads: all but a table that is only looked up in."""
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    return sum(each.nbytes for each in model.parameters()) - (0 if tied else table.nbytes)
