"""`codetta bench generate`: text as people ask for it: the first token of a prompt and of several, and `generate` with its settings.

Times are of whole calls, by the clock on the wall. "first token" is a Generator's call for one token; any other setting is a call of Hugging
Face's `generate` for so many tokens, divided by their number, so that the prompt is in it.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import codetta
from codetta.bench.peers import sharing
from codetta.bench.run import Row
from codetta.bench.shapes import build, has_loss
from codetta.errors import ArgumentError

IMPLEMENTATIONS = ("eager", "codetta")
FIRST = "first token"
WARM = 4  # calls before the first that counts

Settings = dict[
    str, Callable[[Any, Tensor], dict[str, Any]]
]  # by name: arguments for a model and a prompt of so many tokens


def measure_generate(
    name: str, device: torch.device, prompt: int, tokens: int, batches: tuple[int, ...], only: tuple[str, ...] = (),
    implementations: tuple[str, ...] = IMPLEMENTATIONS, layers: int = 0, rounds: int = 5, note: Callable[[str], None] = lambda text: None,
) -> list[Row]:  # fmt: skip
    """A row for each setting and contender. The plain model runs the plain setting alone: it is a loop over its own forward."""
    if not has_loss(name):
        raise ArgumentError("model", f"{name!r} writes no text", "use a causal language model")
    settings = settings_of(tokens)
    unknown = [each for each in only if each not in (FIRST, *settings)]
    if unknown:
        raise ArgumentError("only", f"{unknown[0]!r} is unknown", f"use some of {', '.join((FIRST, *settings))}")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain = build(name, device, dtype, layers)
    plain.config.use_cache = plain.generation_config.use_cache = True
    plain.generation_config.eos_token_id, plain.generation_config.pad_token_id = None, 0
    compiled = codetta.compile(sharing(plain))
    torch.manual_seed(0)
    ids = torch.randint(3, plain.config.vocab_size, (max(batches), prompt), device=device)
    common: Row = {"model": name, "layers": plain.config.num_hidden_layers, "prompt": prompt}
    rows: list[Row] = []

    def add(setting: str, batch: int, count: int, calls: dict[str, Callable[[], Any]]) -> None:
        for impl, (ms, first_ms) in _timed(calls, device, rounds).items():
            row = common | {"batch": batch, "tokens": count, "setting": setting, "impl": impl}
            rows.append(row | {"ms": round(ms / count, 4), "first_ms": round(first_ms, 1)})
            note(
                f"{setting}, {batch} x {prompt}, {impl}: {ms / count:.3f} ms a token, the first call {first_ms / 1000:.1f} s"
            )

    if FIRST in only or not only:
        generator = codetta.Generator(compiled, context=min(2 * prompt + tokens, generator_limit(plain)))
        for batch in batches:
            given = ids[:batch].tolist()
            calls: dict[str, Callable[[], Any]] = {
                "eager": partial(_first, plain, ids[:batch]),
                "codetta": partial(generator, given, tokens=1),
            }
            add(FIRST, batch, 1, {each: calls[each] for each in implementations})
        del generator
    for setting, arguments in settings.items():
        if only and setting not in only:
            continue
        calls = {}
        for impl, model in (("eager", plain), ("codetta", compiled)):
            if impl in implementations and (impl == "codetta" or setting == "plain"):
                calls[impl] = partial(_generated, model, ids[:1], arguments)
        add(setting, 1, tokens, calls)
    return rows


def generator_limit(model: Any) -> int:
    return int(getattr(model.config, "max_position_embeddings", None) or 4096)


def _generated(model: Any, ids: Tensor, arguments: Callable[[Any, Tensor], dict[str, Any]]) -> Any:
    return model.generate(ids, **arguments(model, ids))


@torch.no_grad()
def _first(model: Any, ids: Tensor) -> list[int]:
    found: Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
    return found.tolist()


def _timed(calls: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, tuple[float, float]]:
    """Of each: milliseconds of a call, the median of rounds in an order that changes, and of the first one."""

    def once(call: Callable[[], Any]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) * 1000

    first = {name: once(call) for name, call in calls.items()}
    for call in calls.values():
        for _ in range(WARM):
            once(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(once(calls[name]))
    return {name: (statistics.median(each), first[name]) for name, each in times.items()}


def settings_of(tokens: int) -> Settings:
    """Arguments of `generate` that people pass, each beside the plain ones."""
    plain = {"max_new_tokens": tokens, "do_sample": False}

    def with_mask(ids: Tensor) -> dict[str, Any]:
        return plain | {"attention_mask": torch.ones_like(ids)}

    def right_padded(model: Any, ids: Tensor) -> dict[str, Any]:
        found = with_mask(ids)
        found["attention_mask"][:, -ids.shape[1] // 4 :] = 0
        return found

    def static(model: Any, ids: Tensor) -> dict[str, Any]:
        return with_mask(ids) | {"cache_implementation": "static"}

    def own_cache(model: Any, ids: Tensor) -> dict[str, Any]:
        from transformers import DynamicCache

        return with_mask(ids) | {"past_key_values": DynamicCache(config=model.config)}

    def processor(model: Any, ids: Tensor) -> dict[str, Any]:
        from transformers import LogitsProcessorList

        return with_mask(ids) | {"logits_processor": LogitsProcessorList([_Shifts()])}

    def criterion(model: Any, ids: Tensor) -> dict[str, Any]:
        from transformers import StoppingCriteriaList

        return with_mask(ids) | {"stopping_criteria": StoppingCriteriaList([_Never()])}

    return {
        "plain": lambda model, ids: with_mask(ids),
        "max_length": lambda model, ids: {"attention_mask": torch.ones_like(ids), "max_length": ids.shape[1] + tokens, "do_sample": False},
        "min_new_tokens": lambda model, ids: with_mask(ids) | {"min_new_tokens": tokens, "eos_token_id": 2},
        "sampled": lambda model, ids: with_mask(ids) | {"do_sample": True, "temperature": 0.8, "top_k": 50},
        "streamer": lambda model, ids: with_mask(ids) | {"streamer": _Silent()},
        "stopping_criteria": criterion,
        "logits_processor": processor,
        "no_repeat_ngram_size": lambda model, ids: with_mask(ids) | {"no_repeat_ngram_size": 4},
        "bad_words_ids": lambda model, ids: with_mask(ids) | {"bad_words_ids": [[5], [6, 7]]},
        "num_return_sequences": lambda model, ids: with_mask(ids) | {"do_sample": True, "num_return_sequences": 2},
        "return_dict_in_generate": lambda model, ids: with_mask(ids) | {"return_dict_in_generate": True, "output_scores": True},
        "right padding": right_padded,
        "static cache": static,
        "own cache": own_cache,
    }  # fmt: skip


class _Silent:
    """A streamer that drops what it is given."""

    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


class _Shifts:
    """A processor that changes nothing that counts."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 1.0


class _Never:
    """A criterion that never ends a sequence."""

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
