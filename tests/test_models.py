"""Whole models, compiled, against eager by the budget of `oracle.py`; the plans that they become; what may change under them.

Truth is the same model in float64. Where a published model computes its norms in float32 whatever it is given, so does that
truth: it is the same for both sides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, note, settings
from modules import ACTIVATIONS, NORMS, Design, complaints, designs
from torch import Tensor, nn
from zoo import LAYERS, ZOO, Entry, Inputs, outputs

import codetta
from codetta import dispatch
from codetta.backends import reference
from codetta.backends.triton import interpreting
from codetta.integrations.dynamo import backend_of, by_inductor
from codetta.program import Program
from codetta.runtime.bind import Binding
from codetta.runtime.executor import Executor
from codetta.runtime.sized import Sized
from codetta.stat import Stat
from codetta.steps import Launch, Present, Region, Run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Dynamo counts compilations by function, which models share: beyond its limit they would stay eager."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def executors(model: nn.Module) -> list[Executor]:
    backend = backend_of(model)
    assert backend is not None
    return backend.executors


def launches(executor: Executor) -> list[Launch]:
    return [step for step in executor.plan.steps if isinstance(step, Launch)]


def deferred(executor: Executor) -> int:
    """How many products have had a norm moved behind them."""
    return sum("row_scale_commutes" in laws for laws in executor.plan.graph.fired.values())


def truth_of(entry: Entry, model: nn.Module) -> nn.Module:
    """The model with the very weights that it has now, in float64."""
    exact = entry.model(torch.float64)
    exact.load_state_dict(model.state_dict())
    return exact


def check(model: nn.Module, exact: nn.Module, inputs: Inputs, dtype: torch.dtype, where: Tensor | None = None) -> None:
    """The compiled model against its own forward, which is eager; `where`: the rows that mean something."""
    args, kwargs = inputs
    precise = [x.double() if x.is_floating_point() else x for x in args]
    precise_kwargs = {name: x.double() if x.is_floating_point() else x for name, x in kwargs.items()}
    results = [outputs(each) for each in (model(*args, **kwargs), model.forward(*args, **kwargs))]
    results.append(outputs(exact(*precise, **precise_kwargs)))
    if where is not None:
        results = [[x[where] for x in each] for each in results]
    ours, eager, truth = results
    assert ours, "the model returned no tensor"
    assert executors(model), "nothing was compiled: eager was compared with itself"
    bad = complaints(ours, eager, truth, dtype)
    assert not bad, bad


# ---- the zoo -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str, dtype: str) -> None:
    """Right, for two ragged shapes out of one compilation, and made of the launches that the architecture should take."""
    entry = ZOO[name]
    model = entry.model(DTYPES[dtype])
    exact = truth_of(entry, model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    codetta.compile(model, dynamic=True)
    for batch, length in ((2, 12), (3, 7)):
        check(model, exact, entry.example(batch, length, dtype=DTYPES[dtype]), DTYPES[dtype])
    assert len(executors(model)) == 1, "another shape was compiled anew"
    if name in BLOCKS:
        check_structure(name, executors(model)[0])
        assert deferred(executors(model)[0]), "no norm was deferred"
    # Compilation is in place, and takes nothing: same names, same objects, same numbers.
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    assert len(dict(model.named_parameters())) == len(parameters)


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.padded])
def test_padded(name: str, by_reference: None) -> None:
    """With an attention mask; rows of padding have no meaning, and on the left not even a key."""
    entry = ZOO[name]
    model, exact = entry.model(), entry.model(torch.float64)
    codetta.compile(model)
    for side in ("right", "left"):
        args, kwargs = entry.masked_example(2, 12, side=side)
        check(model, exact, (args, kwargs), torch.float32, where=kwargs["attention_mask"].bool())
    assert len(executors(model)) == 1


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "gpt_neox", "phi3"])
def test_key_value_cache(name: str, by_reference: None) -> None:
    """As published models are called by default: the prompt fills a cache, a token more continues it, the plan is as long."""
    entry = ZOO[name]
    model = entry.model()
    _, prompt = entry.example(2, 12)
    _, token = entry.example(2, 1)
    codetta.compile(model, dynamic=False)
    model(**prompt)
    plain = len(launches(executors(model)[0]))
    eager = model.forward(**prompt, use_cache=True)
    ours = model(**prompt, use_cache=True)
    assert len(launches(executors(model)[1])) == plain, "the cache broke a program"
    pairs = [(ours.logits, eager.logits)]
    for mine, theirs in zip(ours.past_key_values.layers, eager.past_key_values.layers, strict=True):
        pairs += [(mine.keys, theirs.keys), (mine.values, theirs.values)]
    eager = model.forward(**token, past_key_values=eager.past_key_values)
    ours = model(**token, past_key_values=ours.past_key_values)
    for mine, theirs in [*pairs, (ours.logits, eager.logits)]:
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


# ---- structure -----------------------------------------------------------------------------------------------------

# Launches of a block, and of what comes behind the last one.
BLOCKS = dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "vit"), (4, 1))
VIEWS = {
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "split",
    "split_with_sizes", "unbind", "alias", "detach", "sym_size",
    "clone",  # a model that asks for contiguous memory: what attention returns is copied if it is not
}  # fmt: skip


def check_structure(name: str, executor: Executor) -> None:
    """Between the first launch and the end of the last block there is attention, once a block, and nothing else to compute."""
    each, rest = BLOCKS[name]
    steps = executor.plan.steps
    programs = [(number, step.program) for number, step in enumerate(steps) if isinstance(step, Launch)]
    at = [number for number, program in programs if program.multiplies]
    assert len(at) == each * LAYERS + rest
    blocks = range(at[0], at[each * LAYERS - 1])
    assert not any(number in blocks for number, program in programs if not program.multiplies), "a stage in a block"
    attention = 0
    for step in steps[at[0] : at[each * LAYERS - 1]]:
        assert isinstance(step, Launch | Present | Run), f"{type(step).__name__} between launches"
        if not isinstance(step, Run) or step.target.target is operator.getitem:
            continue
        target = step.target.target
        if not isinstance(target, torch._ops.OpOverload):
            assert not isinstance(step.target.meta.get("val"), Tensor), f"{target} makes a tensor"
            continue
        packet = target.overloadpacket.__name__
        attention += packet == "attention"
        assert packet in VIEWS or packet == "attention", f"{packet} is left between launches"
    assert attention == LAYERS


def test_structure_sees_what_is_left_over() -> None:
    """The check itself: an operator with no meaning on tiles between two products is found."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(9):
                x = self.second(self.first(x).sort(-1).values)
            return x

    model = codetta.compile(Sorted())
    model(torch.randn(2, 5, 24))
    with pytest.raises(AssertionError):
        check_structure("llama", executors(model)[0])


def test_strict_defers_nothing(by_reference: None) -> None:
    """Exact laws only: right as well, and no weight has a norm's gain multiplied into it."""
    entry = ZOO["llama"]
    model = entry.model()
    codetta.compile(model, options=codetta.Options(numerics="strict"))
    for batch, length in ((2, 12), (3, 7)):
        check(model, truth_of(entry, model), entry.example(batch, length), torch.float32)
    assert not deferred(executors(model)[0])


def test_fp16() -> None:
    """fp16 cannot hold rows that are not normalised yet: nothing is deferred, and a large row overflows no more than in eager."""
    entry = ZOO["llama"]
    model = entry.model(torch.float16)
    codetta.compile(model)
    exact = truth_of(entry, entry.model(torch.float16))
    check(model, exact, entry.example(2, 12, dtype=torch.float16), torch.float16)
    check(model, exact, entry.example(3, 7, dtype=torch.float16), torch.float16)
    assert not deferred(executors(model)[0])


# ---- weights that change -------------------------------------------------------------------------------------------


def _norm_and_linear(name: str, model: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    """A norm's weight that is multiplied into the next matrix, and such a matrix."""
    found = dict(model.named_parameters())
    norm, linear = {
        "llama": ("model.layers.1.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"),
        "gpt2": ("transformer.h.1.ln_1.bias", "transformer.h.1.mlp.c_fc.weight"),
    }[name]
    return found[norm], found[linear]


def _change_norm(name: str, model: nn.Module) -> None:
    norm, _ = _norm_and_linear(name, model)
    norm.mul_(1.5).add_(0.25)


def _change_linear(name: str, model: nn.Module) -> None:
    _, linear = _norm_and_linear(name, model)
    linear.mul_(-1.5)


def _load(name: str, model: nn.Module) -> None:
    model.load_state_dict({key: value * 1.2 for key, value in model.state_dict().items()})


def _assign(name: str, model: nn.Module) -> None:
    model.load_state_dict({key: value * 1.2 for key, value in model.state_dict().items()}, assign=True)


def _round_trip(name: str, model: nn.Module) -> None:
    """The memory of the first weights is free while there are others, and may be where the last ones lie."""
    model.to(torch.bfloat16).to(torch.float32)


def _step(name: str, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_changed_weights(name: str, by_reference: None) -> None:
    """What is made of parameters is made again when they change, however they do."""
    entry = ZOO[name]
    model = entry.model()
    inputs = entry.example(2, 6)
    codetta.compile(model)
    check(model, truth_of(entry, model), inputs, torch.float32)
    for change in (_change_norm, _change_linear, _load, _assign, _round_trip, _step):
        before = outputs(model(*inputs[0], **inputs[1]))[0]
        change(name, model)
        try:
            check(model, truth_of(entry, model), inputs, torch.float32)
        except AssertionError as error:
            raise AssertionError(f"after {change.__name__}") from error
        after = outputs(model(*inputs[0], **inputs[1]))[0]
        assert not torch.allclose(before, after, rtol=1e-4), f"{change.__name__} changes nothing: the test is void"


@pytest.mark.parametrize("layout", ["transposed", "strided", "expression"])
def test_weights_lie_as_they_do(layout: str) -> None:
    """A parameter may be a view of another tensor, and a weight may be made of parameters."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(48, 32) if layout != "strided" else torch.randn(32, 96)[:, ::2]
            self.weight = nn.Parameter(whole.t() if layout != "strided" else whole)
            self.second = nn.Parameter(torch.randn(32, 48).t())

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight if layout != "expression" else self.weight.clone() * 2
            return F.linear(F.silu(F.linear(x, weight)), self.second)

    torch.manual_seed(0)
    model = codetta.compile(Odd())
    x = torch.randn(5, 48)
    torch.testing.assert_close(model(x), model.forward(x), atol=1e-4, rtol=1e-4)
    assert launches(executors(model)[0])


def test_autocast_behind_the_first_norm() -> None:
    """The norm reads float32, the product that it is moved behind multiplies bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
    codetta.compile(model)
    x = torch.randn(3, 5, 32) * 3 + 1
    with torch.autocast("cpu", torch.bfloat16):
        ours, eager = model(x), model.forward(x)
    exact = model.double().forward(x.double())
    bad = complaints([ours], [eager], [exact], torch.bfloat16)
    assert not bad, bad


def test_other_dtype_and_back(by_reference: None) -> None:
    design = Design(bias=True, norm="layer")
    model = codetta.compile(design.module(torch.float32))
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        exact = design.module(torch.float64)
        exact.load_state_dict(model.to(dtype).state_dict())
        check(model, exact, ((design.tokens(dtype),), {}), dtype)
        assert len(executors(model)) == min(number + 1, 2), "one compilation for each type"


# ---- lengths -------------------------------------------------------------------------------------------------------


def test_lengths(by_reference: None) -> None:
    """The first sizes are compiled for themselves, and so are sizes of one; all others share one compilation."""
    entry = ZOO["llama"]
    model, exact = entry.model(), entry.model(torch.float64)
    codetta.compile(model)
    check(model, exact, entry.example(1, 5), torch.float32)
    warm = len(executors(model))
    for number, length in enumerate(range(2, 22)):
        check(model, exact, entry.example((1, 2, 3, 5)[number % 4], length), torch.float32)
    assert len(executors(model)) - warm <= 2
    for batch, length in ((1, 1), (3, 1)):
        check(model, exact, entry.example(batch, length), torch.float32)


def test_what_grows_out_of_sight(by_reference: None) -> None:
    """A cache inside of an object changes its size while the inputs do not: a few compilations, then one for all."""

    class Box:
        def __init__(self) -> None:
            self.seen = torch.zeros(1, 16)

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, box: Box) -> torch.Tensor:
            box.seen = torch.cat((box.seen, torch.tanh(self.linear(x))))
            return box.seen.sum(0)

    torch.manual_seed(0)
    model = Remembers()
    plain, ours, x = Box(), Box(), torch.randn(3, 16)
    with torch.no_grad():
        expected = [model(x, plain) for _ in range(12)]
        codetta.compile(model)
        for want in expected:
            torch.testing.assert_close(model(x, ours), want)
    assert len(executors(model)) <= 5


# ---- kernels ahead of the first call -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert"])
def test_stand_ins_are_what_launches_get(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory have the sizes, strides and types that a call has, so that the kernels built for them are the right ones."""
    expected, got = [], []

    def build(program: Program, binding: Binding, device: torch.device) -> None:
        expected.append((program, layout(binding)))

    def run(program: Program, binding: Binding) -> Any:
        got.append((program, layout(binding)))
        return reference.run(program, binding)

    monkeypatch.setattr(dispatch, "build", build)
    monkeypatch.setattr(dispatch, "run", run)
    entry = ZOO[name]
    model = codetta.compile(entry.model(torch.bfloat16))
    args, kwargs = entry.example(2, 12, dtype=torch.bfloat16)
    with torch.no_grad():
        model(*args, **kwargs)
    assert got and {program for program, _ in expected} == {program for program, _ in got}
    for program, each in got:
        others = [other for same, other in expected if same == program]
        assert each in others, program


def layout(binding: Binding) -> dict[str, object]:
    def of(value: Any) -> object:
        return "statistic" if isinstance(value, Stat) else (value.shape, value.stride(), value.dtype)

    named = {f"b{number}": each for number, each in enumerate(binding.b)} | binding.operands | binding.outputs
    return {"a": of(binding.a), "rows": binding.rows, "samples": binding.samples} | {
        name: of(each) for name, each in named.items()
    }


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """A bar where it is asked for, none in a log."""
    design = Design(attention="none", stem=False, layers=1)
    for progress in (None, True):
        model = codetta.compile(design.module(torch.float32), options=codetta.Options(progress=progress))
        with torch.no_grad():
            model(design.tokens(torch.float32))
        assert ("kernels" in capsys.readouterr().err) == bool(progress)


# ---- gradients -----------------------------------------------------------------------------------------------------


def test_gradients() -> None:
    """With gradients on, answers and gradients are eager's."""
    design = Design(attention="none", stem=False, layers=1)
    dtype = torch.float32
    with torch.enable_grad():
        results = []
        for compiled, each in ((True, dtype), (False, dtype), (False, torch.float64)):
            model = design.module(each)
            x = design.tokens(dtype).to(each).requires_grad_()
            if compiled:
                codetta.compile(model)
            (y,) = model(x)
            (y * torch.linspace(-1, 1, y.shape[-1], dtype=each)).sum().backward()
            found = [x.grad, *(parameter.grad for parameter in model.parameters())]
            results.append([y.detach(), *(each for each in found if each is not None)])
        assert len(results[0]) > 6
        ours, eager, truth = results
        bad = complaints(ours, eager, truth, dtype)
        assert not bad, bad


# ---- random modules ------------------------------------------------------------------------------------------------


def check_design(design: Design, dtype: torch.dtype = torch.float32) -> None:
    torch._dynamo.reset()
    model, exact = design.module(dtype), design.module(dtype).double()
    codetta.compile(model)
    check(model, exact, ((design.tokens(dtype),), {}), dtype)
    assert launches(executors(model)[0]), "no program was made"


def _some(examples: int) -> Any:
    """Shrinking would compile hundreds of modules: the design is printed as it was drawn."""
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    return settings(max_examples=examples, deadline=None, phases=phases, suppress_health_check=list(HealthCheck))


@_some(19)
@given(designs())
def test_random_module(by_reference: None, design: Design) -> None:
    note(repr(design))
    check_design(design)


@_some(6)
@given(designs())
def test_random_module_on_cpu(design: Design) -> None:
    note(repr(design))
    check_design(design)


@pytest.mark.parametrize("norm", NORMS)
def test_norm_in_half_precision(norm: str, by_reference: None) -> None:
    """Casts in every order, where they mean something; a norm in front of a product and one behind a sum."""
    check_design(Design(norm=norm, attention="none", bias=True, hidden=64, length=9), torch.bfloat16)


@pytest.mark.parametrize("norm", NORMS)
def test_norm_is_deferred(norm: str, by_reference: None) -> None:
    """However it is written: no operator stays between two programs, and the norm costs no launch of its own."""
    model = Design(norm=norm, attention="none", activation="relu", mlp="plain").module(torch.float32)
    codetta.compile(model)
    model(torch.randn(2, 5, 24))
    steps = executors(model)[0].plan.steps
    at = [number for number, step in enumerate(steps) if isinstance(step, Launch)]
    assert len(at) == 4  # stem, up, down, head
    left = [step for step in steps[at[0] : at[-1]] if not isinstance(step, Launch | Present)]
    assert not left, left


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation: str) -> None:
    """By the backend that will run it."""
    check_design(Design(activation=activation, attention="none", mlp="chunked", stem=False, head=False))


# What random modules have found.
REGRESSIONS = [
    # A table that repeats in heads, taken apart in runs that it does not fit into: the graph keeps such a product.
    Design(qkv="chunked", rotary="partial", qk_norm=True, layers=2, tied=True, batch=1, length=15),
    Design(qkv="chunked", rotary="half", layers=2, branch="gate", hidden=40, batch=3, length=17),
    # A part of a bias is made of parameters alone as well.
    Design(bias=True),
    Design(place="sandwich", bias=True, qkv="unbound", branch="scores", hidden=40, length=11),
]


@pytest.mark.parametrize("design", REGRESSIONS, ids=str)
def test_regression(design: Design, by_reference: None) -> None:
    check_design(design)


# ---- more than one model -------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(24, width), nn.RMSNorm(width), nn.Linear(width, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.relu(self.up(x))))


def _sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24))


@pytest.mark.parametrize("build", [lambda: Small(40), _sequence], ids=["own", "torch.nn"])
def test_any_class(build: Callable[[], nn.Module], by_reference: None) -> None:
    model = codetta.compile(build())
    x = torch.randn(3, 5, 24)
    assert torch.allclose(model(x), model.forward(x), atol=1e-5)
    assert len(executors(model)) == 1, "nothing was compiled"


def test_many_models(by_reference: None) -> None:
    """Models of one class do not use up each other's compilations."""
    x = torch.randn(3, 5, 24)
    for width in range(8, 8 + 12 * 8, 8):
        model = codetta.compile(Small(width))
        assert torch.allclose(model(x), model.forward(x), atol=1e-5)
        assert len(executors(model)) == 1, f"width {width} stayed eager"


def test_weights_made_in_inference_mode(by_reference: None) -> None:
    """They keep no record of changes."""
    with torch.inference_mode():
        model = codetta.compile(Small(40))
        x = torch.randn(3, 5, 24)
        assert torch.allclose(model(x), model.forward(x), atol=1e-5)
        model.norm.weight.mul_(2)  # a part of the next matrix by now
        assert torch.allclose(model(x), model.forward(x), atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_leftover_by_inductor(name: str) -> None:
    """What no program covers, compiled: regions before, between and behind programs."""
    entry = ZOO[name]
    model = codetta.compile(entry.model(torch.bfloat16), options=codetta.Options(leftover="inductor"))
    exact = truth_of(entry, model)
    for batch, length in ((2, 12), (3, 7)):
        check(model, exact, entry.example(batch, length, "cpu", torch.bfloat16), torch.bfloat16)
    assert any(isinstance(step, Region) for step in executors(model)[0].plan.steps)


def test_regions_keep_their_strides() -> None:
    """What Inductor pads for itself, others would read at the wrong places."""
    from torch._inductor import config
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3, 5, 67)
    region = make_fx(lambda x: [x.sum(0, keepdim=True) * x], tracing_mode="fake")(x)
    with config.patch(disable_padding_cpu=False, padding_stride_threshold=8, fx_graph_cache=False):
        (found,) = by_inductor(region)(x)
    assert found.stride() == x.stride()
    torch.testing.assert_close(found, x.sum(0, keepdim=True) * x)


# ---- stages --------------------------------------------------------------------------------------------------------


class Sandwich(nn.Module):
    """Norms before and behind each product: what the second makes is known too late for the program before it."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(48) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(48, 96), nn.Linear(96, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norms[1](self.down(F.silu(self.up(self.norms[0](x)))))
        return self.head(self.norms[3](self.norms[2](x)))


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stages(norm: Callable[[int], nn.Module], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs without a product, on every backend, ragged; and the model is right."""
    torch.manual_seed(0)
    model, exact = Sandwich(norm), Sandwich(norm)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model = model.to(dtype)
    exact.load_state_dict(model.state_dict())
    stages: list[Program] = []
    plain_run = dispatch.run

    def run(program: Program, binding: Binding) -> Any:
        if not program.multiplies:
            stages.append(program)
            for name in ("cpu", "triton") if interpreting() else ("cpu",):
                backend = dispatch.load_backend(name)
                assert not backend.why_not(program, binding), name
                oracle.check(program, binding, backend)
        return plain_run(program, binding)

    monkeypatch.setattr(dispatch, "run", run)
    codetta.compile(model)
    x = torch.randn(3, 7, 48, dtype=dtype) * 3 + 5
    for rows in (x, x[:1, :1], x[:, :5]):
        check(model, exact.double(), ((rows,), {}), dtype)
    assert len(set(stages)) >= 2
    if dtype != torch.float16:  # which defers no norm, so that the first one is the graph's
        assert not any(isinstance(step, Region) for step in executors(model)[0].plan.steps)


def test_norms_without_a_product(by_reference: None) -> None:
    """Behind a product its statistics are there already; alone, a norm is the graph's own."""
    behind = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32))
    alone = nn.Sequential(nn.LayerNorm(16), nn.ReLU())
    x = torch.randn(5, 16)
    for model, expected in ((behind, [True, False]), (alone, [])):
        want = model(x)
        codetta.compile(model)
        torch.testing.assert_close(model(x), want)
        assert [step.program.multiplies for step in launches(executors(model)[0])] == expected


# ---- what is the same for every call of a size -----------------------------------------------------------------------


class Positions(nn.Module):
    """A table of positions from a parameter, read by an epilogue, and one that is handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.speed = nn.Linear(16, 16), nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
        table, given = torch.cos(place * self.speed) + 1.0, torch.sin(place * self.speed) * 2.0
        return self.linear(x) * table, given.t()


@pytest.mark.parametrize("dynamic", [False, True])
def test_tables_are_made_once(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, made = Positions(), []
    plain = Sized.__call__

    def call(self: Sized, *inputs: Any) -> Any:
        before = self.key
        result = plain(self, *inputs)
        made.append(self.key is not before)
        return result

    monkeypatch.setattr(Sized, "__call__", call)
    codetta.compile(model, dynamic=dynamic)
    x = torch.randn(2, 6, 16)
    for step in range(3):
        for each in (x, x, x[:, :4]):
            ours, expected = model(each), model.forward(each)
            torch.testing.assert_close(ours, expected)
            ours[1].fill_(7.0)  # what is handed out is the caller's
        with torch.no_grad():
            model.speed.mul_(1.5)
        assert made[0] and not made[1], step
        made.clear()
