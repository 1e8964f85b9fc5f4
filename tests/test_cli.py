"""The command line: every command, its JSON, and what it says to bad arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import codetta
from codetta import library
from codetta.bench.run import KernelBench, geometric_means
from codetta.bench.samples import library_names, sample
from codetta.cli import app
from codetta.plan.cost import bytes_moved, bytes_unfused, flops
from codetta.runtime.cache import Cache, key_of


def run(*words: str) -> Any:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_env() -> None:
    facts = run("env", "--json")
    assert facts["versions"]["torch"] == torch.__version__
    assert set(facts["backends"]) == {"reference", "cpu", "triton"}
    assert facts["backends"]["reference"] == "available"
    assert facts["caches"]["directory"] == os.environ["CODETTA_CACHE"]


@pytest.mark.parametrize("name", library_names())
def test_show(name: str) -> None:
    facts = run("show", name, "--json", "--sizes", "1024,2048")
    assert "def kernel" in facts["source"]
    assert facts["legal"] > 0


@pytest.mark.parametrize("target", ["sm_80", "gfx950"])
def test_show_for_another_target(target: str) -> None:
    facts = run("show", "norm_rope", "--target", target, "--json")
    assert facts["tile"]["loop"] == "pointer"


def test_show_without_source() -> None:
    assert "source" not in run("show", "residual_stats", "--backend", "reference", "--json")
    assert run("show", "list", "--json")["names"] == library_names()


def test_bench_kernels(tmp_path: Path) -> None:
    out = tmp_path / "results" / "kernels.jsonl"
    words = "bench kernels --rows 64 --sizes 64,96 --dtype fp32 --only residual_stats --only norm_swiglu --rounds 1 --skip-compile --device cpu --json"
    record = run(*words.split(), "--out", str(out))
    assert set(record) == {"bench", "device", "versions", "date", "commit", "command", "ceilings", "rows"}
    assert set(record["ceilings"]) == {"read_tbs", "matmul_tflops"}
    assert [row["program"] for row in record["rows"]] == ["residual_stats", "norm_swiglu"]
    for row in record["rows"]:
        assert {"program", "M", "N", "K", "ms", "cublas_ms", "compile_ms", "eager_ms", "err_ratio", "tile"} <= set(row)
        assert row["ms"] > 0
        assert row["within_budget"]
        assert row["compile_ms"] is None
    assert json.loads(out.read_text()) == record


def test_bench_decode() -> None:
    pytest.importorskip("transformers")
    words = "bench decode --model tiny --layers 1 --batch 2 --context 16 --dtype fp32 --dtype bf16 --only eager --only codetta --rounds 1 --device cpu --json"
    rows = run(*words.split())["rows"]
    assert [(row["dtype"], row["impl"]) for row in rows] == [
        (dtype, each) for dtype in ("float32", "bfloat16") for each in ("eager", "codetta")
    ]
    assert all(row["ms"] > 0 and row["stream_share"] > 0 and row["layers"] == 1 for row in rows)
    assert all(abs(row["kl"]) < (1e-9 if row["dtype"] == "float32" else 1e-3) for row in rows)


def test_bench_generate() -> None:
    pytest.importorskip("transformers")
    words = "bench generate --model tiny --layers 1 --prompt 8 --tokens 3 --batch 1 --rounds 1 --device cpu --json"
    settings = ["first token", "plain", "min_new_tokens", "right padding"]
    rows = run(*words.split(), *[word for each in settings for word in ("--setting", each)])["rows"]
    assert [(row["setting"], row["impl"]) for row in rows] == [
        ("first token", "eager"), ("first token", "codetta"), ("plain", "eager"), ("plain", "codetta"), ("min_new_tokens", "codetta"), ("right padding", "codetta"),
    ]  # fmt: skip
    assert all(row["ms"] > 0 and row["first_ms"] > 0 and row["layers"] == 1 for row in rows)


def test_default_sizes() -> None:
    gpu, cpu = (KernelBench(torch.device(kind)).jobs() for kind in ("cuda", "cpu"))
    assert {(d, f) for d, f, *_ in gpu} == {(2048, 8192), (4096, 14336), (8192, 28672)}
    assert {dtype for *_, dtype, _ in cpu} == {"fp32", "bf16"}


def test_geometric_means() -> None:
    rows = [{"ms": 1.0, "cublas_ms": 2.0, "compile_ms": None}, {"ms": 2.0, "cublas_ms": 1.0, "compile_ms": 3.0}]
    assert geometric_means(rows) == {"cublas": 1.0, "compile": 1.5, "eager": None}


def test_cache_is_cleared() -> None:
    Cache("probe").put(key_of(x=1), b"data")
    assert run("cache", "--json")["probe"]["entries"] == 1
    run("cache", "--clear", "--json")
    assert run("cache", "--json")["probe"]["entries"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show nothing", "is no epilogue"),
        ("show norm_rope --target sm_70", "sm_70"),
        ("show norm_rope --backend metal", "metal"),
        ("show norm_rope --dtype int4", "int4"),
        ("bench kernels --only nothing", "is no benchmark"),
        ("bench kernels --sizes 12", "D,F"),
        ("bench kernels --sizes 100,7", "multiple of 64"),
        ("bench kernels --dtype fp8", "fp8"),
        ("bench kernels --device tpu", "tpu"),
        ("bench decode --dtype fp8", "fp8"),
        ("bench step --device cpu", "from Hopper on"),
        ("bench step --device cpu --ring 100:4", "16384:4"),
        ("bench kernels --rounds 0", "'--rounds'"),
        ("bench kernels --rows -1", "'--rows'"),
        ("bench kernels --device cuda:99", "use cpu"),
        ("bench kernels --sizes 0,64", "D,F"),
        ("bench block --tokens -1", "'--tokens'"),
        ("bench block --sizes 100,7", "multiple of 128"),
        ("bench train --layers -1", "'--layers'"),
        ("bench train --model bert-base", "no loss"),
        ("bench train --device cuda:99", "use cpu"),
        ("bench layer --sizes 100,7", "multiple of 128"),
        ("bench layer --rounds 0", "'--rounds'"),
        ("bench loss --width -1", "'--width'"),
        ("bench loss --vocabulary -1", "'--vocabulary'"),
        ("bench decode --batch -1", "less than 1"),
        ("bench step --context 0", "'--context'"),
        ("tune --limit 0", "'--limit'"),
        ("generate tiny --device cuda:99", "use cpu"),
        ("tune --device cpu", "nothing to tune"),
    ],
)
def test_bad_arguments(words: str, message: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.strip() == f"codetta {codetta.__version__}"


def test_a_file_that_imports_its_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_it.py").write_text("import torch\nlayer = torch.nn.Linear(4, 4)\n")
    (tmp_path / "built.py").write_text(
        "import torch\nfrom neighbour_of_it import layer\ndef make():\n    return layer, torch.randn(2, 4)\n"
    )
    result = CliRunner().invoke(app, ["explain", f"{tmp_path}/built.py:make"])
    assert result.exit_code == 0, result.output


def test_module_and_last_line() -> None:
    done = subprocess.run([sys.executable, "-m", "codetta", "env", "--json"], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent.parent)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)) == ["versions", "devices", "compilers", "backends", "caches"]


# ---- bytes -------------------------------------------------------------------------------------------------------


def test_bytes_of_a_residual() -> None:
    a, w = torch.empty(128, 64, device="meta"), torch.empty(32, 64, device="meta")
    program = library.residual_stats.program(a, w, x=torch.empty(128, 32, device="meta"))
    matrices, tile = (128 * 64 + 32 * 64) * 4, 128 * 32 * 4
    assert bytes_moved(program, 128) == matrices + 2 * tile + 128 * 4
    assert bytes_unfused(program, 128) == matrices + 4 * tile + 128 * 4
    assert flops(program, 128) == 2 * 128 * 32 * 64


@pytest.mark.parametrize("name", library_names())
def test_fusion_saves_the_product(name: str) -> None:
    program, binding = sample(name).bind()
    before, after = (count(program, binding.rows, binding.samples) for count in (bytes_unfused, bytes_moved))
    # A product written and read again, less the partials that reductions leave behind.
    product = 2 * binding.rows * program.cols * program.a_dtype.itemsize
    assert 0.9 * product < before - after < 2 * product
