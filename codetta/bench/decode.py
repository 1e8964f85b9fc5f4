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
from codetta.bench.run import Row
from codetta.bench.shapes import SHAPES, build
from codetta.errors import ArgumentError
from codetta.integrations.huggingface import Causal, Slots
from codetta.runtime.recorded import Recorded
from codetta.sampling import likeliest

PERSISTENT = "codetta-persistent"
IMPLEMENTATIONS = ("eager", "compile", "codetta", PERSISTENT)
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
    model, causal, slots, tokens = decoder_of(name, device, batch, context, layers, dtype)
    if device.type != "cuda" or batch > 1:
        implementations = tuple(each for each in implementations if each != PERSISTENT)  # one row, on a GPU
    steps = {each: step_of(each, causal, slots) for each in implementations}
    logits = {each: step(tokens, slots.places).float().clone() for each, step in steps.items()}  # compiles, too
    turns = {each: turn_of(each, step, slots, tokens.clone()) for each, step in steps.items()}
    times = turns_of(turns, device, rounds)
    moved = weight_bytes(model) + slots.bytes
    del steps, turns
    exact = _in_fp32(model, slots)(tokens, slots.places)
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
            "kl": float(f"{_kl(exact, logits[each]):.3g}"),
        }
        rows.append(row)
    del model, causal, slots
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def decoder_of(
    name: str, device: torch.device, batch: int, context: int, layers: int, dtype: torch.dtype
) -> tuple[Any, Causal, Slots, Tensor]:
    """A model of random weights, with a full cache but for the newest place, and tokens to go on with."""
    if name in SHAPES and not SHAPES[name].model.endswith(("CausalLM", "LMHeadModel")):
        raise ArgumentError("model", f"{name!r} writes no text", "use a causal language model")
    model = build(name, device, dtype, layers)
    causal = Causal(model)
    _, keys, values = causal.prompt(torch.zeros((1, 1), dtype=torch.int64, device=device))
    slots = causal.slots(batch, context, keys, values)
    for room in [*slots.keys, *slots.values]:
        room.normal_()
    slots.places.fill_(context - 1)
    return model, causal, slots, torch.randint(0, model.config.vocab_size, (batch,), device=device)


def step_of(name: str, causal: Causal, slots: Slots) -> Any:
    if name.startswith("codetta"):  # as a Generator has it
        schedule = "persistent" if name == PERSISTENT else "chain"
        turn = codetta.compile(causal.turn, options=codetta.Options(schedule=schedule), dynamic=True)
        slots.only_context_varies()

        def ours(tokens: Tensor, places: Tensor) -> Tensor:
            torch._dynamo.mark_static(tokens, 0)
            logits: Tensor = turn(tokens, places, slots.keys, slots.values)
            return logits

        return ours
    step: Any = causal.step(slots)
    if name == "compile":
        return torch.compile(step, mode="reduce-overhead" if slots.places.is_cuda else "default", dynamic=False)
    return step


def turn_of(name: str, step: Any, slots: Slots, tokens: Tensor) -> Callable[[], Tensor]:
    """A token to the next, at a place that stays the same."""

    def turn() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        logits = step(tokens, slots.places)
        return likeliest(logits, tokens) if ours else tokens.copy_(logits.argmax(-1))

    ours = name.startswith("codetta")
    return Recorded(turn, [tokens]) if ours else turn


def _in_fp32(model: Any, slots: Slots) -> Callable[[Tensor, Tensor], Tensor]:
    """The step of the same model in fp32, with the same cache. The model is changed."""
    model.float()
    wide = Slots([each.float() for each in slots.keys], [each.float() for each in slots.values], slots.places)
    return Causal(model).step(wide)


def _kl(exact: Tensor, logits: Tensor) -> float:
    """Of next-token distributions, in nats."""
    want, got = (each.double().log_softmax(-1) for each in (exact, logits))
    return float((want.exp() * (want - got)).sum(-1).mean())


def turns_of(turns: dict[str, Callable[[], Tensor]], device: torch.device, rounds: int) -> dict[str, float]:
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
