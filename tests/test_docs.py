"""Documentation is executed: every python block of a page, in order, in one namespace."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page: Path) -> None:
    text = page.read_text()
    # A module that can be imported: Dynamo looks up where a compiled class comes from.
    module = sys.modules[f"page_{page.stem}"] = types.ModuleType(f"page_{page.stem}")
    namespace = module.__dict__
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        # Empty lines in front, so that a traceback has the page's own line numbers.
        exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)


def test_there_is_something_to_run() -> None:
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) > 15
