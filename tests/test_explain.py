"""What is said about a compiled model: explain, verify, the run-time check, the laws' pages, and masks called by name."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import LAYERS, ZOO

import codetta
from codetta.errors import ArgumentError, CheckError
from codetta.integrations.dynamo import backend_of
from codetta.laws import laws
from codetta.runtime import launch as launching
from codetta.runtime import writer
from codetta.runtime.masks import CAUSAL, FULL, SizedMask, name_of
from codetta.steps import Launch, Mask

ROOT = Path(__file__).resolve().parent.parent


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.LayerNorm(width)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 48), nn.Linear(48, width)
        self.next = nn.Linear(width, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.out(x)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x, self.next(self.norm1(x))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def test_report(block: Block) -> None:
    x = torch.randn(2, 5, 32)
    report = codetta.explain(block, x)
    assert [program.products for program in report.programs] == [[[32, 32]], [[48, 32]], [[32, 48]], [[24, 32]]]
    assert report.launches_after == 4 < report.launches_before
    assert report.bytes_after < report.bytes_before
    assert not report.leftover_ops and not report.calls
    assert "row_scale_commutes" in report.programs[1].laws and "row_scale_commutes" in report.programs[3].laws
    assert report.programs[0].rows == 10 and report.programs[0].where == "out"
    fields = {"programs", "calls", "leftover_ops", "launches_before", "launches_after", "bytes_before", "bytes_after", "refusals"}  # fmt: skip
    assert fields <= set(json.loads(json.dumps(report.to_json())))
    assert "program_3" in str(report)


def test_explain_leaves_the_model_as_it_is(block: Block) -> None:
    x = torch.randn(2, 5, 32)
    codetta.explain(block, x)
    assert backend_of(block) is None
    compiled = codetta.compile(block)
    again = codetta.explain(compiled, x)
    assert len(again.programs) == 4
    known = backend_of(compiled)
    assert known is not None and not known.executors, "explain compiles a copy"


def test_strict_numerics_defers_nothing(block: Block) -> None:
    report = codetta.explain(block, torch.randn(2, 5, 32), options=codetta.Options(numerics="strict"))
    assert all("row_scale_commutes" not in program.laws for program in report.programs)
    # Both norms are computed before the product that reads them, by programs of their own.
    assert [program.products for program in report.programs].count([]) == 2 and not report.leftover_ops


def test_verify(block: Block) -> None:
    verdicts = codetta.verify(block.bfloat16(), torch.randn(2, 5, 32).bfloat16())
    assert len(verdicts) == 2 and all(verdict.within_budget for verdict in verdicts)
    assert all("ok" in str(verdict) for verdict in verdicts)


def test_verify_finds_a_wrong_answer(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = writer.launch

    def wrong(*args: object) -> list[object]:
        first, *rest = launch(*args)  # type: ignore[arg-type]
        return [first * 1.01 if isinstance(first, Tensor) else first, *rest]

    monkeypatch.setattr(writer, "launch", wrong)
    assert not all(verdict.within_budget for verdict in codetta.verify(block, torch.randn(2, 5, 32)))


def test_check_names_the_first_program_that_disagrees(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODETTA_CHECK", "1")
    compiled = codetta.compile(block)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        compiled(x)  # all is well
        monkeypatch.setattr(launching.dispatch, "run", _spoiled(launching.dispatch.run))
        with pytest.raises(CheckError, match="program_0: output"):
            compiled(x)


def _spoiled(run):  # type: ignore[no-untyped-def]
    def wrong(program, binding, backend=None):  # type: ignore[no-untyped-def]
        results = run(program, binding, backend)
        for value in results.values():
            if isinstance(value, Tensor):
                value.mul_(1.1)
        return results

    return wrong


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match="model: is a int"):
        codetta.compile(3)  # type: ignore[type-var]
    with pytest.raises(ArgumentError, match="model: is a str"):
        codetta.explain("llama")
    with pytest.raises(ArgumentError, match="model: is a function"):
        codetta.verify(lambda x: x, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="numerics"):
        codetta.Options(numerics="loose")
    with pytest.raises(ArgumentError, match="leftover"):
        codetta.Options(leftover="eager")


def test_rules_page_is_that_of_the_laws() -> None:
    made = runpy.run_path(str(ROOT / "docs/make.py"))
    assert (ROOT / "docs/rules.md").read_text() == made["rules"]()
    assert len(laws()) == len({law.name for law in laws()}) >= 9


def test_no_model_is_named_where_graphs_are_rewritten() -> None:
    """A law knows algebra, not models."""
    names = ("llama", "qwen", "mistral", "gemma", "gpt", "neox", "phi", "bert", "vit")
    package = ROOT / "codetta"
    files = [*package.glob("rewrite/*.py"), *package.glob("plan/*.py"), *package.glob("capture/*.py")]
    for path in [*files, package / "partition.py", package / "placement.py"]:
        text = path.read_text().lower()
        found = [name for name in names if name in text.replace("philox", "")]
        assert not found, f"{path.name} names {found}"


def test_predictions_follow_the_roofline(block: Block) -> None:
    from codetta.plan.cost import bytes_moved, flops, predicted_ms
    from codetta.plan.target import TARGETS

    assert all(program.predicted_ms is None for program in codetta.explain(block, torch.randn(2, 5, 32)).programs)
    compiled = codetta.compile(block)
    with torch.no_grad():
        compiled(torch.randn(2, 5, 32))
    backend = backend_of(compiled)
    assert backend is not None
    program = next(step.program for step in backend.executors[0].plan.steps if isinstance(step, Launch))
    target = TARGETS["sm_90"]
    by_bytes = bytes_moved(program, 10) / target.read_tbs / 1e9
    assert predicted_ms(program, 10, target) == by_bytes > flops(program, 10) / target.matmul_tflops / 1e9


def test_debug_levels(block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CODETTA_DEBUG", "3")
    with torch.no_grad():
        codetta.compile(block)(torch.randn(2, 5, 32))
    said = capsys.readouterr().out
    assert "row_scale_commutes" in said and "def plan(args" in said and "program_0 (10 rows) on" in said


# ---- masks -------------------------------------------------------------------------------------------------------


def test_names_of_masks() -> None:
    causal = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    assert name_of(causal) == CAUSAL
    assert name_of(torch.zeros(5, 5).masked_fill(~causal[0, 0], -torch.inf)) == CAUSAL
    assert name_of(torch.ones(3, 4, dtype=torch.bool)) == FULL
    assert name_of(causal[..., 1:, :]) is None, "queries that begin later see other keys"
    window = causal & ~torch.ones(5, 5, dtype=torch.bool).tril(-3)
    assert name_of(window) is None
    assert name_of(torch.zeros(5, 5).masked_fill(~causal[0, 0], -1.0)) is None, "a bias is no mask"


def test_masks_are_made_once() -> None:
    made = []

    def make(size: int) -> tuple[Tensor]:
        made.append(size)
        return (torch.ones(size, size, dtype=torch.bool).tril(1 if size == 4 else 0),)

    mask = SizedMask(make)
    assert mask(5) == CAUSAL and mask(5) == CAUSAL and made == [5]
    assert isinstance(mask(4), Tensor) and isinstance(mask(4), Tensor) and made == [5, 4]


@pytest.mark.parametrize("window", [0, 3])
def test_attention_is_told_the_name(window: int) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
            place = torch.arange(x.shape[1])
            mask = place[:, None] >= place[None, :]
            if window:
                mask = mask & (place[:, None] - place[None, :] < window)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model, x = Attends(), torch.randn(2, 6, 16)
    with torch.no_grad():
        expected = [model(each) for each in (x, x[:, :4])]
        codetta.compile(model)
        for each, want in zip((x, x[:, :4], x), (*expected, expected[0]), strict=True):
            torch.testing.assert_close(model(each), want)
    backend = backend_of(model)
    assert backend is not None
    steps = backend.executors[0].plan.steps
    assert sum(isinstance(step, Mask) for step in steps) == 1
    assert sum(isinstance(step, Launch) for step in steps) == 1


# ---- the command line --------------------------------------------------------------------------------------------


def test_commands() -> None:
    from typer.testing import CliRunner

    from codetta.cli import app

    target = f"{ROOT / 'examples/compile_model.py'}:example"
    run = CliRunner().invoke(app, ["explain", target, "--json"])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout.splitlines()[-1])
    # Four for each block, and the statistics of the first norm's rows.
    assert [len(each["products"]) > 0 for each in report["programs"]] == [False, *[True] * 8]
    assert len(report["calls"]) == 2
    run = CliRunner().invoke(app, ["verify", target, "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout.splitlines()[-1])["outputs"][0]["within_budget"]
    for wrong in ("nothing", "missing.py:example", f"{ROOT / 'examples/compile_model.py'}:none"):
        run = CliRunner().invoke(app, ["explain", wrong])
        assert run.exit_code == 2 and "target" in run.output


def test_training() -> None:
    """Both halves, and what is kept for gradients: nothing normalised, and less than eager keeps."""
    entry = ZOO["llama"]
    model = entry.model(torch.bfloat16)
    args, named = entry.example(2, 32, dtype=torch.bfloat16)
    report = codetta.explain(model, *args, training=True, options=codetta.Options(leftover="graph"), **named)
    backward = [program for program in report.programs if program.backward]
    assert len(report.programs) - len(backward) == 4 * LAYERS + 2 and backward
    assert any("inner_product_moves" in program.laws for program in backward)
    assert 0 < report.saved_bytes < 0.7 * report.eager_saved_bytes
    assert sum(each["bytes"] for each in report.saved) == report.saved_bytes
    text = str(report)
    assert "(backward)" in text and "where eager keeps" in text and "program_3 y1" in text
    assert "program_3 y0" not in [each["what"] for each in report.saved]  # made again among the gradients
    assert report.to_json()["saved"][0].keys() == {"what", "shape", "bytes"}
    assert all(parameter.grad is None for parameter in model.parameters())
    plain = codetta.explain(model, *args, **named)
    assert not plain.saved and not any(program.backward for program in plain.programs)
