"""The grid: peers that are told what is causal, figures of a call, rows, ratios, the picture, and bad arguments."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from codetta.bench import called
from codetta.bench import grid as grid_module
from codetta.bench.called import Timing, covered, in_turns, on_device, warmed
from codetta.bench.grid import GridBench, measure_grid, parse_grid_sizes
from codetta.bench.peers import contender, sharing, told_causal
from codetta.bench.ratios import cells_of, colour, markdown, mean_ratio, plot, recorded
from codetta.bench.shapes import SHAPES, build
from codetta.bench.workers import measure_grid_with
from codetta.cli import app
from codetta.errors import ArgumentError, CodettaError

pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> Any:
    return build("tiny", CPU, torch.float32, layers=2)


def attentions(model: Any, **named: Any) -> list[torch.fx.Node]:
    """The attention calls of the graphs that torch.compile would get."""
    found: list[torch.fx.Node] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.extend(node for node in module.graph.nodes if node.target is F.scaled_dot_product_attention)
        return module

    torch._dynamo.reset()
    torch.compile(model, backend=backend, dynamic=False)(**named)
    return found


# ---- peers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_compiled_peers_get_no_mask(tiny: Any, training: bool) -> None:
    tokens = torch.randint(0, 1000, (2, 24))
    named = {"input_ids": tokens, "use_cache": False} | ({"labels": tokens} if training else {})
    plain, told = sharing(tiny), told_causal(sharing(tiny))
    with torch.set_grad_enabled(training):
        assert all(node.kwargs["attn_mask"] is not None for node in attentions(plain, **named)), (
            "the reason for all this"
        )
        nodes = attentions(told, **named)
        assert len(nodes) == 2
        assert all(node.kwargs["attn_mask"] is None and node.kwargs["is_causal"] is True for node in nodes)
        torch.testing.assert_close(told(**named).logits, plain(**named).logits, rtol=0, atol=0)
        assert told.config._attn_implementation != plain.config._attn_implementation


@pytest.mark.parametrize(
    ("config", "model", "causal", "settings"),
    [
        (
            "MistralConfig",
            "MistralForCausalLM",
            None,
            {"sliding_window": 8, "num_key_value_heads": 2},
        ),  # a window is more than causal
        ("MistralConfig", "MistralForCausalLM", True, {"sliding_window": 64, "num_key_value_heads": 2}),
        ("GPT2Config", "GPT2LMHeadModel", True, {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}),
        ("BertConfig", "BertModel", False, {}),  # nothing is masked
    ],
)
def test_only_what_is_plainly_causal_is_told_so(config: str, model: str, causal: bool | None, settings: Any) -> None:
    import transformers

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 99,
    }
    if "n_embd" not in settings:
        settings = sizes | settings
    plain = (
        getattr(transformers, model)
        ._from_config(getattr(transformers, config)(**settings), attn_implementation="sdpa")
        .eval()
    )
    told = told_causal(sharing(plain))
    named = {"input_ids": torch.randint(0, 99, (2, 24))}
    with torch.no_grad():
        nodes = attentions(told, **named)
        assert len(nodes) == 2
        for node in nodes:
            assert (node.kwargs["attn_mask"] is None) == (causal is not None)
            assert node.kwargs["is_causal"] is bool(causal)
        torch.testing.assert_close(next(iter(told(**named).values())), next(iter(plain(**named).values())))


def test_contenders_share_parameters_and_nothing_else(tiny: Any) -> None:
    peer = contender("eager", tiny)
    assert [id(each) for each in peer.parameters()] == [id(each) for each in tiny.parameters()]
    assert peer.config is not tiny.config
    assert tiny.config._attn_implementation == "sdpa"
    with pytest.raises(ArgumentError, match="no contender"):
        contender("nobody", tiny)


# ---- figures -----------------------------------------------------------------------------------------------------


def test_each_contender_has_turns_of_its_own() -> None:
    calls: list[str] = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
    timings = {name: warmed(call, CPU) for name, call in contenders.items()}
    assert calls == ["a"] * 5 + ["b"] * 5
    in_turns(contenders, timings, CPU, 0.001, lambda: None)
    for timing in timings.values():
        assert len(timing.ms) == len(timing.host_ms) >= 5
        assert all(ms >= host for ms, host in zip(timing.ms, timing.host_ms, strict=True))


def test_a_contender_that_fails_among_the_others_is_out() -> None:
    left = {"a": 8}

    def failing() -> None:
        left["a"] -= 1
        if not left["a"]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    contenders = {"a": failing, "b": lambda: None}
    timings = {name: warmed(call, CPU) for name, call in contenders.items()}
    in_turns(contenders, timings, CPU, 0.001, lambda: None)
    assert timings["a"].error == "out of memory"
    assert left["a"] == 0, "it was not called again"
    assert not timings["b"].error and len(timings["b"].ms) >= 5


def test_overlaps_count_once() -> None:
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert covered([]) == 0


class Stream:
    """A device and a host with clocks of their own, in milliseconds, behind the functions of torch.cuda that the figures use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.free_at = 0.0
        stream = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.time = 0.0

            def record(self) -> None:
                self.time = max(stream.now, stream.free_at)

            def query(self) -> bool:
                return self.time <= stream.now

            def elapsed_time(self, other: Event) -> float:
                return other.time - self.time

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(0.0, cycles / 1e6))
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def launch(self, host: float, work: float) -> None:
        self.now += host
        self.free_at = max(self.now, self.free_at) + work

    def synchronize(self, device: Any = None) -> None:
        self.now = max(self.now, self.free_at)


def test_the_device_does_not_wait_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches cost more than their work, and what the host takes is not known well enough at first."""
    stream = Stream(monkeypatch)

    def call() -> None:
        for _ in range(10):
            stream.launch(host=0.5, work=0.1)

    timing = Timing(host_ms=[0.2])
    on_device({"a": call}, {"a": timing}, torch.device("cuda"), lambda: None)
    assert timing.device_by == "held"
    assert timing.device_ms == pytest.approx(1.0)


def test_the_device_is_kept_busy_with_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that has rested is faster than one at work; so a call of which the host is done soon follows others like it."""
    stream = Stream(monkeypatch)
    rested = torch.cuda._sleep
    work = 2.1

    def sleep(cycles: int) -> None:
        nonlocal work
        rested(cycles)
        work = 2.0

    def call() -> None:
        nonlocal work
        stream.launch(host=0.5, work=work)
        work = 2.1

    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    timing = Timing(ms=[2.0], host_ms=[0.5])
    on_device({"a": call}, {"a": timing}, torch.device("cuda"), lambda: None)
    assert (timing.device_by, timing.device_ms) == ("held", pytest.approx(2.1))
    assert called._calls_ahead(timing) == 1
    assert called._calls_ahead(Timing(ms=[2.0], host_ms=[1.9])) == 0, "that many calls do not fit into a queue"


def test_a_call_that_waits_for_the_device_is_measured_by_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(monkeypatch)

    def call() -> None:
        stream.launch(host=0.5, work=0.1)
        stream.synchronize()

    monkeypatch.setattr(called, "_busy", lambda *given: 0.25)
    timing = Timing(host_ms=[0.5])
    on_device({"a": call}, {"a": timing}, torch.device("cuda"), lambda: None)
    assert (timing.device_by, timing.device_ms) == ("busy", 0.25)


# ---- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "impls"), [("prefill", ("eager", "codetta")), ("train", ("eager",))])
def test_rows(which: str, impls: tuple[str, ...], by_reference: None) -> None:
    bench = GridBench(CPU, ("tiny",), ((1, 8), (2, 8)), (which,), 1, impls, seconds=0.01)
    cells = list(measure_grid(bench))
    assert [[(row["pass"], row["batch"], row["impl"]) for row in rows] for rows in cells] == [
        [(which, batch, impl) for impl in impls] for batch in (1, 2)
    ]
    for row in (row for rows in cells for row in rows):
        assert {"model", "layers", "batch", "length", "pass", "impl", "ms", "device_ms", "gib"} <= set(row)
        assert row["ms"] > 0
        assert row["first_ms"] > 0
        assert row["layers"] == 1
        assert row.get("distance", 0) < 0.02


def test_a_contender_that_fails_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(name: str, model: Any) -> Any:
        def full(**named: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        def broken(**named: Any) -> Any:
            raise RuntimeError("no such\nkernel")

        return {"compile": full, "codetta": broken}.get(name) or contender(name, model)

    monkeypatch.setattr(grid_module, "contender", made)
    bench = GridBench(CPU, ("tiny",), ((1, 8),), ("prefill",), 1, ("eager", "compile", "codetta"), seconds=0.01)
    ((eager, full, broken),) = measure_grid(bench)
    assert eager["ms"] > 0
    assert full["ms"] is None and full["error"] == "out of memory"
    assert broken["error"] == "RuntimeError: no such kernel"
    assert cells_of([eager, full, broken])[0].ratio() is None


def test_processes_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one process measures them, in the same order; one that fails is noted, and the others are measured."""
    heard: list[str] = []
    bench = GridBench(CPU, ("tiny", "gpt2"), ((1, 8), (1, 2048)), ("prefill",), 1, ("eager",), seconds=0.01)
    rows = [row for rows in measure_grid_with(2, bench, heard.append) for row in rows]
    assert [(row["model"], row["length"]) for row in rows] == [("tiny", 8), ("tiny", 2048), ("gpt2", 8)]
    assert all(row["ms"] > 0 for row in rows)
    assert any("1x2048 is left out" in text for text in heard)
    broken = [("tiny", "prefill", ((1, 8),)), ("nothing", "prefill", ((1, 8),))]
    monkeypatch.setattr(GridBench, "jobs", lambda self: broken)
    cells = measure_grid_with(2, bench, heard.append)
    assert next(cells)[0]["model"] == "tiny"
    with pytest.raises(CodettaError, match="nothing, prefill"):
        next(cells)
    assert any("'nothing' is unknown" in text for text in heard)


def test_sizes_that_a_model_cannot_take_are_left_out_and_said() -> None:
    heard: list[str] = []
    bench = GridBench(CPU, ("gpt2",), ((1, 2048),), ("prefill",), 1, ("eager",), seconds=0.01)
    assert list(measure_grid(bench, heard.append)) == []
    assert any("1024" in text and "1x2048" in text for text in heard)


def test_what_is_measured_by_default() -> None:
    bench = GridBench(torch.device("cuda"))
    jobs = bench.jobs()
    assert len({name for name, _, _ in jobs}) == 9
    assert len([name for name, which, _ in jobs if which == "train"]) == 5
    assert {len(sizes) for _, which, sizes in jobs if which == "prefill"} == {8}
    assert all(name in SHAPES for name, _, _ in jobs)
    assert "liger" not in bench.contenders("prefill")
    assert "compile-max" not in bench.contenders("prefill")
    assert GridBench(torch.device("cuda"), ("bert-base",)).jobs() == [
        ("bert-base", "prefill", grid_module.GPU_SIZES["prefill"])
    ]


# ---- ratios ------------------------------------------------------------------------------------------------------


def row(impl: str, ms: float | None, batch: int = 1, which: str = "prefill", **more: Any) -> dict[str, Any]:
    return {"model": "m", "layers": 2, "batch": batch, "length": 16, "pass": which, "impl": impl, "ms": ms, "device_ms": None, "gib": None, **more}  # fmt: skip


ROWS = [
    row("eager", 4.0), row("compile", 2.0), row("codetta", 1.0, device_ms=0.5),
    row("eager", 1.0, 2), row("compile", 3.0, 2), row("codetta", 2.0, 2),
    row("eager", 1.0, which="train"), row("codetta", None, which="train", error="out of memory"),
]  # fmt: skip


def test_ratios_are_to_the_best_peer() -> None:
    first, second, third = cells_of(ROWS)
    assert (first.best_peer(), first.ratio(), first.ratio("device_ms")) == ("compile", 2.0, None)
    assert (second.best_peer(), second.ratio()) == ("eager", 0.5)
    assert third.ratio() is None
    assert mean_ratio([first, second, third]) == pytest.approx(1.0)
    assert mean_ratio([third]) is None


def test_the_last_row_counts() -> None:
    (cell,) = cells_of([row("eager", 4.0), row("codetta", 1.0), row("codetta", 2.0)])
    assert cell.ratio() == 2.0


def test_contenders_are_compared_within_a_run(tmp_path: Path) -> None:
    runs = [
        [row("eager", 4.0), row("compile", 1.0), row("codetta", 2.0)],
        [row("eager", 1.0, 2)],
        [row("eager", 4.0), row("codetta", 2.0)],
    ]
    path = tmp_path / "grid.jsonl"
    path.write_text("\n".join(json.dumps({"bench": "grid", "device": "d", "rows": rows}) for rows in runs))
    first, second = cells_of(recorded(path)["rows"])
    assert (first.best_peer(), first.ratio(), second.batch) == ("eager", 2.0, 2)


def test_colours_diverge_around_one() -> None:
    assert colour(1.0) == (236, 234, 228)
    assert colour(4.0) == colour(2.0) != colour(0.5) == colour(0.1)


def test_plot(tmp_path: Path) -> None:
    path = tmp_path / "grid.svg"
    plot(path, ROWS, "a <device>")
    root = ElementTree.fromstring(path.read_text())
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <device>", "2.00", "0.50", "1x16", "2x16", "m, 2 layers"} <= set(texts)
    assert "prefers-color-scheme" in path.read_text()
    with pytest.raises(ArgumentError, match=r"\.svg"):
        plot(tmp_path / "grid.pdf", ROWS, "")


def test_plot_as_png(tmp_path: Path) -> None:
    try:
        import PIL  # noqa: F401
    except ImportError:
        with pytest.raises(ArgumentError, match="Pillow"):
            plot(tmp_path / "grid.png", ROWS, "")
        return
    plot(tmp_path / "grid.png", ROWS, "")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_markdown() -> None:
    lines = markdown(ROWS).splitlines()
    assert len(lines) == 2 + 3
    assert lines[2].startswith("| m | 2 | prefill | 1 × 16 | compile | 2.00 | 1.00 | 2.00 |")
    assert "**0.50**" in lines[3]


# ---- the command -------------------------------------------------------------------------------------------------


def test_command_records_cells_and_draws_from_the_record(tmp_path: Path) -> None:
    out, picture = tmp_path / "grid.jsonl", tmp_path / "grid.svg"
    words = "bench grid --models tiny --sizes 1x8,2x8 --pass prefill --layers 1 --impls eager,codetta --seconds 0.01 --device cpu --json --out"
    done = CliRunner().invoke(app, [*words.split(), str(out)])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["bench"] == "grid"
    assert len(record["rows"]) == 4
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(each["rows"]) for each in lines] == [2, 2], "a line for each cell"
    assert recorded(out)["rows"] == record["rows"]
    again = CliRunner().invoke(app, ["bench", "grid", "--from", str(out), "--plot", str(picture), "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout.splitlines()[-1])["rows"] == record["rows"]
    assert picture.read_text().startswith("<svg")
    shown = CliRunner().invoke(app, ["bench", "grid", "--from", str(out), "--markdown"])
    assert "| tiny | 1 | prefill | 1 × 8 |" in shown.output


def test_sizes() -> None:
    assert parse_grid_sizes("1x16, 4x512") == ((1, 16), (4, 512))
    assert parse_grid_sizes("") == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--models gpt5", "models: 'gpt5' is unknown. Use some of"),
        ("--sizes 1x16,512", "sizes: '512' is not BATCHxLENGTH. Pass, for example"),
        ("--sizes 1x-5", "sizes: '1x-5'"),
        ("--sizes 0x16", "sizes: '0x16'"),
        ("--pass decode", "pass: 'decode' is unknown. Use some of prefill, train"),
        ("--impls nobody", "impls: 'nobody' is unknown. Use some of eager"),
        ("--layers -1", "'--layers'"),
        ("--seconds 0", "seconds: 0.0 is too small"),
        ("--device cuda:99", "device"),
        ("--figure gib", "figure: is 'gib'. Pass ms or device_ms"),
        ("--plot grid.pdf", "plot: grid.pdf is no picture. Pass a name that ends in .svg or .png"),
        ("--from nowhere.jsonl", "from: nowhere.jsonl cannot be read"),
        ("--from pyproject.toml", "from: pyproject.toml cannot be read"),
    ],
)
def test_bad_arguments(words: str, message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "grid", *words.split()])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
