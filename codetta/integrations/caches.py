"""Caches of Hugging Face's beside slots: what one holds is put into slots, and what slots hold into one.

A slot holds the tokens of a sequence that somebody sees, one after the other; a cache has columns, some of them padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from codetta.errors import Reason
from codetta.integrations.huggingface import Slots


def why_not(cache: Any, length: int, batch: int) -> list[Reason]:
    """Why a cache cannot be continued or left behind with so many columns."""
    from transformers.cache_utils import (
        Cache,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        StaticCache,
        StaticLayer,
        StaticSlidingWindowLayer,
    )  # fmt: skip

    rule = "a cache of keys and values"
    if type(cache) not in (Cache, DynamicCache, StaticCache):
        return [Reason(rule, f"this one is a {type(cache).__name__}")]
    if cache.offloading:
        return [Reason(rule, "this one is offloaded")]
    if cache.layer_class_to_replicate not in (None, DynamicLayer):
        return [Reason(rule, f"its layers are {cache.layer_class_to_replicate.__name__}")]
    for each in cache.layers:
        if type(each) not in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer):
            return [Reason(rule, f"it has a {type(each).__name__}")]
        if getattr(each, "record_past", False):
            return [Reason(rule, "it records its past")]
        if type(each) is StaticLayer and each.max_cache_len < length:
            return [Reason("room in the cache", f"{length} tokens, {each.max_cache_len} places")]
        if each.is_initialized and each.keys.numel() and each.keys.shape[0] != batch:
            return [Reason(rule, f"it has {each.keys.shape[0]} sequences, the call {batch}")]
    return []


def length_of(cache: Any) -> int:
    """Columns that are there, 0 for none."""
    return 0 if cache is None else int(cache.get_seq_length())


def columns(layer: Any, length: int) -> tuple[Tensor, Tensor, int]:
    """Keys and values of the last columns of `length`, and which is the first of them."""
    size = layer.keys.shape[2]
    if hasattr(layer, "max_cache_len"):  # a static one, which is not full or has moved along
        size = min(size, length)
        return layer.keys[:, :, :size], layer.values[:, :, :size], length - size
    return layer.keys, layer.values, length - size


def put(slots: Slots, cache: Any, seen: Tensor) -> list[int]:
    """Fill slots with the columns of a cache that are seen (batch, columns), a tensor on the host; returns how many those are."""
    batch, length = seen.shape
    lengths = [int(each) for each in seen.sum(1)]
    whole = bool(seen.all())
    for at, layer in enumerate(cache.layers):
        keys, values, first = columns(layer, length)
        if whole:
            slots.keys[at][:, :, first:length], slots.values[at][:, :, first:length] = keys, values
            continue
        for row in range(batch):
            those = seen[row].nonzero()[:, 0]
            those = those[those >= first]
            end, source = lengths[row], (those - first).to(keys.device)
            begin = end - len(those)
            slots.keys[at][row, :, begin:end] = keys[row][:, source]
            slots.values[at][row, :, begin:end] = values[row][:, source]
    slots.places.copy_(torch.tensor(lengths))
    return lengths


def leave(cache: Any, slots: Slots, known: list[int], starts: list[int], count: int) -> None:
    """Put into a cache `count` columns more, with what slots hold of each sequence from its `known` place on, and padding before
    `starts`."""
    if count < 1:
        return
    for at, (keys, values) in enumerate(zip(slots.keys, slots.values, strict=True)):
        made = [room.new_zeros(room.shape[0], room.shape[1], count, room.shape[3]) for room in (keys, values)]
        for row, (place, start) in enumerate(zip(known, starts, strict=True)):
            for new, room in zip(made, (keys, values), strict=True):
                new[row, :, start:] = room[row, :, place : place + count - start]
        cache.update(*made, at)
