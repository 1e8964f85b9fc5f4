"""Every epilogue of the library once, with each main loop, on a small ragged shape: something for compute-sanitizer to watch.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python tests/gpu/sanitize.py [NAME ...]
compute-sanitizer --tool racecheck python tests/gpu/sanitize.py step

"step": a decoder's step as one kernel, at a few places.

Without its cache PyTorch gives every tensor an allocation of its own, so that an access past its end is seen.
"""

from __future__ import annotations

import sys

import torch

from codetta.backends.triton import TritonBackend
from codetta.bench.samples import Sizes, library_names, sample


def main(names: list[str]) -> None:
    sizes = Sizes(333, width=512, hidden=768, vocabulary=1000, head=128, samples=1)
    backend = TritonBackend()
    for name in names:
        program, binding = sample(name, sizes, torch.device("cuda"), torch.bfloat16).bind()
        first = {tile.loop: tile for tile in reversed(backend.candidates(program, binding)[0])}
        for tile in first.values():
            backend.launch(program, binding, tile)
        torch.cuda.synchronize()
        print(name, *first)


@torch.no_grad()
def step() -> None:
    import test_persistent_gpu as persistent

    # The first cache comes from the CPU: racecheck cannot follow (or leave alone) the kernels of cuBLAS.
    model = persistent.model("shared").cpu()
    causal = persistent.Causal(model)
    _, keys, values = causal.prompt(torch.zeros((1, 1), dtype=torch.int64))
    model.cuda()
    slots = causal.slots(1, persistent.CONTEXT, [each.cuda() for each in keys], [each.cuda() for each in values])
    for each in [*slots.keys, *slots.values]:
        each.normal_()
    run, _ = persistent.compiled(causal, slots)
    for place in (0, 70, 300):
        slots.places.fill_(place)
        found = run(torch.tensor([17], device="cuda"), slots.places)
        torch.cuda.synchronize()
        print("step", place, bool(torch.isfinite(found).all()))


if __name__ == "__main__":
    if sys.argv[1:] == ["step"]:
        step()
    else:
        main(sys.argv[1:] or library_names())
