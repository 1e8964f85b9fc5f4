"""The Trainer of Hugging Face with a compiled model: a small Llama learns eight sonnets by the byte.

    python examples/trainer.py [--steps 200] [--bf16] [--eager]

The only line that differs is `codetta.compile(model)`. Mixed precision, clipping and accumulation are the Trainer's own.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from train import batches, build

import codetta


class Pieces(Dataset[dict[str, Any]]):
    """Pieces of the text, each of which is its own label."""

    def __init__(self, count: int, length: int) -> None:
        self.rows = torch.cat(batches(count, 1, length, "cpu"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"input_ids": self.rows[at], "labels": self.rows[at]}


def run(model: nn.Module, steps: int, bf16: bool, batch: int = 4, length: int = 128) -> list[float]:
    """The losses that the Trainer logs."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=batch, gradient_accumulation_steps=2, learning_rate=3e-3,
            warmup_steps=max(1, steps // 10), max_grad_norm=1.0, bf16=bf16, logging_steps=max(1, steps // 10), save_strategy="no",
            report_to="none", use_cpu=not torch.cuda.is_available(), disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=Pieces(2 * steps * batch, length))
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("steps must be positive")
    model = build("llama")
    if not options.eager:
        model = codetta.compile(model)
    losses = run(model, options.steps, options.bf16)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
