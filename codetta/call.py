"""Epilogue: a traced function that is called with tensors. Reads the kinds, shapes and layouts off the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from codetta import dispatch, dsl, trace
from codetta.errors import ArgumentError, TraceError
from codetta.ir.op import compute_dtype
from codetta.program import Operand, Product, Program
from codetta.repeated import MOST, Key, Repeated, key_of
from codetta.runtime.bind import Binding, bind_operand, bind_output, check_overlap, check_tensor, flat_rows, matrix
from codetta.stat import Stat

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OPERAND_DTYPES = (*FLOATS, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)

Weights = Tensor | Sequence[Tensor]

# Arguments of a call itself.
RESERVED = {"self", "a", "w", "out", "backend", "tf32", "finish"}


def epilogue(fn: Callable[..., Any]) -> Epilogue:
    """Turn a function of the accumulator into a fused product: `y = fn(a, w, operand=tensor, ...)`."""
    return Epilogue(fn)


class Epilogue:
    """`fn(acc, ...)` as a callable over tensors: a (..., K) and w (N, K), or several w that share a."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.kinds = trace.annotated_kinds(fn)
        taken = sorted(RESERVED & set(self.kinds))
        if taken:
            raise TraceError(
                f"{fn.__name__}: {taken[0]!r} is an argument of every call and cannot name an operand: rename it"
            )
        self.defaults = {
            key: parameter.default
            for key, parameter in inspect.signature(fn).parameters.items()
            if parameter.default is not parameter.empty
        }
        self._programs: dict[Any, Program] = {}
        self._seen: dict[Key, None] = {}  # calls, once
        self._repeated: dict[Key, tuple[Program, Repeated]] = {}
        update_wrapper(self, fn)

    def __repr__(self) -> str:
        return f"<codetta epilogue {self.fn.__name__}{inspect.signature(self.fn)}>"

    def __call__(
        self,
        a: Tensor,
        w: Weights,
        *,
        out: Mapping[str, Tensor] | None = None,
        backend: str | None = None,
        tf32: bool = False,
        finish: bool = True,
        **operands: Any,
    ) -> Any:
        """Multiply a (..., K) by w (N, K) transposed and apply the epilogue to the product.

        out: tensors to write to, by output name. backend: reference, cpu or triton (default: by device). tf32: allow it for
        fp32 products. finish: with False, reductions come back as `Stat`s for the next program to finish as it loads them.
        Returns the outputs in the order of the epilogue's dict; a single one by itself.
        """
        written = out or {}
        key = key_of(a, w, operands, written, (tf32, backend))
        known = self._repeated.get(key) if key is not None else None
        if known is not None:
            program, call = known
            results = call(a, w, operands, written)
        else:
            run = partial(self._run, tf32=tf32, backend=backend)
            program, results = run(a, w, operands, written)
            if key is not None and self._comes_again(key):
                self._repeated[key] = program, Repeated(run, program, a, w, operands, written)
        lead = tuple(a.shape[:-1])
        values = [self._public(program, lead, name, results[name], finish) for name in program.outputs]
        return values[0] if len(values) == 1 else tuple(values)

    def _run(
        self, a: Tensor, w: Weights, operands: dict[str, Any], out: Mapping[str, Tensor], tf32: bool, backend: str | None
    ) -> tuple[Program, dict[str, Tensor | Stat]]:  # fmt: skip
        """The program of a call and its outputs, not finished."""
        program, binding = self.bind(a, w, out=out, tf32=tf32, **operands)
        return program, dispatch.run(program, binding, backend)

    def _comes_again(self, key: Key) -> bool:
        """Whether there was a call like this before, for which there is room to be bound. With a number that is another at every call,
        such as a seed, no call looks like another."""
        kept: dict[Key, Any] = self._repeated if key in self._seen else self._seen
        while len(kept) >= MOST:
            kept.pop(next(iter(kept)), None)
        if kept is self._repeated:
            return True
        self._seen[key] = None
        return False

    def program(self, a: Tensor, w: Weights, *, tf32: bool = False, **operands: Any) -> Program:
        """The program of such a call, without running it (tensors on the meta device will do)."""
        return self._trace(*self._normalised(a, w, operands), tf32)

    def source(self, a: Tensor, w: Weights, *, backend: str | None = None, tf32: bool = False, **operands: Any) -> str:
        """The generated source of the kernel that such a call would launch."""
        program, binding = self.bind(a, w, tf32=tf32, **operands)
        chosen, _ = dispatch.choose(program, binding, backend)
        return chosen.source(program, binding)

    def bind(
        self, a: Tensor, w: Weights, *, out: Mapping[str, Tensor] | None = None, tf32: bool = False, **operands: Any
    ) -> tuple[Program, Binding]:
        """The program of a call and its tensors, checked."""
        self._refuse_gradients(a, w, operands)
        a, a_layout, weights, given, lead = self._normalised(a, w, operands)
        program = self._trace(a, a_layout, weights, given, lead, tf32)
        batch = a.shape[0] if program.batched else 1
        rows = a.shape[0] * a.shape[1] if program.batched else a.shape[0]
        samples = 1
        for size in lead[:-1]:
            samples *= size
        out = dict(out or {})
        unknown = set(out) - {store.name for store in program.stores}
        if unknown:
            raise ArgumentError(
                "out",
                f"has {sorted(unknown)}, the epilogue stores {[s.name for s in program.stores]}",
                "use those names",
            )
        tensors: dict[str, Tensor | Stat] = {}
        for operand in program.operands:
            value = given[operand.name] if operand.name in given else out.get(operand.name)
            if value is None:
                raise ArgumentError(
                    f"out[{operand.name!r}]",
                    "is added to, so there must be a tensor",
                    f"pass out={{{operand.name!r}: tensor}}",
                )
            tensors[operand.name] = bind_operand(operand, value, rows, samples)
        outputs = {
            store.name: bind_output(store, out.get(store.name), rows, samples, a.device) for store in program.stores
        }
        flat = a.flatten(0, 1) if program.batched else a
        binding = Binding(rows, samples, batch, lead, flat, tuple(w for w, _ in weights), tensors, outputs)
        check_overlap(program, binding, out)
        return program, binding

    def _normalised(
        self, a: Tensor, w: Weights, operands: dict[str, Any]
    ) -> tuple[Tensor, str, list[tuple[Tensor, str]], dict[str, Any], tuple[int, ...]]:
        """a as a matrix (or a batch of them), each w with its layout, the operands by name, and a's leading shape."""
        if not isinstance(a, Tensor):
            raise ArgumentError(
                "a", f"expected a tensor, got {type(a).__name__}", "pass the left operand of the product, (..., K)"
            )
        check_tensor("a", a, a.device)
        listed = list(w) if isinstance(w, Sequence) else [w]
        if not listed:
            raise ArgumentError("w", "is empty", "pass a weight (N, K) or several")
        for index, each in enumerate(listed):
            label = "w" if len(listed) == 1 else f"w[{index}]"
            self._check_weight(label, each, a)
            if each.dim() != listed[0].dim():
                raise ArgumentError(
                    label, "has a batch dimension where another has none", "pass all weights with it, or all without"
                )
        batched = listed[0].dim() == 3
        if a.dim() < 2 or (batched and a.dim() != 3):
            raise ArgumentError(
                "a",
                f"has shape {tuple(a.shape)}",
                "pass (..., K) with at least one row dimension; (B, M, K) for w (B, N, K)",
            )
        lead = tuple(a.shape[:-1])
        if batched:
            # Rows of a batch are counted through, so A must be row-major across entries.
            a, a_layout = a.contiguous(), "mk"
        else:
            a, major = matrix("a", flat_rows(a))
            a_layout = "mk" if major == "row" else "km"
        weights = []
        for each in listed:
            each, major = matrix("w", each)
            weights.append((each, "nk" if major == "row" else "kn"))
        names = list(self.kinds)
        if len(names) < len(listed):
            raise ArgumentError(
                "w",
                f"{len(listed)} weights for {len(names)} accumulators",
                f"pass one weight per leading parameter of {self.fn.__name__}",
            )
        expected = names[len(listed) :]
        unknown = [key for key in operands if key not in expected]
        if unknown:
            raise ArgumentError(
                unknown[0], f"is no operand of {self.fn.__name__}", f"its operands are {', '.join(expected) or 'none'}"
            )
        missing = [key for key in expected if key not in operands and key not in self.defaults]
        if missing:
            raise ArgumentError(missing[0], f"is missing in the call of {self.fn.__name__}", f"pass {missing[0]}=")
        given = {key: operands.get(key, self.defaults.get(key)) for key in expected}
        for key, value in given.items():
            if isinstance(value, Tensor) and value.dtype not in OPERAND_DTYPES:
                raise ArgumentError(key, f"has dtype {value.dtype}", "pass a real float, fp8, int8 or integer tensor")
            if isinstance(value, Tensor):
                check_tensor(key, value, a.device)
            elif (
                self.kinds[key] is not None and not isinstance(value, Stat | Number) and not self._left_out(key, value)
            ):
                raise ArgumentError(key, f"expected a tensor, got {type(value).__name__}", "pass a torch.Tensor")
            if isinstance(value, Stat) and value.device != a.device:
                raise ArgumentError(
                    key, f"is on {value.device}, but a is on {a.device}", f"move it: {key}.to({str(a.device)!r})"
                )
        return a, a_layout, weights, given, lead

    def _left_out(self, key: str, value: Any) -> bool:
        """Whether an optional operand is not given: None, where None is the parameter's default."""
        return value is None and self.defaults.get(key, 0) is None

    @staticmethod
    def _refuse_gradients(a: Any, w: Any, operands: dict[str, Any]) -> None:
        """A program has no autograd of its own: say so instead of cutting the graph in silence."""
        if not torch.is_grad_enabled():
            return
        listed = [w] if isinstance(w, Tensor) else list(w) if isinstance(w, list | tuple) else []
        for name, value in [("a", a), *(("w", each) for each in listed), *operands.items()]:
            if isinstance(value, Tensor) and value.requires_grad:
                raise ArgumentError(
                    name,
                    "requires a gradient, which a single program does not compute",
                    f"call it under torch.no_grad() or pass {name}.detach(), and use the backward epilogues of codetta.library",
                )

    @staticmethod
    def _check_weight(name: str, w: Any, a: Tensor) -> None:
        check_tensor(name, w, a.device)
        if w.dim() not in (2, 3):
            raise ArgumentError(name, f"has shape {tuple(w.shape)}", "pass (N, K) as nn.Linear stores it, or (B, N, K)")
        if not w.shape[-2]:
            raise ArgumentError(name, "has no columns to produce (N = 0)", "pass a weight with at least one row")
        if w.shape[-1] != a.shape[-1]:
            hint = f"pass {name}.T" if w.shape[0] == a.shape[-1] else "the last dimensions of a and w must agree"
            raise ArgumentError(name, f"has K = {w.shape[-1]}, but a has K = {a.shape[-1]}", hint)
        if w.dim() == 3 and (a.dim() != 3 or a.shape[0] != w.shape[0]):
            raise ArgumentError(
                name, f"has {w.shape[0]} batch entries, a has shape {tuple(a.shape)}", "pass a of shape (B, M, K)"
            )
        for label, tensor in (("a", a), (name, w)):
            if tensor.dtype not in FLOATS:
                raise ArgumentError(
                    label,
                    f"has dtype {tensor.dtype}",
                    "products take float32, bfloat16, float16 or float64: convert it",
                )
        if w.dtype != a.dtype:
            raise ArgumentError(name, f"has dtype {w.dtype}, but a has {a.dtype}", f"convert one: {name}.to({a.dtype})")

    def _trace(
        self,
        a: Tensor,
        a_layout: str,
        weights: list[tuple[Tensor, str]],
        given: dict[str, Any],
        lead: tuple[int, ...],
        tf32: bool,
    ) -> Program:
        batched = weights[0][0].dim() == 3
        rows = a.shape[0] * (a.shape[1] if batched else 1)
        products = tuple(Product(each.shape[-2], each.dtype, layout) for each, layout in weights)
        declared = {key: self._declare(key, value, rows, products) for key, value in given.items()}
        for operand in declared.values():
            index = declared.get(operand.row_index) if isinstance(operand, Operand) and operand.row_index else None
            if isinstance(operand, Operand) and operand.row_index and not _is_index(index):
                raise ArgumentError(
                    operand.name,
                    f"is looked up by {operand.row_index!r}, which is no integer Col operand of {self.fn.__name__}",
                    f"add the parameter {operand.row_index}: codetta.Col and pass the row numbers",
                )
        key = (a.dtype, a_layout, a.shape[-1], products, tuple(declared.items()), batched, tf32)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = trace.trace(
                self.fn, name=self.fn.__name__, k=a.shape[-1], a_dtype=a.dtype, products=products, operands=declared,
                a_layout=a_layout, batched=batched, tf32=tf32,
            )  # fmt: skip
        return program

    def _declare(self, name: str, value: Any, rows: int, products: tuple[Product, ...]) -> Any:
        """The Operand that a tensor is, by its annotation or its shape; plain values stay what they are."""
        if isinstance(value, Stat):
            return Operand(name, value.partials.dtype, "each", stat=value.how)
        if not isinstance(value, Tensor):
            return value
        shape = tuple(value.shape)
        kind = self.kinds[name]
        if kind is None:
            flat = (value.numel() // shape[-1], shape[-1]) if len(shape) > 2 and shape[-1] else shape
            cols = {product.cols // parts for product in products for parts in (1, 2) if product.cols % parts == 0}
            kind = trace.infer_kind(name, flat, rows, cols)
        last = shape[-1] if shape else 1
        match kind:
            case dsl.Scalar():
                return Operand(name, value.dtype, "none")
            case dsl.Row():
                return Operand(name, value.dtype, "none", value.numel())
            case dsl.Col():
                return Operand(name, value.dtype, "each")
            case dsl.SampleRow():
                return Operand(name, value.dtype, "sample", last)
            case dsl.Tile(layout="rows"):
                return Operand(name, value.dtype, "each", last)
            case dsl.Tile(layout=layout):
                if len(shape) != 4:
                    raise ArgumentError(
                        name, f"has shape {shape}", f"pass a 4-dimensional tensor in the order {layout}"
                    )
                sizes = dict(zip(layout, shape, strict=True))
                return Operand(name, value.dtype, "each", sizes["h"] * sizes["d"], layout=layout, head=sizes["d"])
            case dsl.Table(rows="repeat") if value.numel() == last:
                # One row for all: a vector that repeats over the columns, such as a norm's weight inside each head.
                return Operand(name, value.dtype, "none", last, period=last)
            case dsl.Table(rows=how):
                index = how if how not in ("each", "repeat") else None
                return Operand(name, value.dtype, "index" if index else how, last, period=last, row_index=index)
            case dsl.Group(rows=group):
                return Operand(name, value.dtype, "each", last, group=group)
        raise AssertionError(kind)

    @staticmethod
    def _public(program: Program, lead: tuple[int, ...], name: str, value: Tensor | Stat, finish: bool) -> Any:
        """An output as the caller expects it: leading dimensions (a's) back in place, reductions finished."""
        sink = next((each for each in program.sinks if each.name == name), None)
        if sink is None:
            store = next(each for each in program.stores if each.name == name)
            assert isinstance(value, Tensor)
            regular = store.layout == "rows" and store.group == 1 and store.row_index is None
            return value.view(*lead, *value.shape[1:]) if regular and len(lead) > 1 else value
        assert isinstance(value, Stat)
        if not finish:
            return value
        shape = lead if sink.by_row else (lead[0], sink.cols) if program.batched else (sink.cols,)
        finished = value.finish()
        dtype = compute_dtype(program.a_dtype)
        if isinstance(finished, tuple):
            return tuple(each.to(dtype).view(shape) for each in finished)
        return finished.to(dtype).view(shape)


def _is_index(operand: Any) -> bool:
    return isinstance(operand, Operand) and operand.dtype in (torch.int32, torch.int64) and not operand.cols
