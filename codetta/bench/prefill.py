"""Whole models for `codetta bench block`: prefill of published shapes with random weights, compiled against the peers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from codetta.bench.block import contestants
from codetta.bench.run import Row
from codetta.bench.timing import medians
from codetta.errors import ArgumentError

# Sizes as published: layers, width, hidden, heads, key-value heads, head, vocabulary, tied embeddings.
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "llama-3.2-1b": (16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama-7b": (32, 4096, 11008, 32, 32, 128, 32000, False),
    "tiny": (2, 256, 512, 4, 2, 64, 1000, False),  # for a machine without a GPU
}
IMPLEMENTATIONS = ("eager", "compile", "compile-max", "codetta")


def build(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A causal language model of that shape with random weights; needs transformers."""
    if name not in SHAPES:
        raise ArgumentError("model", f"{name!r} is unknown", f"use one of {', '.join(SHAPES)}")
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise ArgumentError("model", "needs the package transformers", "install codetta[zoo]") from None
    layers, width, hidden, heads, kv, head, vocabulary, tied = SHAPES[name]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=head, max_position_embeddings=16384, tie_word_embeddings=tied, attn_implementation="sdpa",
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def measure_prefill(
    name: str,
    device: torch.device,
    batch: int = 2,
    length: int = 0,
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    rounds: int = 2,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """One row for each contender: the time to read a prompt and give the logits of its last token."""
    length = length or (8192 if device.type == "cuda" else 64)
    model = build(name, device, torch.bfloat16)
    ids = torch.randint(0, SHAPES[name][6], (batch, length), device=device)
    named = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
    wanted = tuple(each for each in implementations if each in IMPLEMENTATIONS)
    contenders = contestants(model, (), wanted, named=named)
    error = None
    if "codetta" in contenders:
        ours: Any = contenders["codetta"]()
        plain: Any = model(**named)
        error = float((ours.logits - plain.logits).float().norm() / plain.logits.float().norm())
    times = medians(contenders, device, rounds=rounds, rep_ms=300.0)
    rows = []
    for impl, ms in times.items():
        row: Row = {"model": name, "tokens": batch * length, "pass": "prefill", "impl": impl, "ms": round(ms, 4)}
        if impl == "codetta" and error is not None:
            row["distance"] = round(error, 5)  # from eager's logits
        rows.append(row)
        if on_row is not None:
            on_row(row)
    del model, contenders
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows
