"""Codetta: GEMM-epilogue programs for PyTorch. Importing needs no GPU, no compiler and no network."""

from codetta import library
from codetta.call import Epilogue, epilogue
from codetta.dsl import (
    Col, Group, Moments, Row, SampleRow, Scalar, Table, Tile, Value, cast, clamp, col_index, col_max, col_sum, dropout, erf, erfc, exp, floor,
    gelu, group_max, group_sum, halves, join, log, maximum, minimum, pairs, parts, pick, quantize, relu, round, row_index,
    row_lse, row_max, row_moments, row_sum, rsqrt, sigmoid, silu, softcap, spread, sqrt, squared_relu, store, tanh, where,
)  # fmt: skip
from codetta.errors import ArgumentError, CodettaError, LoweringError, Reason, TraceError
from codetta.explain import Report, explain, explain_decode
from codetta.fused import fused_gemm_epilogue
from codetta.generate import Generated, Generator, Piece
from codetta.integrations.dynamo import compile
from codetta.loss import linear_cross_entropy
from codetta.options import Options
from codetta.program import Program
from codetta.sampling import Sampling
from codetta.stat import Stat
from codetta.verify import Verdict, verify

__version__ = "0.1.0"
__all__ = [name for name in dir() if not name.startswith("_")]
