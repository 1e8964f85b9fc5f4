"""What a backend is: it says whether it can run a program on these tensors, and runs it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from codetta.errors import Reason
from codetta.program import Program
from codetta.runtime.bind import Binding
from codetta.stat import Stat


class Backend(Protocol):
    name: str

    def why_not(self, program: Program, binding: Binding) -> list[Reason]:
        """Empty if this backend can run the program on these tensors; else every reason why not."""

    def why_never(self, program: Program, device: torch.device, rows: int) -> list[Reason]:
        """Why it could not run the program on any tensors of the device, or would be slower than separate kernels with so many rows;
        empty if on most it pays. May build the kernel."""

    def build(self, program: Program, binding: Binding, device: torch.device) -> None:
        """Build what `run` would launch on the device for such tensors, which may be without memory; threads may do so side by
        side. What cannot be built is left to `why_not` and `run` to complain of."""

    def run(self, program: Program, binding: Binding) -> dict[str, Tensor | Stat]:
        """Fill the bound outputs and return them by name, reductions as unfinished Stats."""

    def source(self, program: Program, binding: Binding) -> str:
        """The generated source of the kernel that `run` would launch."""
