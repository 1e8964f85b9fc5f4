"""Processors that a machine can stand for: instructions that it may use, fewer than it has."""

from __future__ import annotations

import torch

FEWER: dict[str, tuple[str, ...]] = {"none of its own": ()}
if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
    FEWER["AVX2"] = ("-march=x86-64-v3",)
