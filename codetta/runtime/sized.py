"""What is the same for every call of a size: made when first needed, and again when sizes or parameters have changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MOST = 64 << 20  # bytes that are kept


@dataclass
class Backwards:
    """How many backward passes of plans have run in this process. An optimiser may follow, whose writes PyTorch may not count."""

    count: int = 0


backwards = Backwards()


@dataclass
class Sized:
    """Tensors made of sizes and parameters alone, such as tables of positions. The last ones are kept, unless they are large.

    lasting: no parameter comes into them, so that a CUDA graph may go on reading what it has seen.
    """

    make: Callable[..., tuple[Any, ...]]
    lasting: bool = False
    key: tuple[object, ...] | None = None
    made: tuple[Any, ...] = ()
    recorded: list[tuple[Any, ...]] = field(default_factory=list)  # what CUDA graphs read: never dropped

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if capturing() and not self.lasting:
            return self.make(*inputs)
        key = tuple(state_of(each) if isinstance(each, Tensor) else each for each in inputs)
        if not self.lasting:
            key += (backwards.count,)
        if key == self.key:
            if capturing():
                self.recorded.append(self.made)
            return self.made
        made = self.make(*inputs)
        tensors = [each for each in made if isinstance(each, Tensor)]
        if not capturing() and sum(each.untyped_storage().nbytes() for each in tensors) <= MOST:
            self.key, self.made = key, made
        return made


def _lie_at(values: list[Any], addresses: list[int], which: list[int]) -> bool:
    return all(values[at].data_ptr() == addresses[at] for at in which)


# Whether those of the values, all of them tensors, lie at their addresses. A model has hundreds of parameters: in C++, where PyTorch has
# been built for GPUs.
lie_at: Callable[[list[Any], Any, list[int]], bool] = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _lie_at)


def addresses_of(values: Sequence[Any], which: Sequence[int]) -> list[int]:
    """As `lie_at` takes them: 0 for all others."""
    found = [0] * len(values)
    for at in which:
        found[at] = values[at].data_ptr()
    return found


def capturing() -> bool:
    """Whether launches are recorded into a CUDA graph: it will read the same memory again, and compute what it is to see anew."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def state_of(parameter: Tensor) -> tuple[object, ...]:
    """What changes when the parameter does. Writing through `.data` leaves PyTorch's version as it is: on a CPU, where looking is
    cheap, some of the numbers are looked at as well."""
    if parameter.is_inference():
        # Nobody counts its versions: equal to nothing, so that what depends on it is always made anew.
        return (object(),)
    state = (parameter.data_ptr(), parameter._version)
    if parameter.device.type != "cpu" or not parameter.numel():
        return state
    flat = parameter.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // 64)]
    if some.is_complex():
        some = torch.view_as_real(some.resolve_conj())
    return (*state, float(some.double().sum()))
