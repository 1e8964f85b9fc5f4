"""Hugging Face's causal language models as two functions: of a prompt, and of one more token for each sequence.

The cache is one tensor of keys and one of values for each layer, in place for good; each sequence has a length of its own, in memory of
the device. transformers is imported when a model is given: Codetta does without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from codetta.errors import ArgumentError

SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass
class Slots:
    """Room for the keys and values of `batch` sequences of up to `context` tokens."""

    keys: list[Tensor]  # a layer each: (batch, heads, context, head)
    values: list[Tensor]
    places: Tensor  # (batch,): where the next token of each sequence goes

    @property
    def context(self) -> int:
        return self.keys[0].shape[2]

    @property
    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in [*self.keys, *self.values])

    def only_context_varies(self, *others: Tensor) -> None:
        """Tell Dynamo that of all sizes the context alone is to be a symbol; others: tensors of one entry for each sequence."""
        for each in [*self.keys, *self.values]:
            torch._dynamo.mark_static(each, [0, 1, 3])
        for each in (self.places, *others):
            torch._dynamo.mark_static(each, 0)

    def hold(self, keys: list[Tensor], values: list[Tensor]) -> bool:
        """Whether tensors like these go into them: the model may have changed its dtype or device since they were made."""
        kinds = [[(each.dtype, each.device, each.shape[1], each.shape[3]) for each in [*k, *v]] for k, v in
                 ((self.keys, self.values), (keys, values))]  # fmt: skip
        return kinds[0] == kinds[1]

    def put(self, slots: slice | list[int], keys: list[Tensor], values: list[Tensor], lengths: Tensor) -> None:
        """Prompts', as (prompts, heads, length, head). What stands behind the length of each is nobody's: a step writes its own there
        before anybody looks."""
        for rooms, found in ((self.keys, keys), (self.values, values)):
            for room, each in zip(rooms, found, strict=True):
                room[slots, :, : each.shape[2]] = each
        self.places[slots] = lengths


def plain(model: nn.Module, kind: type | None = None) -> Any:
    """The same module, with the same parameters, submodules and hooks, that calls its own forward: no compiled one. kind: its class."""
    made: Any = object.__new__(kind or type(model))
    made.__dict__ = {name: value for name, value in vars(model).items() if name != "generate"}
    made.__dict__["_compiled_call_impl"] = None
    return made


CHECKED = 4  # tokens of the check
NEAR = 0.1  # of the largest logit: half precision differs by a tenth of that, a forgotten position by more


class Causal:
    """A causal language model as functions of tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.config = model, _config(model)
        self.masks = _masks(model)
        self.layers = _layers()

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model that is not what is assumed here: one whose cache holds something else than keys and values, or that takes
        positions from elsewhere. Its own forward, a few tokens at once, is compared with a prompt and a step."""
        model: Any = plain(self.model)
        causal, tokens = Causal(model), torch.arange(1, CHECKED + 1, device=next(model.parameters()).device)[None]
        tokens = tokens % self.config.vocab_size
        try:
            want = model(input_ids=tokens, return_dict=True).logits[:, -1].float()
            _, keys, values = causal.prompt(tokens[:, :-1])
            slots = causal.slots(1, CHECKED, keys, values)
            slots.put([0], keys, values, torch.tensor([CHECKED - 1], device=tokens.device))
            found = causal.step(slots)(tokens[:, -1], slots.places).float()
        except Exception as error:  # whatever a model of another kind raises
            problem = f"cannot be called with a cache of keys and values ({type(error).__name__}: {error})"
            raise ArgumentError("model", problem, "use its own generate") from error
        far = (found - want).abs().amax() > NEAR * want.abs().amax()
        if bool(far) and not model.training:
            raise ArgumentError(
                "model", "gives other logits step by step than at once", "use its own generate: it keeps more than keys and values"
            )  # fmt: skip

    def slots(self, batch: int, context: int, keys: list[Tensor], values: list[Tensor]) -> Slots:
        """Room like that of a prompt's keys and values."""

        def room(like: Tensor) -> Tensor:
            return like.new_zeros(batch, like.shape[1], context, like.shape[3])

        device = keys[0].device
        places = torch.zeros(batch, dtype=torch.int64, device=device)
        return Slots([room(each) for each in keys], [room(each) for each in values], places)

    def prompt(self, tokens: Tensor, last: Tensor | None = None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Of (batch, length) tokens: the logits behind the last one of each, and every layer's keys and values.

        last: (batch,), where prompts end that are padded on the right. Nothing before the padding sees it, so it needs no mask."""
        cache = self.layers.PromptCache()
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        keep: Any = 1 if last is None else last
        out = self.model(
            input_ids=tokens, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=keep, return_dict=True
        )  # fmt: skip
        # (batch, places, vocabulary): of every sequence, the places of all are kept.
        logits = out.logits[:, -1] if last is None else out.logits.diagonal(dim1=0, dim2=1).t()
        return logits, [each.keys for each in cache.layers], [each.values for each in cache.layers]

    def step(self, slots: Slots) -> Callable[[Tensor, Tensor], Tensor]:
        """A function of (batch,) tokens and their places, that writes their keys and values into these slots and returns the logits
        behind them. Compiled, it is for the context of these slots."""
        for each in [*slots.keys, *slots.values]:
            torch._dynamo.mark_static_address(each)
        turn = self.turn
        return lambda tokens, places: turn(tokens, places, slots.keys, slots.values)

    @cached_property
    def turn(self) -> Callable[..., Tensor]:
        """The same as one function for slots of every context: turn(tokens, places, keys, values, shift).

        shift: (batch,), how far positions are from places, where they are not the same."""
        model, masks, in_slots = self.model, self.masks, self.layers.slots

        def turn(
            tokens: Tensor, places: Tensor, keys: list[Tensor], values: list[Tensor], shift: Tensor | None = None
        ) -> Tensor:
            positions = places if shift is None else places + shift
            logits: Tensor = model(
                input_ids=tokens[:, None], position_ids=positions[:, None], attention_mask=masks(places, keys[0].shape[2]),
                past_key_values=in_slots(keys, values, places[:, None]), use_cache=True, return_dict=True,
            ).logits  # fmt: skip
            return logits[:, -1]

        return turn


def _layers() -> Any:
    """The module of layers, which imports transformers."""
    from codetta.integrations import layers

    return layers


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise ArgumentError("model", f"is a {type(model).__name__}", "pass a causal language model of Hugging Face's")
    config = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
        raise ArgumentError("model", "has an encoder", "pass a model with a decoder alone")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ArgumentError("model", "takes no position_ids", "use its own generate")
    if getattr(config, "alibi", False):
        raise ArgumentError("model", "takes positions from its mask (alibi)", "use its own generate")
    return config


def _masks(model: nn.Module) -> Callable[[Tensor, int], Any]:
    """What a token may see: everything before it, or so much of it. A tensor, or one for each kind of layer where there are two."""
    config = _config(model)
    kind = getattr(config, "_attn_implementation", "sdpa") or "sdpa"
    if kind not in ("sdpa", "eager"):
        raise ArgumentError(
            "model", f"computes attention by {kind!r}", "load it with attn_implementation='sdpa' (or 'eager')"
        )
    window = getattr(config, "sliding_window", None)
    named = getattr(config, "layer_types", None)
    kinds = set(named or [SLIDING if window else FULL])
    if not kinds <= {SLIDING, FULL}:
        raise ArgumentError("model", f"has layers of {', '.join(sorted(kinds))}", "pass a model with attention alone")

    def mask_of(window: int | None) -> Callable[[Tensor, int], Tensor]:
        # A default is a constant of the traced step, where a variable of the outer function might become a symbol.
        def mask(places: Tensor, context: int, window: int | None = window) -> Tensor:
            at, here = torch.arange(context, device=places.device), places[:, None, None, None]
            seen = at <= here if window is None else (at <= here) & (at > here - window)
            if kind == "sdpa":
                return seen
            dtype = next(model.parameters()).dtype
            return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)

        return mask

    made_by = {each: mask_of(window if each == SLIDING else None) for each in sorted(kinds)}

    def masks(places: Tensor, context: int) -> Any:
        made = {each: mask(places, context) for each, mask in made_by.items()}
        return made if len(made) > 1 else next(iter(made.values()))

    return masks
