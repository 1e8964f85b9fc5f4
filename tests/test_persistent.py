"""A whole step of a decoder as one kernel, on a machine of fibers: what it computes, that it ends, and what is refused. Its text also
compiles for the GPUs that it is meant for."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import codetta
from codetta.backends import cuda_phases, nvrtc
from codetta.backends.cpu_build import toolchain
from codetta.bench.step import timeline
from codetta.errors import Reason
from codetta.explain import explain_decode
from codetta.integrations.dynamo import Backend
from codetta.integrations.huggingface import Causal, Slots
from codetta.phases import Life, one_kernel
from codetta.plan.target import TARGETS
from codetta.runtime import whole as runtime
from codetta.steps import Attend, Multiply, Plan, Whole

MACHINE = Path(__file__).with_name("whole_machine.h")
CONTEXT, BLOCKS = 96, 3
ROUNDS = 200_000  # a step takes a few thousand
TAIL = """
extern "C" int simulated(const Table* table, u32* counter, u32 blocks, u32 threads, u32 bytes, u32 seed, u64 rounds) {
    return sim::simulate([=] { whole_step(*table, counter); }, blocks, threads, bytes, seed, rounds);
}
"""
# Heads that share keys by 4 and by 1; rows that no piece fills, and rows of two pieces; so many heads that a warp has several tiles; a window.
SHAPES: dict[str, dict[str, Any]] = {
    "shared": {"hidden_size": 256, "intermediate_size": 328, "num_attention_heads": 4, "num_key_value_heads": 1},
    "own": {"hidden_size": 128, "intermediate_size": 264, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128},
    "long": {"hidden_size": 1288, "intermediate_size": 72, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
    "heads": {"hidden_size": 128, "intermediate_size": 72, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64},
    "broad": {"hidden_size": 128, "intermediate_size": 72, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 256},
    "window": {
        "hidden_size": 128, "intermediate_size": 200, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 20,
    },
}  # fmt: skip


def model(name: str, **settings: Any) -> Any:
    import transformers

    kind = "Mistral" if "sliding_window" in SHAPES[name] else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        **SHAPES[name], num_hidden_layers=2, vocab_size=36, max_position_embeddings=256, tie_word_embeddings=False, **settings
    )  # fmt: skip
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="sdpa")
    return made.to(torch.bfloat16).eval()


def slots_of(causal: Causal) -> Slots:
    _, keys, values = causal.prompt(torch.zeros((1, 1), dtype=torch.int64))
    slots = causal.slots(1, CONTEXT, keys, values)
    torch.manual_seed(1)
    for each in [*slots.keys, *slots.values]:
        each.normal_()
    return slots


def compiled(step: Any, schedule: str) -> tuple[Any, Backend]:
    backend = Backend(codetta.Options(schedule=schedule))
    return codetta.compile(step, dynamic=False, backend=backend), backend


def plan_of(step: Any, *inputs: Any) -> Plan:
    """Of the step as a chain of kernels."""
    function, backend = compiled(step, "chain")
    function(*inputs)
    return backend.executors[-1].plan


class Simulated:
    """A kernel on the machine of fibers."""

    def __init__(self, source: str, shared: int, folder: Path) -> None:
        name = hashlib.sha256(source.encode()).hexdigest()[:16]
        text, library = folder / f"{name}.cpp", folder / f"{name}.so"
        if not library.exists():
            text.write_text(source + TAIL)
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-fno-strict-aliasing"]
            subprocess.run([*toolchain().command, *flags, "-o", str(library), str(text)], check=True)
        self.library, self.shared, self.seed = ctypes.CDLL(str(library)), shared, 0

    def __call__(self, blocks: int, threads: int, arguments: Any) -> None:
        table, counter = arguments
        self.seed += 1
        failed = self.library.simulated(
            ctypes.byref(table), counter, blocks, threads, self.shared, self.seed, ctypes.c_uint64(ROUNDS)
        )
        assert not failed, "the kernel waits for ever"


class OnFibers(runtime.OneKernel):
    def __init__(self, whole: Whole, device: torch.device, folder: Path, ring: cuda_phases.Ring) -> None:
        with mock.patch.object(cuda_phases, "ring_for", return_value=ring):
            super().__init__(whole, device, TARGETS["sm_120"], BLOCKS)
        self.__dict__["kernel"] = Simulated(self.source, self.target.shared, folder)

    def text(self, phases: list[cuda_phases.Phase]) -> str:
        return cuda_phases.kernel(phases, self.ring, self.room, self.blocks, self.target, self.timeline, MACHINE)


@pytest.fixture
def fibers(tmp_path: Path) -> Iterator[None]:
    """Compiled within this, steps run on the machine of fibers."""
    kernel = partial(OnFibers, folder=tmp_path, ring=cuda_phases.Ring(4096, 4))
    with (
        mock.patch.object(cuda_phases, "runs_on", return_value=True),
        mock.patch("codetta.runtime.writer.OneKernel", kernel),
        mock.patch("codetta.runtime.ahead.OneKernel", mock.MagicMock()),
    ):
        yield


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("fibers")
@torch.no_grad()
def test_every_place(name: str) -> None:
    """Logits and the new rows of the cache, against the chain of kernels; everything else stays as it was; the same bits again."""
    causal = Causal(model(name))
    slots = slots_of(causal)
    tokens = torch.tensor([17])
    chain, _ = compiled(causal.step(slots), "chain")
    whole, backend = compiled(causal.step(slots), "persistent")
    caches = [*slots.keys, *slots.values]
    few = {"long": (40,), "broad": (40,), "heads": (33, 95)}
    for place in few.get(name, (0, 1, 19, 33, 64, 95)):
        slots.places.fill_(place)
        want = chain(tokens, slots.places).clone()
        rows = [each.clone() for each in caches]
        for each in caches:
            each[0, :, place] = torch.nan
        got = whole(tokens, slots.places).clone()
        assert (got - want).abs().max() <= 0.02 * want.abs().max(), place
        for mine, theirs in zip(caches, rows, strict=True):
            assert (mine - theirs).abs().max() <= 0.02 * theirs.abs().max(), place
            mine[0, :, place] = theirs[0, :, place]
            assert torch.equal(mine, theirs)
        assert torch.equal(whole(tokens, slots.places), got), "other bits in another order"
    (step,) = (each for each in backend.executors[-1].plan.steps if isinstance(each, Whole))
    assert [type(each) for each in step.phases] == [Multiply, Attend, Multiply, Multiply, Multiply] * 2 + [Multiply]


@pytest.mark.parametrize("name", ["shared", "window"])
@pytest.mark.usefixtures("fibers")
@torch.no_grad()
def test_one_kernel_for_caches_of_every_size(name: str) -> None:
    causal = Causal(model(name))
    tokens, backend = torch.tensor([17]), Backend(codetta.Options(schedule="persistent"))
    whole = codetta.compile(causal.turn, dynamic=True, backend=backend)
    _, keys, values = causal.prompt(torch.zeros((1, 1), dtype=torch.int64))
    for context, place in ((CONTEXT, 71), (48, 40), (200, 190)):
        slots = causal.slots(1, context, keys, values)
        for each in [*slots.keys, *slots.values]:
            each.normal_()
        slots.only_context_varies()
        slots.places.fill_(place)
        want = causal.turn(
            tokens, slots.places, *([each.clone() for each in room] for room in (slots.keys, slots.values))
        )
        got = whole(tokens, slots.places, slots.keys, slots.values)
        assert (got - want).abs().max() <= 0.02 * want.abs().max(), context
    (executor,) = backend.executors
    assert any(isinstance(each, Whole) for each in executor.plan.steps)


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.skipif(
    not nvrtc.is_there(),
    reason="NVIDIA's run-time compiler comes with PyTorch for its GPUs, or with the extra `test` on Linux and x86",
)
@torch.no_grad()
def test_compiles(target: str) -> None:
    causal = Causal(model("shared"))
    slots = slots_of(causal)
    found = one_kernel(plan_of(causal.step(slots), torch.tensor([1]), slots.places))
    assert isinstance(found, Plan), found
    (step,) = (each for each in found.steps if isinstance(each, Whole))
    kernel = runtime.OneKernel(step, torch.device("cpu"), TARGETS[target], 132)
    assert len(nvrtc.compiled(kernel.source, TARGETS[target])) > 10_000


@torch.no_grad()
def test_refusals() -> None:
    """What is not one row, not bf16, or not a decoder's step stays a chain, with a reason."""
    causal = Causal(model("shared"))
    slots = causal.slots(2, CONTEXT, *causal.prompt(torch.zeros((1, 1), dtype=torch.int64))[1:])
    two = one_kernel(plan_of(causal.step(slots), torch.tensor([1, 2]), slots.places))
    assert isinstance(two, Reason) and two.rule == "one row"
    wide = Causal(model("shared").float())
    slots = wide.slots(1, CONTEXT, *wide.prompt(torch.zeros((1, 1), dtype=torch.int64))[1:])
    other = one_kernel(plan_of(wide.step(slots), torch.tensor([1]), slots.places))
    assert isinstance(other, Reason) and other.rule == "bf16"
    linear = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    none = one_kernel(plan_of(linear, torch.randn(1, 64).to(torch.bfloat16)))
    assert isinstance(none, Reason) and none.rule == "a step of a decoder"


@torch.no_grad()
def test_places_serve_again_when_all_are_done() -> None:
    """Two vectors lie in one place only if behind the last reading of the first all blocks met before the second is made."""
    causal = Causal(model("shared"))
    slots = slots_of(causal)
    found = one_kernel(plan_of(causal.step(slots), torch.tensor([1]), slots.places))
    assert isinstance(found, Plan)
    (step,) = (each for each in found.steps if isinstance(each, Whole))
    kernel = runtime.OneKernel(step, torch.device("cpu"), TARGETS["sm_90"], 132)
    places, end = kernel.places
    life = Life(step.phases)
    vectors = [each for each in places if not isinstance(each, runtime.Entry)]
    shared = 0
    for one in vectors:
        for other in vectors:
            if one is other or places[one] != places[other] or life.made[one] > life.made[other]:
                continue
            shared += 1
            assert any(life.read[one] <= sum_ and reader <= life.made[other] for sum_, reader in life.gates)
    assert shared and end == kernel.bytes


@pytest.mark.usefixtures("fibers")
@torch.no_grad()
def test_timeline() -> None:
    """A kernel that is looked at has the ring that was asked for, and says when each phase had what it waited for and was done."""
    causal = Causal(model("shared"))
    slots = slots_of(causal)
    slots.places.fill_(40)
    ring = cuda_phases.Ring(16384, 3)  # fewer slots than warps, too
    with runtime.looked_at(ring, timeline=True) as look:
        step, _ = compiled(causal.step(slots), "persistent")
        looked = step(torch.tensor([17]), slots.places).clone()
    (kernel,) = look.kernels
    assert kernel.ring == ring and str(ring) == "16384:3"
    begun, received, ended, pieces = kernel.stamps.unbind(-1)
    assert (begun > 0).all() and (begun <= received).all() and (received <= ended).all() and (pieces >= 0).all()
    assert (ended[:-1].amax((1, 2)) <= ended[1:].amax((1, 2))).all()
    rows = timeline(kernel)
    assert [(row["phase"], row["times"]) for row in rows] == [
        ("256 -> 384", 2), ("attention", 2), ("256 -> 256", 2), ("256 -> 656", 2), ("328 -> 256", 2), ("256 -> 36", 1)
    ]  # fmt: skip
    assert all(row["work_us"] >= 0 for row in rows)
    usual, _ = compiled(causal.step(slots), "persistent")
    assert torch.equal(usual(torch.tensor([17]), slots.places), looked)


@pytest.mark.usefixtures("fibers")
def test_explain() -> None:
    """The report names the schedule, and the programs as if they were launched one by one; for a batch, why it is a chain."""
    with mock.patch("codetta.explain.OneKernel", partial(runtime.OneKernel, target=TARGETS["sm_90"], blocks=132)):
        options = codetta.Options(schedule="persistent")
        report = explain_decode(model("window"), context=32, options=options)
        assert "schedule: one kernel of 11 phases" in str(report)
        assert len(report.programs) == 10 and len(report.calls) == 2
        assert report.decode["workspace_bytes"] > 10_000
    report = explain_decode(model("window"), batch=2, context=32, options=options)
    assert "schedule: a chain of kernels (one row: " in str(report)
