"""Processors of logits that a step can do without Hugging Face: as settings of Sampling, and as tokens that are barred for a while.

Order matters to the former, which are taken in Hugging Face's only. What is barred is -inf, before or after a penalty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from codetta.barring import Barred
from codetta.errors import ArgumentError
from codetta.sampling import Sampling

ALWAYS = 2**62  # more tokens than anybody makes


@dataclass
class Settings:
    """How a step chooses."""

    sampling: Sampling
    barred: Barred


def settings_of(processors: Any, length: int, vocabulary: int, draws: bool) -> Settings | None:
    """The same as processors, for tokens behind `length` others; None if one of them is of another kind. draws: or takes the likeliest."""
    from transformers.generation import logits_process as known

    names = {
        known.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
        known.TemperatureLogitsWarper: ("temperature", "temperature"), known.TopKLogitsWarper: ("top_k", "top_k"),
        known.TopPLogitsWarper: ("top_p", "top_p"), known.MinPLogitsWarper: ("min_p", "min_p"),
    }  # fmt: skip
    order = list(names)
    found: dict[str, Any] = {"temperature": 1.0} if draws else {}
    until: dict[int, int] = {}
    words: list[tuple[int, ...]] = []
    last = -1
    for each in processors:
        if type(each) in names:
            at = order.index(type(each))
            usual = getattr(each, "filter_value", -math.inf) == -math.inf and not getattr(
                each, "prompt_ignore_length", None
            )
            if at <= last or not usual or (at and not draws):
                return None
            last = at
            name, attribute = names[type(each)]
            found[name] = getattr(each, attribute)
            continue
        more = _barred(each, length, vocabulary)
        if more is None or last > 0:
            return None
        words += more.words
        for token, count in more.until.items():
            until[token] = max(count, until.get(token, 0))
    left = Barred({token: count for token, count in until.items() if count > 0}, tuple(words))
    try:
        return Settings(Sampling(**found), left)
    except ArgumentError:
        return None


def _barred(processor: Any, length: int, vocabulary: int) -> Barred | None:
    """What a processor bars; None if it does something else."""
    from transformers.generation import logits_process as known

    kind = type(processor)
    if kind is known.MinLengthLogitsProcessor:
        return Barred(dict.fromkeys(processor.eos_token_id.tolist(), processor.min_length - length))
    if kind is known.MinNewTokensLengthLogitsProcessor:
        count = processor.min_new_tokens + processor.prompt_length_to_skip - length
        return Barred(dict.fromkeys(processor.eos_token_id.tolist(), count))
    if kind is known.SuppressTokensLogitsProcessor:
        return Barred(dict.fromkeys(processor.suppress_tokens.tolist(), ALWAYS))
    if kind is known.SuppressTokensAtBeginLogitsProcessor and processor.begin_index == length:
        return Barred(dict.fromkeys(processor.begin_suppress_tokens.tolist(), 1))
    if kind is known.NoBadWordsLogitsProcessor:
        words = list(processor.sequence_bias)
        if all(
            0 <= token < vocabulary for each in words for token in each
        ):  # Hugging Face says what is wrong with others
            alone = {each[0]: ALWAYS for each in words if len(each) == 1}
            return Barred(alone, tuple(each for each in words if len(each) > 1))
    return None
