"""Layers of Hugging Face's caches as a Decoder has them: in slots, for a step, and as the model made them, for a prompt.

Traced with the model. Classes of a module, and imported when there is a model: within a trace, Dynamo makes no objects of classes that it
finds in the variables of a function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer


class SlotLayer(CacheLayerMixin):
    """Keys and values in slots; a call's rows go to their places."""

    is_compileable, is_sliding = True, False

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """places: (batch, 1): where the rows of this call go."""
        super().__init__()
        self.keys, self.values, self.places, self.is_initialized = keys, values, places, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # all there from the beginning

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        samples = torch.arange(self.keys.shape[0], device=self.keys.device)[:, None]
        for room, rows in ((self.keys, key_states), (self.values, value_states)):
            torch.ops.aten.index_put_(room, [samples, None, self.places], rows.transpose(1, 2))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0  # positions are given, for each sequence its own

    def get_max_length(self) -> int:
        return self.keys.shape[2]


def slots(keys: list[Tensor], values: list[Tensor], places: Tensor) -> Cache:
    """A cache of which every layer lies in its slots."""
    return Cache(layers=[SlotLayer(*each, places) for each in zip(keys, values, strict=True)])


class PromptLayer(DynamicLayer):
    """Keys and values as the model made them. Nothing was there before: joined with nothing, they would be copied."""

    is_initialized: bool

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            raise ValueError("a prompt is read at once")
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


class PromptCache(DynamicCache):
    """A cache for one prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = PromptLayer
