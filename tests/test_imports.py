"""Imports point one way, importing needs nothing but torch, and no file knows where it was written."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "codetta"

# From the bottom up: a module may import from its own layer and from earlier ones in this list, never from a later one.
LAYERS: list[tuple[str, list[str]]] = [
    ("errors", ["codetta.errors", "codetta.options", "codetta.progress"]),
    ("ir", ["codetta.ir"]),
    ("rewrite", ["codetta.rewrite"]),
    ("program", ["codetta.program"]),
    # What a call's tensors are: data that backends are handed, so below them.
    ("tensors", ["codetta.stat", "codetta.runtime.bind", "codetta.runtime.invocation"]),
    ("language", ["codetta.dsl", "codetta.trace"]),
    ("plan", ["codetta.plan"]),
    ("cache", ["codetta.runtime.cache"]),
    ("tuning", ["codetta.plan.tune"]),  # a part of the plan that is remembered
    ("backends", ["codetta.backends"]),
    ("dispatch", ["codetta.dispatch"]),
    # Functions of launches, called again with everything decided.
    (
        "bound",
        [
            f"codetta.runtime.{name}"
            for name in (
                "function",
                "sized",
                "memsets",
                "recorded",
                "launcher",
                "tape",
                "bound",
                "replay",
                "speculation",
                "bindings",
            )
        ],
    ),
    ("call", ["codetta.call", "codetta.repeated"]),
    ("library", ["codetta.library", "codetta.fused"]),
    # Attention, the loss, gradients that are calls of their own: what graphs name, with the launches that they are made of.
    (
        "operators",
        [
            "codetta.append",
            "codetta.attention",
            "codetta.embedding",
            "codetta.gained",
            "codetta.loss",
            "codetta.runtime.loss",
            "codetta.runtime.tables",
            "codetta.runtime.launch",
        ],
    ),
    (
        "capture",
        [
            "codetta.placement",
            "codetta.capture",
            "codetta.steps",
            "codetta.gather",
            "codetta.partition",
            "codetta.phases",
        ],
    ),
    ("runtime", ["codetta.runtime"]),
    ("compiler", ["codetta.compiler"]),
    # Among them Hugging Face's models, and text from them.
    (
        "integrations",
        [
            "codetta.integrations",
            "codetta.sampling",
            "codetta.barring",
            "codetta.text",
            "codetta.decode",
            "codetta.generate",
        ],
    ),
    ("package", ["codetta"]),  # its __init__ names what users see; so do explain and bench
    (
        "cli",
        [
            "codetta.terminal",
            "codetta.cli_arguments",
            "codetta.cli_grid",
            "codetta.cli_bench",
            "codetta.cli_models",
            "codetta.cli_generate",
            "codetta.cli",
            "codetta.__main__",
        ],
    ),
]
# The language describes programs and knows no tile, device or tensor of a call, though it comes after some of them.
FORBIDDEN = {"codetta.dsl": ("codetta.plan", "codetta.backends", "codetta.runtime", "codetta.stat")}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer(module: str) -> int:
    """The layer with the longest name that fits: codetta.runtime.bind before codetta.runtime."""
    fitting = [
        (len(prefix), index)
        for index, (_, prefixes) in enumerate(LAYERS)
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    return max(fitting)[1]


def imported(path: Path) -> set[str]:
    """Every codetta module that a file imports, wherever in the file; names are resolved to modules."""
    found = set()
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert not statement.level, f"{path}: relative import"
            for alias in statement.names:
                inner = f"{statement.module}.{alias.name}"
                found.add(inner if inner in MODULES else statement.module or "")
    return {name for name in found if name.split(".")[0] == "codetta"}


def test_imports_point_one_way() -> None:
    wrong = []
    for module, path in MODULES.items():
        mine = layer(module)
        for other in sorted(
            imported(path) & set(MODULES)
        ):  # others are imported where they are used, for a part that is not there
            if layer(other) > mine:
                wrong.append(
                    f"{module} ({LAYERS[mine][0]}) imports {other} ({LAYERS[layer(other)][0]}), which is built on top of it"
                )
            for forbidden in FORBIDDEN.get(module, ()):
                if (other + ".").startswith(forbidden + "."):
                    wrong.append(f"{module} must not know {other}")
    assert not wrong, "\n".join(wrong)


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_only_torch() -> None:
    """Whatever torch itself imports does not count; with torch's own imports gone, these must not be there."""
    code = """
import sys, torch
before = set(sys.modules)
import codetta
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"triton", "islpy", "rich", "typer", "transformers", "setuptools"}))
"""
    assert run_python(code, CUDA_VISIBLE_DEVICES="").strip() == "[]"


def test_import_with_everything_else_missing() -> None:
    code = """
import sys
for name in ("islpy", "rich", "typer"):
    sys.modules[name] = None
import codetta, torch
y = codetta.epilogue(lambda acc: codetta.relu(acc))(torch.ones(2, 3), torch.ones(4, 3), backend="reference")
print(y.sum().item())
"""
    assert run_python(code, CUDA_VISIBLE_DEVICES="", PATH="/nonexistent").strip() == "24.0"


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode or not listed.stdout:
        pytest.skip("no git repository here")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_file_knows_where_it_was_written() -> None:
    # Put together, so that this file does not find itself.
    words = ["../" + "shared", "/" + "work/", "/" + "root/", "/home" + "/"]
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for word in words:
            assert word not in text, f"{path.relative_to(ROOT)} mentions {word}"
