"""The next token, chosen on the device: no host reads a number, no shape depends on one, so a CUDA graph can hold it.

The distribution is that of Hugging Face's `generate` (transformers 5.17): repetition penalty, temperature, top-k, top-p, min-p, in this
order. The choice is a race: a token finishes after E/p, with E exponential, and the first one wins with probability p (the Gumbel-max
trick). E is a hash of seed, sequence, step and token, and nothing else on the way adds floating-point numbers up across a row: a sequence
gets the same tokens, to the bit, alone and in any batch. Where sequences stop, and which tokens have occurred, is for the caller to know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.errors import ArgumentError
from codetta.ir.op import compute_dtype

MAX = 2**63 - 1


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    return (word + 2**63) % 2**64 - 2**63


# splitmix64 (Steele, Lea, Flood 2014): its increment and its two multipliers.
STRIDE, FIRST, SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 takes the likeliest, and then only repetition_penalty counts beside it.

    top_k: only the k likeliest and those equal to the k-th (0: all). top_p: only the smallest set of likeliest tokens that holds this
    much probability. min_p: only those at least this likely relative to the likeliest. repetition_penalty: logits of tokens that have
    occurred are divided by it, negative ones multiplied. seed: of the random numbers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (_real(self.temperature) and 0 <= self.temperature < math.inf):
            raise ArgumentError(
                "temperature", f"is {self.temperature!r}", "pass a positive number, or 0 for the likeliest token"
            )
        if not (_whole(self.top_k) and self.top_k >= 0):
            raise ArgumentError("top_k", f"is {self.top_k!r}", "pass how many tokens to keep, or 0 for all")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if not (_real(value) and 0 <= value <= 1):
                raise ArgumentError(name, f"is {value!r}", "pass a probability from 0 to 1")
        if not (_real(self.repetition_penalty) and 0 < self.repetition_penalty < math.inf):
            raise ArgumentError(
                "repetition_penalty", f"is {self.repetition_penalty!r}", "pass a positive number, or 1 for no penalty"
            )
        if not (_whole(self.seed) and 0 <= self.seed < 2**64):
            raise ArgumentError("seed", f"is {self.seed!r}", "pass an integer from 0 to 2**64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def likeliest(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """The column of the largest logit of each row, the first of equals; stored in `out`, where that is given."""
    if logits.is_cuda and logits.dim() == 2 and logits.numel():
        from codetta.backends import triton_argmax

        if logits.dtype in triton_argmax.DTYPES:
            return triton_argmax.argmax(logits, out)
    found = logits.argmax(-1)
    return found if out is None else out.copy_(found)


def choose(logits: Tensor, sampling: Sampling, step: Tensor, rows: Tensor, seen: Tensor | None) -> Tensor:
    """The next token (B,) of each row of logits (B, V).

    step: how many tokens have been chosen before, one number or (B,). rows (B,): the number that stands for each sequence in the random
    numbers. seen (B, V): which tokens have occurred; read only for a repetition penalty. Logits that are NaN count as -inf; a token of
    -inf is never chosen beside others. Among equals, greedy takes the lowest.
    """
    _check(logits, sampling, seen)
    batch = logits.shape[0]
    _check_beside(logits, "step", step, (torch.int64, torch.int32), ((), (batch,)))
    _check_beside(logits, "rows", rows, (torch.int64, torch.int32), ((batch,),))
    return draw(logits, sampling, step.long() + first_count(sampling.seed), rows, seen)


def draw(
    logits: Tensor, sampling: Sampling, counter: Tensor, rows: Tensor, seen: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """As `choose`, unchecked; stored in `out`, where that is given.

    counter: the step plus `first_count` of the seed. The settings' own seed is not read, so one CUDA graph serves every seed.
    """
    if sampling.greedy:
        return likeliest(_penalised(logits, sampling, seen), out)
    race = _headstart(counter, rows, logits.shape[1]) / _weights(logits, sampling, seen)
    return likeliest(race, out)


def probabilities(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """The distribution (B, V) that `choose` draws from."""
    _check(logits, sampling, seen)
    if sampling.greedy:
        scores = _penalised(logits, sampling, seen)
        return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
    weights = _weights(logits, sampling, seen)
    return weights / weights.sum(-1, keepdim=True)


def _penalised(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    scores = logits.to(compute_dtype(logits.dtype)).nan_to_num(-math.inf, math.inf, -math.inf)
    if sampling.repetition_penalty == 1 or seen is None:
        return scores
    penalty = sampling.repetition_penalty
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def _weights(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """Probabilities relative to the likeliest token's, which is 1; 0 for tokens that are out.

    Relative ones need no sum: a sum's last bits depend on where a row lies in its batch, and they would decide at a border. Top-k is read
    off before the temperature, which keeps the order; the largest logit is subtracted before it, so that none overflows.
    """
    scores, tokens = _penalised(logits, sampling, seen), None
    vocabulary = scores.shape[1]
    k = sampling.top_k or vocabulary
    if sampling.top_p < 1:
        # Stable: of equal tokens at the border the lower ones stay, as with greedy. Hugging Face's sort leaves that open.
        scores, tokens = scores.sort(dim=-1, descending=True, stable=True)
        top, least = scores[:, :1], scores[:, k - 1 : k]
    elif k < vocabulary:
        largest = scores.topk(k).values
        top, least = largest[:, :1], largest[:, -1:]
    else:
        top = least = scores.amax(-1, keepdim=True)
    # The likeliest are 1 by definition, where inf - inf and 0/0 (a temperature that is 0 in float32) would be NaN. So a row of nothing
    # but -inf is uniform.
    weights = ((scores - top) / sampling.temperature).masked_fill(scores == top, 0.0).exp()
    if k < vocabulary:
        weights = weights.masked_fill(scores < least, 0.0)
    if tokens is not None:
        weights = weights.masked_fill(_below(weights, sampling.top_p), 0.0)
    if sampling.min_p > 0:
        weights = weights.masked_fill(weights < sampling.min_p, 0.0)
    return weights if tokens is None else torch.empty_like(weights).scatter_(1, tokens, weights)


def _below(weights: Tensor, top_p: float) -> Tensor:
    """Which of the weights, largest first, top_p does without: from there on they add up to 1 - top_p at most. The first stays."""
    # Integers have one sum in whichever order a GPU takes them; the scale leaves room for a row of ones.
    mass = (weights * 2.0 ** (62 - weights.shape[1].bit_length())).to(torch.int64)
    upto = mass.cumsum(-1)
    total = upto[:, -1:]
    rest = total - upto + mass
    below = rest.to(weights.dtype) / total.to(weights.dtype) <= 1 - top_p
    below[:, 0] = False
    return below


def _headstart(counter: Tensor, rows: Tensor, vocabulary: int) -> Tensor:
    """-E (B, V) in float32, E exponential and never 0: a function of counter, row and token.

    Multiples of the golden ratio keep their distance: no two (row, step) share a stream while rows differ by less than 2³⁰ and steps by
    less than 2³².
    """
    stream = _mixed(rows.long() * STRIDE + counter)
    token = torch.arange(vocabulary, device=rows.device) * STRIDE
    bits = _mixed(stream[:, None] + token).bitwise_and_(MAX).bitwise_or_(1)
    # The race is decided by the smallest E, some 1/V: -log(u) knows it to 2⁻²⁴ near u = 1, where tokens would tie and low ones win, while
    # -log1p(-u) is as exact as u, and 63 bits make a u that is exact to float32's 24 all the way down. The factor keeps u off 1.
    return bits.to(torch.float32).mul_(-(1 - 2**-24) / 2**63).log1p_()


def _mixed(words: Tensor) -> Tensor:
    """splitmix64's finaliser, in place. Its last step, words ^ words >> 31, leaves the high bits alone, which are those that count here."""
    for shift, multiplier in ((30, FIRST), (27, SECOND)):
        # int64 shifts its sign in; the mask takes it out.
        words ^= (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        words *= multiplier
    return words


def first_count(seed: int) -> int:
    """Where `draw` counts from: `_mixed` on the host, so that seeds next to each other are far apart, and a stream of one is none of
    another's."""
    word = seed + STRIDE
    for shift, multiplier in ((30, FIRST), (27, SECOND)):
        word %= 2**64
        word = (word ^ word >> shift) * multiplier
    return _signed(word)


def _real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> None:
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point():
        shape = tuple(logits.shape)
        raise ArgumentError("logits", f"is {logits.dtype} of shape {shape}", "pass floating-point numbers (B, V)")
    if sampling.repetition_penalty == 1:
        return
    if seen is None:
        problem = f"is None, but repetition_penalty is {sampling.repetition_penalty}"
        raise ArgumentError("seen", problem, "pass which tokens have occurred, (B, V) of bool")
    _check_beside(logits, "seen", seen, (torch.bool,), (tuple(logits.shape),))


def _check_beside(
    logits: Tensor, name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...]
) -> None:
    if tuple(value.shape) not in shapes or value.dtype not in dtypes:
        wanted = f"{dtypes[0]} of shape {' or '.join(map(str, shapes))}"
        raise ArgumentError(name, f"is {value.dtype} of shape {tuple(value.shape)}", f"pass {wanted}")
    if value.device != logits.device:  # PyTorch reads a lone number from the host, and a CUDA graph keeps what it read
        problem = f"is on {value.device}, but logits are on {logits.device}"
        raise ArgumentError(name, problem, f"move it: {name}.to({str(logits.device)!r})")
