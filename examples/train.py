"""A plain training loop: a small Llama or GPT-2 learns eight sonnets by the byte, compiled or not.

    python examples/train.py [--model gpt2] [--steps 200] [--eager]

The only line that differs is `codetta.compile(model)`. Everything else (the optimiser, clipping, the schedule) is PyTorch's own.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import codetta

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TEXT = Path(__file__).with_name("sonnets.txt")
WIDTH, LAYERS, HEADS = 128, 2, 4


def build(name: str) -> nn.Module:
    """A model of bytes with random weights."""
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=256, n_positions=256, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def batches(steps: int, size: int, length: int, device: str) -> list[Tensor]:
    """Pieces of the text, the same ones for the same arguments."""
    data = torch.tensor(list(TEXT.read_bytes()), device=device)
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(data) - length, (steps, size), generator=generator)
    return [torch.stack([data[at : at + length] for at in row]) for row in starts.tolist()]


def train(model: nn.Module, data: list[Tensor], rate: float = 3e-3) -> list[float]:
    """One step for each batch; the losses."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, len(data) // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / len(data)))
    )
    losses = []
    for tokens in data:
        loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    options = parser.parse_args()
    if options.steps < 1 or options.batch < 1 or not 2 <= options.length <= 256:
        parser.error("steps and batch must be positive, length between 2 and 256")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(options.model).to(device)
    if not options.eager:
        model = codetta.compile(model)
    data = batches(options.steps, options.batch, options.length, device)
    begin = time.perf_counter()
    losses = train(model, data)
    took = time.perf_counter() - begin
    table = Table(title=f"{options.model}, {'eager' if options.eager else 'compiled'}, {device}")
    table.add_column("step", justify="right")
    table.add_column("loss", justify="right")
    for step in sorted({0, *range(19, len(losses), 20), len(losses) - 1}):
        table.add_row(str(step + 1), f"{losses[step]:.4f}")
    Console().print(table)
    tokens = options.steps * options.batch * options.length
    Console().print(f"{took:.1f} s, {tokens / took:,.0f} tokens/s, compiling included")


if __name__ == "__main__":
    main()
