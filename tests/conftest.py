"""Settings that every test runs under."""

from __future__ import annotations

import importlib.util
import os

import torch

from codetta import compiler

# Workers that each start a thread per core stand in one another's way; one process by itself may have them all.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# Until there is a CPU backend, calls that do not name one run on the reference.
if importlib.util.find_spec("codetta.backends.cpu") is None:
    _load = compiler.load_backend
    compiler.load_backend = lambda name: _load("reference" if name == "cpu" else name)
