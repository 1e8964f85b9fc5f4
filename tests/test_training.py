"""Gradients of compiled models: every parameter of the zoo against eager by the budget of `oracle.py`, and the life of a real run."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import hypothesis
import oracle
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from modules import Design, complaints, designs
from torch import Tensor, nn
from zoo import LAYERS, ZOO, outputs

import codetta
from codetta.capture import weight_gradients
from codetta.integrations.dynamo import backend_of
from codetta.runtime.executor import Training
from codetta.steps import Finish, Launch, Run, Step

ROOT = Path(__file__).parent.parent


def _example(name: str) -> Any:
    """One of the examples, as a module that others of them may import."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _example("train")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def loss(result: Any) -> Tensor:
    """A number that depends on every output, by weights that are always the same."""
    generator = torch.Generator().manual_seed(5)
    found = [each.double() for each in outputs(result) if each.is_floating_point()]
    weights = [torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device) for x in found]
    return torch.stack([(x * weight).sum() for x, weight in zip(found, weights, strict=True)]).sum()


def gradients(model: nn.Module, call: Any, args: Any, named: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss(call(*args, **named)).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def check(model: nn.Module, exact: nn.Module, args: Any, named: Any, dtype: torch.dtype) -> None:
    """Every gradient of the compiled model against the same model's own, both against float64."""
    wide = lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
    truth = gradients(exact, exact.forward, [wide(x) for x in args], {name: wide(x) for name, x in named.items()})
    eager, ours = gradients(model, model.forward, args, named), gradients(model, model, args, named)
    assert set(ours) == set(eager) == set(truth) and truth
    bad = {}
    for name, exactly in truth.items():
        scale = exactly.norm().clamp_min(1e-30)
        mine, theirs = (((each[name].double() - exactly).norm() / scale).item() for each in (ours, eager))
        if not mine <= 2 * theirs + oracle.EPS[dtype]:
            bad[name] = (mine, theirs)
    assert not bad, bad


def trainings(model: nn.Module) -> list[Training]:
    backend = backend_of(model)
    assert backend is not None
    return backend.trainings


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str, dtype: str) -> None:
    """For two ragged shapes out of one compilation."""
    entry = ZOO[name]
    model, exact = entry.pair(DTYPES[dtype])
    codetta.compile(model, dynamic=True, options=codetta.Options(leftover="graph"))
    for batch, length in ((2, 12), (3, 7)):
        args, named = entry.example(batch, length, dtype=DTYPES[dtype])
        check(model, exact, args, named, DTYPES[dtype])
    assert len(trainings(model)) == 1, "another shape was compiled anew"


@settings(
    max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(designs())
@hypothesis.example(  # its last norm is returned, and gets a program of its own when gradients have been read already
    Design(norm="rms_eps_outside", mlp="plain", attention="none", rotary="none", stem=False, head=False, length=4)
)
@hypothesis.example(Design(bias=True, attention="full", qkv="chunked", rotary="none"))  # a bias that is read in parts
@hypothesis.example(  # keys that all heads share go into a region that was compiled for them
    Design(
        norm="layer_bare",
        bias=True,
        activation="squared_relu",
        attention="full",
        qkv="split",
        kv_heads=1,
        rotary="none",
        residual="f + x",
        residual_scale=True,
        layer_scale=True,
        branch="scores",
        hidden=64,
        length=8,
        seed=66,
    )
)
def test_random_module(by_reference: None, design: Design) -> None:
    """Any norm, gate, rotation and order; gradients of the input and of every parameter. Then for another batch and length, which are
    symbols by then."""
    note(repr(design))
    torch._dynamo.reset()
    dtypes = torch.float32, torch.float32, torch.float64
    models = [design.module(torch.float32).to(dtype) for dtype in dtypes]
    codetta.compile(models[0], options=codetta.Options(leftover="graph"))
    for batch, length in ((design.batch, design.length), (design.batch + 1, design.length + 2)):
        found = []
        for model, dtype in zip(models, dtypes, strict=True):
            x = design.tokens(torch.float32, batch, length).to(dtype).requires_grad_()
            model.zero_grad()
            loss(model(x)).backward()
            given_none = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
            found.append([x.grad, *given_none])
        # A gradient that is nothing but rounding errors (of attention to a single token) has no relative error.
        sizes = [each.norm() for each in found[2]]
        kept = [at for at, size in enumerate(sizes) if size > 1e-6 * max(sizes)]
        bad = complaints(*([each[at] for at in kept] for each in found), torch.float32)
        assert not bad, bad


def leaves(step: Launch) -> list[str]:
    return [source.name for source in step.operands.values() if source.kind == "leaf"]


def stages(steps: list[Step]) -> int:
    return sum(isinstance(step, Launch) and not step.program.multiplies for step in steps)


def test_nothing_normalised_is_kept() -> None:
    """A Llama's forward pass is that of inference, and the gradient of every norm before a gated product is in an epilogue."""
    entry = ZOO["llama"]
    model = codetta.compile(entry.model())
    gradients(model, model, *entry.example(2, 12))
    (training,) = trainings(model)
    plan = training.plan
    first, second = plan.steps[: plan.forward], plan.steps[plan.forward :]
    assert sum(isinstance(step, Launch) for step in first) == 4 * LAYERS + 2
    assert stages(first) == 1  # the statistics of the first norm
    turned = [step for step in second if isinstance(step, Launch) and step.into]
    assert len(turned) == 3 * LAYERS  # queries, keys and values: turned, scaled and stored side by side
    assert stages(second) - len(turned) == 1  # the last norm, whose gradient no product makes
    assert "inner_product_moves" in {law for laws in plan.graph.fired.values() for law in laws}
    sums = [step for step in second if isinstance(step, Finish) and step.value.op == "col_sum"]
    assert len(sums) == 2 * LAYERS + 1  # of the norms' weights


@pytest.mark.parametrize(
    ("design", "passes"),
    [
        (Design(), True),
        (Design(norm="rms_one_plus", kv_heads=2, rotary="pairs"), True),
        (Design(norm="rms_module", rotary="partial"), True),
        (Design(qk_norm=True), False),  # not linear
        (Design(bias=True), False),  # linear but for an offset
    ],
    ids=str,
)
def test_inner_products_that_pass_attention(by_reference: None, design: Design, passes: bool) -> None:
    """q, k and v in one product over joined columns, in whose epilogue the norm's gradient ends; or a program of its own for that."""
    model = design.module(torch.float32)
    codetta.compile(model, options=codetta.Options(leftover="graph"))
    loss(model(design.tokens(torch.float32))).backward()
    (training,) = trainings(model)
    second = training.plan.steps[training.plan.forward :]
    turned = [step for step in second if isinstance(step, Launch) and any("getitem" in each for each in leaves(step))]
    assert (stages(second) - len(turned) == 1) == passes  # the last norm's


def test_memory_can_be_traded() -> None:
    """The same gradients, for more kept, or for more work."""
    entry = ZOO["llama"]
    _, named = entry.example(2, 12)
    kept: dict[str, int] = {}
    for memory in ("less", "normal", "more"):
        model, exact = entry.pair(torch.bfloat16)
        codetta.compile(model, options=codetta.Options(memory=memory))
        check(model, exact, (), named | {"labels": named["input_ids"]}, torch.bfloat16)
        (training,) = trainings(model)
        kept[memory] = len(training.plan.again)
        assert any("linear_losses" in each.name for each in training.plan.graph.nodes.nodes) == (memory == "less")
    assert kept["more"] == 0 < kept["normal"] == kept["less"]
    with pytest.raises(codetta.ArgumentError, match="less, normal, more"):
        codetta.Options(memory="none")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gains_in_the_epilogue_of_weight_gradients(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that such products fill."""
    monkeypatch.setattr(weight_gradients, "fills_the_device", lambda weight, rows: True)
    entry = ZOO["llama"]
    model, exact = entry.pair(DTYPES[dtype])
    codetta.compile(model)
    args, named = entry.example(2, 48, dtype=DTYPES[dtype])
    check(model, exact, args, named, DTYPES[dtype])
    (training,) = trainings(model)
    calls = [each for each in training.plan.graph.nodes.nodes if "gained_gradient" in str(each.target)]
    assert len(calls) == 3 * LAYERS + 1  # gate, up, and queries, keys and values together; the head


def test_strict(small: tuple[Small, Small, Tensor]) -> None:
    """Without laws that reassociate."""
    _, plain, x = small
    ours = codetta.compile(copy.deepcopy(plain), options=codetta.Options(numerics="strict"))
    for model in (ours, plain):
        model(x).square().sum().backward()
    same(ours, plain)
    (training,) = trainings(ours)
    assert not {"inner_product_moves", "row_scale_commutes"} & {
        law for laws in training.plan.graph.fired.values() for law in laws
    }


class Small(nn.Module):
    """A norm, a product, a gate and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.fixture
def small() -> tuple[Small, Small, Tensor]:
    """The same module compiled and plain."""
    torch.manual_seed(0)
    plain = Small()
    return codetta.compile(copy.deepcopy(plain)), plain, torch.randn(3, 5, 32)


def same(mine: nn.Module, theirs: nn.Module, tolerance: float = 1e-5) -> None:
    for x, y in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None)
        if x.grad is not None and y.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, atol=tolerance, rtol=tolerance)


def test_inputs_have_gradients(small: tuple[Small, Small, Tensor]) -> None:
    ours, plain, x = small
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours(mine).square().sum().backward()
    plain(theirs).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    same(ours, plain)


def test_gradients_add_up(small: tuple[Small, Small, Tensor]) -> None:
    """Over several calls, over a graph that is walked twice, and the same bits for the same numbers."""
    ours, plain, x = small
    for model in (ours, plain):
        for scale in (1.0, -0.5):
            model(x * scale).square().sum().backward()
        result = model(x).square().sum()
        result.backward(retain_graph=True)
        result.backward()
    same(ours, plain)
    again = copy.deepcopy(plain)
    codetta.compile(again)
    again.zero_grad()
    ours.zero_grad()
    for model in (ours, again):
        model(x).square().sum().backward()
    for a, b in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_steps_change_weights(small: tuple[Small, Small, Tensor]) -> None:
    """An optimiser writes in place; between its steps the model is also used without gradients."""
    ours, plain, x = small
    results = []
    for model in (ours, plain):
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
        seen = []
        for _ in range(5):
            optimiser.zero_grad()
            value = (model(x) - 1).square().mean()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimiser.step()
            with torch.no_grad():
                seen.append(model(x).sum())
            seen.append(value.detach())
        results.append(torch.stack(seen))
    torch.testing.assert_close(results[0], results[1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_writes_that_nobody_counts(name: str) -> None:
    """Some optimisers write through pointers: PyTorch counts no new version, and a single number of each weight may be all that changes."""
    entry = ZOO[name]
    args, kwargs = entry.example()
    plain = entry.model()  # without dropout
    ours = codetta.compile(copy.deepcopy(plain))
    for step in range(4):
        for model in (ours, plain):
            model.zero_grad()
            sum(each.square().mean() for each in outputs(model(*args, **kwargs))).backward()  # type: ignore[union-attr]
        for (at, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(
                    mine.grad,
                    theirs.grad,
                    atol=1e-4,
                    rtol=1e-3,
                    msg=lambda text, at=at, step=step: f"{at}, {step}: {text}",
                )
            for each in (mine, theirs):
                each.data.view(-1)[1] += 0.5
        with torch.no_grad():
            for mine, theirs in zip(outputs(ours(*args, **kwargs)), outputs(plain(*args, **kwargs)), strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_frozen_weights(small: tuple[Small, Small, Tensor]) -> None:
    ours, plain, x = small
    for model in (ours, plain):
        model.gate.requires_grad_(False)
        model.norm.bias.requires_grad_(False)
        model(x).square().sum().backward()
    same(ours, plain)


class Adapted(nn.Module):
    """A frozen projection with a low-rank update beside it."""

    def __init__(self, inside: nn.Linear) -> None:
        super().__init__()
        self.inside = inside.requires_grad_(False)
        self.a, self.b = nn.Linear(inside.in_features, 4, bias=False), nn.Linear(4, inside.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) + 2.0 * self.b(self.a(x))


def test_adapters(small: tuple[Small, Small, Tensor]) -> None:
    """Only the small matrices learn; the large ones get no gradient, and none is made for them."""
    _, plain, x = small
    for name in ("gate", "up", "down"):
        setattr(plain, name, Adapted(getattr(plain, name)))
    plain.norm.requires_grad_(False)
    ours = codetta.compile(copy.deepcopy(plain))
    for model in (ours, plain):
        model(x).square().sum().backward()
    same(ours, plain, 1e-4)
    (training,) = trainings(ours)
    made = [each for each in training.gradients if isinstance(each, torch.fx.Node)]
    assert len(made) == 6


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_regions(name: str) -> None:
    """Layers that are compiled each by itself have the gradients of a model that is compiled as a whole."""
    entry, found = ZOO[name], []
    for regional in (False, True):
        model = entry.model()
        kind = type(next(each for each in model.modules() if isinstance(each, nn.ModuleList))[0])
        for each in model.modules() if regional else [model]:
            if not regional or type(each) is kind:
                codetta.compile(each)
        found.append(gradients(model, model, *entry.example(2, 12)))
    for each, whole in found[0].items():
        torch.testing.assert_close(found[1][each], whole, atol=1e-4, rtol=1e-3)


def test_second_derivatives_are_refused(small: tuple[Small, Small, Tensor]) -> None:
    ours, _, x = small
    x.requires_grad_()
    (first,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


def test_weight_changed_before_backward(small: tuple[Small, Small, Tensor]) -> None:
    """As in eager: what the gradient needs is not what it was."""
    ours, _, x = small
    result = ours(x).square().sum()
    with torch.no_grad():
        ours.down.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_autocast(small: tuple[Small, Small, Tensor]) -> None:
    ours, plain, x = small
    for model in (ours, plain):
        with torch.autocast("cpu", torch.bfloat16):
            result = model(x)
        result.float().square().sum().backward()
    same(ours, plain, 0.05)


def test_hooks_see_gradients(small: tuple[Small, Small, Tensor]) -> None:
    ours, _, x = small
    seen: list[Tensor] = []
    ours.up.weight.register_hook(seen.append)
    ours(x).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], ours.up.weight.grad)  # type: ignore[arg-type]


def test_checkpointing(small: tuple[Small, Small, Tensor]) -> None:
    """What is carried over is given up and made again."""
    ours, plain, x = small
    torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=False).square().sum().backward()
    plain(x).square().sum().backward()
    same(ours, plain)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_run_follows_eager(name: str) -> None:
    """Two hundred steps on real text: no further from eager's losses than eager is when its weights start a rounding error elsewhere."""
    data = example.batches(200, 4, 48, "cpu")
    eager = torch.tensor(example.train(example.build(name), data))
    assert eager[-20:].mean() < 0.6 * eager[:5].mean(), "nothing was learnt"
    noise = []
    for seed in range(2):
        model, generator = example.build(name), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(1 + 6e-8 * torch.randn(each.shape, generator=generator))
        noise.append((torch.tensor(example.train(model, data)) - eager).abs())
    usual = torch.stack(noise).amax(0)
    distance = (torch.tensor(example.train(codetta.compile(example.build(name)), data)) - eager).abs()
    assert distance[:20].max() < 1e-5
    for part in (slice(0, 50), slice(0, 200), slice(180, 200)):
        assert distance[part].max() < 10 * usual[part].max() + 1e-5
        assert distance[part].mean() < 10 * usual[part].mean() + 1e-5


def test_same_start_same_bits() -> None:
    data = example.batches(20, 4, 48, "cpu")
    first, second = (example.train(codetta.compile(example.build("llama")), data) for _ in range(2))
    assert first == second


def test_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--steps", "3", "--batch", "2", "--length", "16"])
    example.main()
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer(bf16: bool) -> None:
    """examples/trainer.py: the Trainer's losses with and without us, one graph each way, and in it attention and the loss as calls."""
    pytest.importorskip("accelerate", reason="the Trainer needs the package accelerate (codetta[zoo])")
    trainer, losses = _example("trainer"), []
    for compiled in (False, True):
        model = example.build("llama")
        if compiled:
            codetta.compile(model)
        losses.append(trainer.run(model, 3, bf16, batch=2, length=24))
    assert len(losses[0]) == 3
    torch.testing.assert_close(*losses, rtol=5e-3 if bf16 else 1e-4, atol=0.0)
    (training,) = trainings(model)
    calls = {str(step.target.target) for step in training.plan.steps if isinstance(step, Run)}
    assert {
        "codetta.attention_forward.default",
        "codetta.attention_backward.default",
        "codetta.linear_loss.default",
    } <= calls
    launched = {
        step.program.a_dtype for step in training.plan.steps if isinstance(step, Launch) and step.program.multiplies
    }
    assert launched == {torch.bfloat16 if bf16 else torch.float32}
