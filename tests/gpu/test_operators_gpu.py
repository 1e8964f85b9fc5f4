"""Attention and the loss on the GPU: kernels of cuDNN and PyTorch by name, chunks and strips, against float64 by the budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import codetta
from codetta.runtime import loss as module

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
ours = torch.ops.codetta
BF16 = 2.0**-8


def judge(found: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> None:
    for mine, usual, truth in zip(found, eager, exact, strict=True):
        scale = truth.norm().clamp_min(1e-30)
        error, theirs = (float((each.double() - truth).norm() / scale) for each in (mine, usual))
        assert error <= 2 * theirs + BF16, (error, theirs)


@pytest.mark.parametrize(
    "kernel", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, None]
)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "added"])
@pytest.mark.parametrize(("heads", "shared", "width", "length"), [(8, 2, 64, 256), (4, 4, 128, 131), (4, 4, 40, 77)])
def test_attention(kernel: SDPBackend | None, mask: str, heads: int, shared: int, width: int, length: int) -> None:
    torch.manual_seed(0)
    shapes = [(2, length, count, width) for count in (heads, shared, shared)]
    given = [torch.randn(shape, device="cuda").bfloat16().transpose(1, 2).requires_grad_() for shape in shapes]
    wide = [each.detach().double().requires_grad_() for each in given]
    matrix = None
    if mask in ("bool", "added"):
        matrix = torch.rand(2, 1, length, length, device="cuda") > 0.3
        matrix[..., 0] = True
        matrix = torch.where(matrix, 0.0, -torch.inf).bfloat16() if mask == "added" else matrix
    tangent = torch.randn(2, length, heads, width, device="cuda").bfloat16().transpose(1, 2)
    how = {"is_causal": mask == "causal", "enable_gqa": heads != shared}
    wide_mask = matrix.double() if matrix is not None and matrix.dtype != torch.bool else matrix
    truth = F.scaled_dot_product_attention(*wide, wide_mask, **how)
    exact = [truth, *torch.autograd.grad(truth, wide, tangent.double())]
    with sdpa_kernel(SDPBackend.MATH):
        plain = F.scaled_dot_product_attention(*given, matrix, **how)
        eager = [plain, *torch.autograd.grad(plain, given, tangent)]
    backends = [kernel, SDPBackend.MATH] if kernel is not None else list(SDPBackend.__members__.values())[1:]
    with sdpa_kernel(backends, set_priority=True):
        out = ours.attention_forward(*given, matrix, mask == "causal", None, heads != shared)[0]
    judge([out, *torch.autograd.grad(out, given, tangent)], eager, exact)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("rows", "width", "classes"), [(300, 256, 4096), (257, 128, 1000), (1, 64, 50)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss(
    recompute: bool, rows: int, width: int, classes: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks of rows, several strips of classes."""
    monkeypatch.setattr(module, "CHUNK", 128 * classes * 2)
    monkeypatch.setattr(module, "ROWS", 128)
    monkeypatch.setattr(module, "STRIP", 1)
    torch.manual_seed(0)
    x = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(classes, width, device="cuda") * 0.2).bfloat16().requires_grad_()
    target = torch.randint(0, classes, (rows,), device="cuda")
    target[1::7] = -100
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    truth = F.cross_entropy(F.linear(*wide), target, label_smoothing=smoothing)
    plain = F.cross_entropy(F.linear(x, weight).float(), target, label_smoothing=smoothing)
    found = codetta.linear_cross_entropy(x, weight, target, label_smoothing=smoothing, recompute=recompute)
    judge(
        [found, *torch.autograd.grad(found, (x, weight))],
        [plain, *torch.autograd.grad(plain, (x, weight))],
        [truth, *torch.autograd.grad(truth, wide)],
    )


def test_loss_needs_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory beside what is given: a chunk and the weight's gradient, or hardly more than the gradients."""
    rows, width, classes = 8192, 512, 65536
    x = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(classes, width, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(0, classes, (rows,), device="cuda")
    logits = rows * classes * 2
    monkeypatch.setattr(module, "CHUNK", logits // 8)
    for recompute, most in ((False, logits // 8 + 10 * classes * width), (True, 0.4 * logits)):
        codetta.linear_cross_entropy(x, weight, target, recompute=recompute).backward()
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        codetta.linear_cross_entropy(x, weight, target, recompute=recompute).backward()
        assert torch.cuda.max_memory_allocated() - before < most
        x.grad = weight.grad = None


def test_out_of_memory_leaves_a_usable_model() -> None:
    from codetta.bench import shapes

    model = shapes.build("tiny", torch.device("cuda"), torch.bfloat16).train()
    codetta.compile(model)
    tokens = torch.randint(0, 1000, (2, 256), device="cuda")
    first = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    total = torch.cuda.get_device_properties(0).total_memory
    large = torch.randint(0, 1000, (64, 2048), device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            model(input_ids=large, labels=large, use_cache=False).loss.backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    again = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    assert torch.equal(again, first)
    again.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "classes", "width"), [(1, 7, 33), (300, 5, 512), (4096, 50_000, 2048), (4096, 1, 640)]
)
def test_embedding_gradient(dtype: torch.dtype, rows: int, classes: int, width: int) -> None:
    torch.manual_seed(0)
    gradient, ids = torch.randn(rows, width, device="cuda").to(dtype), torch.randint(0, classes, (rows,), device="cuda")
    base, scale = torch.randn(classes, width, device="cuda"), torch.tensor(0.5, device="cuda")
    exact = (base.double() * 0.5).index_add(0, ids, gradient.double())
    first, second = (ours.embedding_gradient(gradient, ids, classes, -1, base, scale) for _ in range(2))
    assert first.equal(second)
    # Rounded once, after a sum in fp32.
    added = (base.abs().double() * 0.5).index_add(0, ids, gradient.abs().double())
    bound = torch.finfo(dtype).eps * exact.abs() + 64 * torch.finfo(torch.float32).eps * added
    assert ((first.double() - exact).abs() <= bound + torch.finfo(dtype).tiny).all()
    alone = ours.embedding_gradient(gradient, ids, classes, 0, None, None)
    assert not alone[0].any() and (classes == 1 or alone.any())
