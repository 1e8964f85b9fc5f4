"""Hugging Face's `generate` of a compiled model: what a Generator can do goes to one, everything else to the original loop, which calls
the model's own forward."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from codetta.errors import ArgumentError
from codetta.generate import Generator
from codetta.integrations.dynamo import backend_of
from codetta.integrations.huggingface import plain

# Settings that a Generator has, or that change nothing for it.
UNDERSTOOD = {
    "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "pad_token_id",
    "bos_token_id", "eos_token_id", "use_cache", "transformers_version", "_from_model_config",
}  # fmt: skip
LEAST = 1024  # tokens of a cache: a longer call makes another one, and compiles anew


def takes_over(model: nn.Module) -> None:
    """Give the model a `generate` that knows of Generators. A copy of the model has it, too, and passes everything on."""
    model.generate = MethodType(generate, model)  # type: ignore[assignment]


class _Kept:
    """The Generator of a compiled model, for one call at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.busy = False  # so that a call out of a call (a streamer's, a criterion's) does not take it away
        self.generator: Generator | None = None
        self.plain: Any = None


@torch.no_grad()
def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As Hugging Face's: prompts (B, T), padded on the left, and what follows them, padded on the right."""
    if backend_of(self) is not None and _is_common(self):
        kept = _kept(self)
        with kept.lock:
            asked = None if kept.busy else _asked(self, *args, **kwargs)
            generator = _generator(self, kept, asked) if asked is not None else None
            if asked is not None and generator is not None:
                kept.busy = True
                try:
                    return _answered(generator, asked)
                finally:
                    kept.busy = False
    return type(self).generate(_plain(self), *args, **kwargs)


def _plain(model: Any) -> Any:
    """The model as Hugging Face's loop calls it: its own forward, which has less to do for each call than a compiled one."""
    if backend_of(model) is None:
        return model
    kept = _kept(model)
    if kept.plain is None:
        kept.plain = plain(model)
    else:  # what the loop has noted on it stays
        vars(kept.plain).update(vars(plain(model)))
    return kept.plain


def _is_common(model: Any) -> bool:
    """Whether its `generate` is everybody's: others take other arguments, in another order."""
    from transformers import GenerationMixin

    return type(model).generate is GenerationMixin.generate


def _kept(model: Any) -> _Kept:
    frame = model._compiled_call_impl
    found: _Kept = vars(frame).setdefault("generation", _Kept())
    return found


def _answered(generator: Generator, asked: _Asked) -> Tensor:
    generator.ends = asked.ends
    answers = generator(asked.prompts, tokens=asked.tokens, **asked.sampling)
    longest = max(len(each.tokens) for each in answers)
    rows = [each.tokens + [asked.pad] * (longest - len(each.tokens)) for each in answers]
    return torch.cat([asked.ids, torch.tensor(rows, dtype=asked.ids.dtype, device=asked.ids.device)], 1)


@dataclass(frozen=True)
class _Asked:
    ids: Tensor
    prompts: list[list[int]]
    tokens: int
    ends: set[int]
    pad: int
    sampling: dict[str, Any]

    @property
    def context(self) -> int:
        return self.ids.shape[1] + self.tokens


def _asked(model: Any, inputs: Tensor | None = None, generation_config: Any = None, **named: Any) -> _Asked | None:
    """What is asked for, if a Generator can do it."""
    ids = inputs if inputs is not None else named.pop("input_ids", None)
    mask = named.pop("attention_mask", None)
    if model.training or not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        return None
    settings, rest = model._prepare_generation_config(generation_config, **named)
    usual = settings._get_default_generation_params()
    given = {name for name, value in settings.to_dict().items() if value not in (None, False, usual.get(name))}
    if given - UNDERSTOOD or any(value is not None for value in rest.values()):
        return None
    if settings.max_new_tokens is None or settings.max_new_tokens < 1 or settings.use_cache is False:
        return None
    if 0 in (settings.temperature, settings.repetition_penalty):
        return None  # the original says what is wrong with that
    ends = settings.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = settings.pad_token_id if settings.pad_token_id is not None else (ends[0] if ends else 0)
    if mask is None:
        if pad in ids[:, 0].tolist():
            return None  # a prompt or padding: the original knows how it guesses
        mask = torch.ones_like(ids)
    seen = mask.bool()
    if seen.shape != ids.shape or not bool(seen[:, -1].all()) or bool((seen[:, :-1] & ~seen[:, 1:]).any()):
        return None
    sampling: dict[str, Any] = {"repetition_penalty": settings.repetition_penalty or 1.0}
    if settings.do_sample:
        sampling |= {
            "temperature": settings.temperature or 1.0, "top_k": settings.top_k or 0, "min_p": settings.min_p or 0.0,
            "top_p": 1.0 if settings.top_p is None else settings.top_p, "seed": int(torch.randint(2**62, ())),
        }  # fmt: skip
    prompts = [row[those].tolist() for row, those in zip(ids.cpu(), seen.cpu(), strict=True)]
    return _Asked(ids, prompts, settings.max_new_tokens, set(ends), pad, sampling)


def _generator(model: Any, kept: _Kept, asked: _Asked) -> Generator | None:
    """The one that was made for the last call, if it has room enough."""
    known = kept.generator
    if known is not None and known.decoder.context >= asked.context:
        return known
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or asked.context
    if asked.context > most:
        return None
    room = max(LEAST, 1 << (asked.context - 1).bit_length())
    try:
        kept.generator = Generator(model, context=min(room, most))
    except ArgumentError:
        return None  # a model that is no decoder
    return kept.generator
