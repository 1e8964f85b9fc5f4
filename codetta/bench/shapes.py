"""Whole models for the benchmarks: published shapes with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from codetta.errors import ArgumentError


@dataclass(frozen=True)
class Shape:
    """A model as published: classes of transformers and the settings that are not their defaults."""

    config: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    batch: int = 2
    length: int = 8192
    attention: str = "sdpa"


def _settings(
    layers: int, width: int, hidden: int, heads: int, kv: int, head: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": head, "vocab_size": vocabulary, "max_position_embeddings": 32768, **more,
    }  # fmt: skip


def _llama(*sizes: int, **more: Any) -> Shape:
    return Shape("LlamaConfig", "LlamaForCausalLM", _settings(*sizes, **more))


# Batch times length is about 16384 tokens everywhere; a model without so long a context gets a larger batch.
SHAPES: dict[str, Shape] = {
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, 64, 128256, tie_word_embeddings=True),
    "llama-7b": _llama(32, 4096, 11008, 32, 32, 128, 32000),
    "llama-13b": _llama(40, 5120, 13824, 40, 40, 128, 32000),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8, 128, 128256),
    "qwen2-1.5b": Shape("Qwen2Config", "Qwen2ForCausalLM", _settings(28, 1536, 8960, 12, 2, 128, 151936)),
    "qwen3-0.6b": Shape("Qwen3Config", "Qwen3ForCausalLM", _settings(28, 1024, 3072, 16, 8, 128, 151936)),
    "mistral-7b": Shape("MistralConfig", "MistralForCausalLM", _settings(32, 4096, 14336, 32, 8, 128, 32768, sliding_window=None)),
    "gemma-2-2b": Shape(
        "Gemma2Config", "Gemma2ForCausalLM", _settings(26, 2304, 9216, 8, 4, 256, 256000), batch=8, length=2048, attention="eager"
    ),
    "phi-3-mini": Shape("Phi3Config", "Phi3ForCausalLM", _settings(32, 3072, 8192, 32, 32, 96, 32064, pad_token_id=0)),
    "pythia-1b": Shape(
        "GPTNeoXConfig", "GPTNeoXForCausalLM",
        {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 8, "vocab_size": 50304},
        batch=8, length=2048,
    ),
    "gpt2": Shape("GPT2Config", "GPT2LMHeadModel", {}, batch=16, length=1024),
    "bert-base": Shape("BertConfig", "BertModel", {}, batch=32, length=512),
    "tiny": _llama(2, 256, 512, 4, 2, 64, 1000),  # for a machine without a GPU
}  # fmt: skip


def build(name: str, device: torch.device, dtype: torch.dtype, layers: int = 0) -> Any:
    """A model of that shape with random weights, with so many layers if they are given; needs transformers."""
    if name not in SHAPES:
        raise ArgumentError("model", f"{name!r} is unknown", f"use one of {', '.join(SHAPES)}")
    try:
        import transformers
    except ImportError:
        raise ArgumentError("model", "needs the package transformers", "install codetta[zoo]") from None
    shape = SHAPES[name]
    settings = shape.settings | ({"num_hidden_layers": layers} if layers else {})
    config = getattr(transformers, shape.config)(**settings)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, shape.model)._from_config(config, attn_implementation=shape.attention)
    return model.to(dtype).eval()


def inputs(name: str, model: Any, device: torch.device, batch: int, length: int) -> dict[str, Any]:
    """What a prefill gives the model; of a language model, the last token's logits are asked for."""
    found: dict[str, Any] = {"input_ids": torch.randint(0, model.config.vocab_size, (batch, length), device=device)}
    return found | ({"use_cache": False, "logits_to_keep": 1} if has_loss(name) else {})


def has_loss(name: str) -> bool:
    """Whether it is a language model."""
    return SHAPES[name].model.endswith(("CausalLM", "LMHeadModel"))
