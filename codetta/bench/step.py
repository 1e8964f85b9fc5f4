"""`codetta bench step`: where the time of a decoder's step goes inside its one kernel, phase by phase, for rings of several sizes."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import Tensor

from codetta.backends.cuda_phases import Ring, runs_on
from codetta.bench.decode import PERSISTENT, decoder_of, step_of, turn_of, turns_of
from codetta.bench.run import Row
from codetta.errors import ArgumentError
from codetta.runtime.whole import OneKernel, looked_at
from codetta.steps import Attend, Phase

WRAP = 2**32  # nanoseconds, after which the clock begins anew


def ring_named(text: str) -> Ring:
    """BYTES:PIECES: of a slot, and in flight."""
    parts = text.split(":")
    if len(parts) != 2 or not all(each.isdecimal() and int(each) for each in parts) or int(parts[0]) % 1024:
        raise ArgumentError(
            "ring", f"is {text!r}", "pass bytes of a slot, a multiple of 1024, and pieces in flight: 16384:4"
        )
    return Ring(*map(int, parts))


@torch.no_grad()
def measure_step(
    name: str, device: torch.device, context: int, rings: Sequence[Ring | None], layers: int = 0, rounds: int = 3
) -> list[Row]:
    """For each ring (None: as usual) a row of the whole step, in milliseconds from token to token, and one for each kind of phase."""
    if not runs_on(device, measured=False):
        raise ArgumentError("device", f"{device} cannot run a step as one kernel", "use an NVIDIA GPU from Hopper on")
    model, causal, slots, tokens = decoder_of(name, device, 1, context, layers, torch.bfloat16)
    kernels, turns = {}, {}
    for ring in rings:
        torch._dynamo.reset()
        with looked_at(ring, timeline=True) as look:
            step = step_of(PERSISTENT, causal, slots)
            step(tokens, slots.places)
        kernel = next((each for each in look.kernels if each.memory is not None), None)
        if kernel is None:
            raise ArgumentError("model", f"a step of {name} is no single kernel", "`codetta explain --decode` says why")
        label = str(kernel.ring)
        kernels[label], turns[label] = kernel, turn_of(PERSISTENT, step, slots, tokens.clone())
    times = turns_of(turns, device, rounds)
    rows: list[Row] = []
    for label, kernel in kernels.items():
        shape: Row = {"model": name, "layers": model.config.num_hidden_layers, "context": context, "ring": label}
        rows.append(shape | {"phase": "all", "times": len(kernel.whole.phases), "ms": round(times[label], 4)})
        rows += [shape | row for row in timeline(kernel)]
    del model, causal, slots, kernels, turns
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return rows


def timeline(kernel: OneKernel) -> list[Row]:
    """Of the last step, a row for each kind of phase, in microseconds.

    wait: from the last warp of all that is done with the phase before until a block, on the average, has what it needs. work: from the
    last block that has it until the last warp is done. uneven: how long blocks wait for the last of them, on the average. pieces: of weights
    that lie ready when the work begins. What attention has before it joins its parts counts as waiting.
    """
    stamps = kernel.stamps.long().cpu() % WRAP
    times = (stamps[..., :3] - stamps[0, 0, 0, 0]) % WRAP / 1e3
    received, ended = times[..., 1].amax(-1), times[..., 2].amax(-1)  # phases, blocks
    last = ended.amax(-1)
    wait, work = received[1:].mean(-1) - last[:-1], last - received.amax(-1)
    uneven, pieces = last - ended.mean(-1), stamps[..., 3].float().mean((1, 2))
    kinds: dict[str, list[int]] = {}
    for number, phase in enumerate(kernel.whole.phases):
        kinds.setdefault(_label(phase), []).append(number)
    rows: list[Row] = []
    for label, numbers in kinds.items():
        behind = [number - 1 for number in numbers if number]  # what the first one waits for is not in the kernel

        def mean(values: Tensor, numbers: list[int] = numbers) -> float:
            return round(float(values[numbers].mean()), 2) if numbers else 0.0

        row: Row = {"phase": label, "times": len(numbers), "wait_us": mean(wait, behind), "work_us": mean(work)}
        rows.append(row | {"uneven_us": mean(uneven), "pieces": mean(pieces)})
    return rows


def _label(phase: Phase) -> str:
    if isinstance(phase, Attend):
        return "attention"
    return f"{phase.program.k} -> {phase.program.cols}"
