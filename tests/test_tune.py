"""Tuning: what is remembered under which key, what is left out, and that nothing half done is ever believed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from codetta.backends.triton import TritonBackend, interpreting, tune_key
from codetta.bench.samples import Sizes, sample
from codetta.bench.tune import selection, tune
from codetta.errors import ArgumentError, LoweringError
from codetta.plan import tune as store
from codetta.plan.choose import candidates
from codetta.plan.target import TARGETS
from codetta.plan.tile import Tile
from codetta.plan.tune import Tuned, TuneKey, find, forget, remember
from codetta.program import Program
from codetta.runtime.bind import Binding
from codetta.runtime.cache import Cache
from codetta.stat import Stat

CPU = torch.device("cpu")
SMALL = Sizes(rows=40, width=64, hidden=96, vocabulary=100, head=16)
TUNED = Tuned(Tile(32, 64, 32, 2, 4), 1.0, 2.0, 3)


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODETTA_CACHE", str(tmp_path))
    forget()


def call(name: str = "residual_stats") -> tuple[Program, Binding]:
    return sample(name, SMALL, CPU, torch.float32).bind()


def key(name: str = "residual_stats") -> TuneKey:
    return tune_key(*call(name))


def test_remembered_on_disk() -> None:
    assert find(key()) is None
    remember(key(), TUNED)
    forget()
    assert find(key()) == TUNED


def test_another_key_is_another_result(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(key(), TUNED)
    for other in (key("output_stats"), replace(key(), bucket=0), replace(key(), aligned=not key().aligned)):
        assert find(other) is None
    forget()
    monkeypatch.setattr(store, "source_hash", lambda: "other")
    assert find(key()) is None, "a result outlived the source that it was measured with"


def test_another_driver_or_version_is_another_result(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(key(), TUNED)
    for name, value in (("_device", {"name": "another"}), ("_versions", {"torch": "0"})):
        with monkeypatch.context() as changed:
            changed.setattr(store, name, lambda *_, value=value: value)
            forget()
            assert find(key()) is None


@pytest.mark.parametrize("stored", [
    None, 7, {}, {"tile": {}}, {"tile": {"rows": 1}, "ms": 1.0}, {"tile": {"rows": "128"}, "ms": 1.0, "default_ms": 1.0, "tried": 1},
    {"tile": {"unknown": 1}, "ms": 1.0, "default_ms": 1.0, "tried": 1}, {"tile": asdict(Tile()), "ms": "fast", "default_ms": 1.0, "tried": 1},
])  # fmt: skip
def test_strange_entries_are_ignored(stored: object) -> None:
    Cache("tune").put_json(store._disk_key(key()), stored)
    assert find(key()) is None


def test_a_damaged_entry_is_ignored() -> None:
    remember(key(), TUNED)
    forget()
    for path in Cache("tune").directory.rglob("*.entry"):
        path.write_bytes(path.read_bytes()[:-3])
    assert find(key()) is None


def test_a_tile_that_is_no_longer_legal_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    program, binding = call()
    legal, _ = TritonBackend().candidates(program, binding)
    for tile, chosen in ((legal[-1], legal[-1]), (Tile(96, 96, 7), legal[0])):
        monkeypatch.setattr(TritonBackend, "tuned", lambda *_, tile=tile: replace(TUNED, tile=tile))
        assert TritonBackend().tile(program, binding) == chosen


def test_selection_takes_of_every_loop() -> None:
    program, _ = sample("residual_stats").bind()
    legal, _ = candidates(program, 0, TARGETS["sm_90"], True)
    chosen = selection(legal, 12)
    assert len(chosen) == 12
    assert {tile.loop for tile in chosen} == {tile.loop for tile in legal}
    assert chosen[0] == legal[0]


# ---- the run itself, in the interpreter: times mean nothing there, the course of events does -----------------------

needs_interpreter = pytest.mark.skipif(not interpreting(), reason="tests/gpu tunes on the GPU")


class Broken(TritonBackend):
    """Does not compile 64 columns, does not run 128, and is wrong at 256."""

    def compile(self, program: Program, binding: Binding, tile: Tile) -> None:
        if tile.cols == 64:
            raise RuntimeError("out of registers")

    def launch(self, program: Program, binding: Binding, tile: Tile) -> dict[str, Tensor | Stat]:
        if tile.cols == 128:
            raise ValueError("out of shared memory")
        results = super().launch(program, binding, tile)
        if tile.cols == 256:
            binding.outputs["y"][3, 5] += 100.0
        return results


@needs_interpreter
def test_what_fails_is_left_out_with_its_reason() -> None:
    program, binding = call()
    stages: list[str] = []
    found = tune(program, binding, backend=Broken(), progress=lambda stage, *_: stages.append(stage))
    reasons = {tile.cols: why for tile, why in found.skipped}
    assert set(reasons) == {64, 128, 256}
    assert "out of registers" in reasons[64]
    assert "out of shared memory" in reasons[128]
    assert "wrong answer: y" in reasons[256]
    assert list(dict.fromkeys(stages)) == ["compile", "check", "measure"]
    assert find(tune_key(program, binding)) == found.tuned
    assert found.tuned.tile.cols == 32


@needs_interpreter
def test_nothing_works() -> None:
    class Hopeless(TritonBackend):
        def compile(self, program: Program, binding: Binding, tile: Tile) -> None:
            raise RuntimeError("no")

    program, binding = call()
    with pytest.raises(LoweringError, match="no tile of residual_stats works"):
        tune(program, binding, backend=Hopeless())
    assert find(tune_key(program, binding)) is None


@needs_interpreter
@pytest.mark.parametrize("when", ["compile", "check", "measure"])
def test_an_interrupted_run_leaves_nothing(when: str) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == when:
            raise KeyboardInterrupt

    program, binding = call()
    with pytest.raises(KeyboardInterrupt):
        tune(program, binding, limit=2, progress=interrupt)
    forget()
    assert find(tune_key(program, binding)) is None
    assert Cache("tune").size()[0] == 0


@needs_interpreter
def test_outputs_that_are_added_to_come_back() -> None:
    program, binding = call("weight_gradient_accumulate")
    before = binding.outputs["dw"].clone()
    tune(program, binding, limit=2)
    assert torch.equal(binding.outputs["dw"], before)


def test_there_is_nothing_to_tune_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ArgumentError, match="nothing to tune"):
        tune(*call())
