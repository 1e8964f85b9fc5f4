"""`codetta bench grid`: models x sizes x {prefill, training}, as called and on the device, against peers at their best.

One model serves all sizes of a pass. torch.compile compiles anew for each size, so that its peers have no symbolic sizes;
Codetta compiles by its default. Codetta is called first at each size: what Dynamo learns about sizes belongs to the code of
the model, and a peer before it would have taught it that sizes change.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from codetta.bench.called import Timing, in_turns, noted, on_device, warmed
from codetta.bench.peers import LIGER, MODES, contender, liger_is_here, training_step
from codetta.bench.run import Row
from codetta.bench.shapes import SHAPES, build, has_loss, inputs
from codetta.errors import ArgumentError

PASSES = ("prefill", "train")
IMPLEMENTATIONS = ("eager", *MODES, *LIGER, "codetta")
ON_REQUEST = ("compile-max",)  # compiles for minutes
MODELS = (
    "llama-3.2-1b", "llama-7b", "llama-3-8b", "qwen3-0.6b", "qwen2-1.5b", "gemma-2-2b", "phi-3-mini", "mistral-7b", "pythia-1b",
)  # fmt: skip
TRAINED = ("llama-3.2-1b", "llama-3-8b", "qwen3-0.6b", "gemma-2-2b", "phi-3-mini")
LAYERS = 4  # of every model but those below
WHOLE = ("llama-3.2-1b", "gpt2", "bert-base", "tiny")
GPU_SIZES = {
    "prefill": ((1, 16), (1, 64), (1, 128), (1, 512), (4, 512), (1, 2048), (8, 2048), (2, 8192)),
    "train": ((1, 512), (4, 512), (4, 2048), (2, 8192)),
}
CPU_SIZES = {"prefill": ((1, 16), (1, 64)), "train": ((1, 64),)}

Size = tuple[int, int]


@dataclass(frozen=True)
class GridBench:
    """What to measure. Fields left empty follow the device and the pass."""

    device: torch.device
    models: tuple[str, ...] = ()
    sizes: tuple[Size, ...] = ()
    passes: tuple[str, ...] = PASSES
    layers: int = 0
    impls: tuple[str, ...] = ()
    seconds: float = 0.4  # of each contender in each cell

    def __post_init__(self) -> None:
        for argument, given, known in (
            ("models", self.models, tuple(SHAPES)), ("pass", self.passes, PASSES), ("impls", self.impls, IMPLEMENTATIONS),
        ):  # fmt: skip
            unknown = [each for each in given if each not in known]
            if unknown:
                raise ArgumentError(argument, f"{unknown[0]!r} is unknown", f"use some of {', '.join(known)}")
        if self.layers < 0 or self.seconds <= 0:
            wrong = "layers" if self.layers < 0 else "seconds"
            raise ArgumentError(wrong, f"{getattr(self, wrong)} is too small", "pass a positive number")
        if any(name.startswith("liger") for name in self.impls) and not liger_is_here():
            raise ArgumentError("impls", "Liger is not installed", "pip install liger-kernel, or leave it out")

    def names(self, which: str) -> tuple[str, ...]:
        """The models of a pass."""
        if self.device.type != "cuda" and not self.models:
            return ("tiny",)
        if which == "train":
            return tuple(name for name in self.models if has_loss(name)) if self.models else TRAINED
        return self.models or MODELS

    def contenders(self, which: str) -> tuple[str, ...]:
        """Their names; Liger is for training, and what compiles for minutes is for those who ask."""
        given = self.impls or tuple(name for name in IMPLEMENTATIONS if name not in ON_REQUEST)
        return tuple(name for name in given if name not in LIGER or (which == "train" and liger_is_here()))

    def depth(self, name: str) -> int:
        """The number of layers to build with; 0 is as published."""
        return self.layers or (0 if name in WHOLE else LAYERS)

    def jobs(self) -> list[tuple[str, str, tuple[Size, ...]]]:
        """(model, pass, sizes), in order."""
        default = GPU_SIZES if self.device.type == "cuda" else CPU_SIZES
        names = dict.fromkeys(name for which in self.passes for name in self.names(which))
        return [
            (name, which, self.sizes or default[which])
            for name in names
            for which in self.passes
            if name in self.names(which)
        ]


def parse_grid_sizes(given: str) -> tuple[Size, ...]:
    """Sizes such as 1x16,4x512."""
    found = []
    for text in given.split(",") if given else []:
        parts = text.strip().split("x")
        if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ArgumentError("sizes", f"{text!r} is not BATCHxLENGTH", "pass, for example, --sizes 1x16,4x512")
        found.append((int(parts[0]), int(parts[1])))
    return tuple(found)


def measure_grid(bench: GridBench, note: Callable[[str], None] = lambda text: None) -> Iterator[list[Row]]:
    """The rows of each cell, as soon as it is measured; `note` hears what is left out, and why."""
    for name, which, sizes in bench.jobs():
        with opened(bench, name, which, note) as measurement:
            for size in sizes:
                if measurement.warm(size):
                    yield measurement.timed(size)


@contextmanager
def opened(
    bench: GridBench, name: str, which: str, note: Callable[[str], None] = lambda text: None
) -> Iterator[Measurement]:
    """A model's cells of one pass, to be measured; behind it, nothing is left of the model."""
    if bench.device.type == "cuda":
        torch.cuda.set_device(bench.device.index or 0)
    note(f"{name}, {which}: building and compiling")
    model = build(name, bench.device, torch.bfloat16, bench.depth(name)).train(which == "train")
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096):
        yield Measurement(bench, name, which, model, note)
    del model
    _free(bench.device)


class Measurement:
    """The contenders of one model in one pass. A size is warmed, which compiles it, and then timed."""

    def __init__(self, bench: GridBench, name: str, which: str, model: Any, note: Callable[[str], None]) -> None:
        self.bench, self.name, self.which, self.model, self.note = bench, name, which, model, note
        names = sorted(bench.contenders(which), key=lambda each: each != "codetta")
        self.runs = {each: made for each in names if (made := contender(each, model)) is not None}
        self.warmed: dict[Size, tuple[dict[str, Callable[[], Any]], dict[str, Timing], dict[str, float]]] = {}

    def _no_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def warm(self, size: Size) -> bool:
        """Compile for the size and call it a few times; False if the model cannot take so many tokens."""
        (batch, length), device = size, self.bench.device
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and length > longest:
            self.note(f"{self.name} takes no more than {longest} tokens: {batch}x{length} is left out")
            return False
        torch.manual_seed(0)
        if self.which == "train":
            named = {"tokens": torch.randint(0, self.model.config.vocab_size, (batch, length), device=device)}
        else:
            named = inputs(self.name, self.model, device, batch, length)
        calls = {each: _call(run, self.which, named) for each, run in self.runs.items()}
        timings: dict[str, Timing] = {}
        results: dict[str, torch.Tensor] = {}
        with torch.set_grad_enabled(self.which == "train"):
            for each, call in calls.items():
                timings[each] = timing = warmed(call, device, self._no_gradients)
                with noted(timing):
                    if not timing.error:
                        results[each] = _first(call()).detach().float().cpu()
                self._no_gradients()
                if timing.error:
                    _release(device)
        self.warmed[size] = calls, timings, _distances(results)
        return True

    def rest(self) -> None:
        """Give others what memory is not in use."""
        _release(self.bench.device)

    def timed(self, size: Size) -> list[Row]:
        """The rows of a size that is warm."""
        (batch, length), device = size, self.bench.device
        calls, timings, distances = self.warmed.pop(size)
        going = {each: call for each, call in calls.items() if not timings[each].error}
        with torch.set_grad_enabled(self.which == "train"):
            in_turns(going, timings, device, self.bench.seconds, self._no_gradients)
            on_device(going, timings, device, self._no_gradients)
        self._no_gradients()
        rows = []
        for each in (each for each in self.bench.contenders(self.which) if each in timings):
            row: Row = {"model": self.name, "layers": self.model.config.num_hidden_layers, "batch": batch}
            row |= {"length": length, "pass": self.which, "impl": each}
            row |= _figures(timings[each], self.model, device)
            rows.append(row | ({"distance": distances[each]} if each in distances else {}))
        return rows


def _call(run: Callable[..., Any], which: str, named: dict[str, Any]) -> Callable[[], Any]:
    return training_step(run, named["tokens"]) if which == "train" else lambda: run(**named)


def _first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else next(iter(result.values()))


def _distances(results: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of the logits, or of the loss, from eager's, relative; random weights in bfloat16 leave some per cent."""
    plain = results.get("eager")
    if plain is None:
        return {}
    return {
        name: round(float((each - plain).norm() / plain.norm()), 5) for name, each in results.items() if name != "eager"
    }


def _figures(timing: Timing, model: Any, device: torch.device) -> Row:
    if timing.error:
        return {"ms": None, "device_ms": None, "gib": None, "error": timing.error}
    weights = sum(each.nbytes for each in model.parameters())
    gib = round((weights + timing.peak) / 2**30, 3) if device.type == "cuda" else None
    row: Row = {"ms": round(statistics.median(timing.ms), 4), "device_ms": timing.device_ms, "gib": gib}
    if timing.device_ms is not None:
        row |= {"device_ms": round(timing.device_ms, 4), "device_by": timing.device_by}
    row["host_ms"] = round(statistics.median(timing.host_ms), 4)
    return row | {"first_ms": round(timing.first_ms, 1), "calls": len(timing.ms)}


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _free(device: torch.device) -> None:
    """Between models nothing that was compiled or allocated is of further use."""
    torch._dynamo.reset()
    _release(device)
