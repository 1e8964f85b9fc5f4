"""Contenders of whole-model benchmarks: one model as each of them runs it at its best. All share its parameters.

Hugging Face's models hand attention "causal" instead of a matrix, but not while they are traced or recorded: then they
build the mask, and attention reads it, which costs a compiled peer up to half of its time. Here every peer gets a copy of
the model that says "causal" in both cases, without looking at the positions first (which eager does, and waits for the
device). Codetta gets the model as it is: that is what its users compile.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import codetta
from codetta.errors import ArgumentError

CAUSAL = "sdpa_told_causal"  # the name under which transformers knows the attention registered below
MODES = {"compile": None, "compile-reduce": "reduce-overhead", "compile-max": "max-autotune"}
LIGER = ("liger", "liger-compile")


def contender(name: str, model: nn.Module) -> Callable[..., Any] | None:
    """What is called instead of the model; its parameters are the model's. None: that package is not installed."""
    if name == "codetta":
        return codetta.compile(sharing(model))
    peer = told_causal(sharing(model))
    if name in MODES:
        return torch.compile(peer, dynamic=False, mode=MODES[name])
    if name in LIGER:
        if not liger_is_here():
            return None
        changed = Liger(peer)
        return torch.compile(changed, dynamic=False) if name.endswith("compile") else changed
    if name != "eager":
        known = ", ".join(("eager", *MODES, *LIGER, "codetta"))
        raise ArgumentError("impls", f"{name!r} is no contender", f"use some of {known}")
    return peer


def sharing(model: nn.Module) -> Any:
    """A copy with modules and settings of its own, and the parameters and buffers of the model."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(each): each for each in tensors})


def told_causal(model: Any) -> Any:
    """The model, whose attention (where it is PyTorch's) gets "causal" instead of a mask that is only causal.

    transformers makes no masks for an attention that it knows no masks for: they are made here, where there is a window.
    For inputs without padding.
    """
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa":
        from transformers import AttentionInterface

        AttentionInterface.register(CAUSAL, _attention)
        model.set_attn_implementation(CAUSAL)
    return model


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> Any:
    """PyTorch's attention as transformers calls it: without a mask it is causal if the layer is."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    window = settings.get("sliding_window")
    if attention_mask is None and window is not None and window < key.shape[2]:
        places = torch.arange(key.shape[2], device=key.device)
        back = places[:, None] - places[None, :]
        attention_mask = ((back >= 0) & (back < window))[None, None]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)


def liger_is_here() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


class Liger(nn.Module):
    """The model with Liger's kernels. Some of them replace functions of transformers' module: only while this one runs."""

    def __init__(self, model: Any) -> None:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        super().__init__()
        self.model = model
        self.names = vars(sys.modules[type(model).__module__])
        before = dict(self.names)
        _apply_liger_kernel_to_instance(self.model)
        self.theirs = {name: each for name, each in self.names.items() if before.get(name) is not each}
        self.own = {name: before[name] for name in self.theirs if name in before}
        self.names.update(self.own)

    @contextmanager
    def patched(self) -> Iterator[None]:
        self.names.update(self.theirs)
        try:
            yield
        finally:
            self.names.update(self.own)

    def forward(self, **named: Any) -> Any:
        return self.model(**named)


def training_step(run: Callable[..., Any], tokens: Tensor) -> Callable[[], Tensor]:
    """Forward and backward of the loss of these tokens; the loss stays on the device."""
    inside = getattr(run, "_orig_mod", run)

    def step() -> Tensor:
        with inside.patched() if isinstance(inside, Liger) else nullcontext():
            loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        return loss.detach()

    return step
