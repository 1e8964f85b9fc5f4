"""Settings that every test runs under.

Without a GPU, Triton kernels run in Triton's interpreter; it must be switched on before Triton is imported. Caches are
private to the session, so that no test sees what an earlier version left behind; workers share those of their parent.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

import pytest
import torch

# What fails inside of a compilation is to be seen, and not what others make of the graph instead.
os.environ["CODETTA_RAISE"] = "1"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:
    _folder = tempfile.mkdtemp(prefix="codetta-tests-")
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    os.environ["CODETTA_CACHE"] = os.path.join(_folder, "codetta")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(_folder, "triton")

# Tracing makes millions of small objects, nearly all of which live: looking for circles among them is a tenth of the time.
gc.set_threshold(50_000, 10, 10)

# Workers that each start a thread per core stand in one another's way; one process by itself may have them all.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan means does not depend on who runs its programs, and the reference has nothing to build."""
    from codetta import dispatch  # not before the settings above

    load = dispatch.load_backend
    monkeypatch.setattr(dispatch, "load_backend", lambda name: load("reference"))
