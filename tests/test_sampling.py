"""The next token: against Hugging Face's processors, by its frequencies, and by what its random numbers depend on."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.generation import logits_process as hf

from codetta import sampling as module
from codetta.backends import triton_argmax
from codetta.errors import ArgumentError
from codetta.sampling import Sampling, choose, draw, first_count, probabilities

INF = math.inf
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.0, "top_k": 2**64, "top_p": 0.97},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 1.3, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "min_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.7},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
    {"temperature": 3.0, "top_k": 20, "min_p": 0.2},
    {"temperature": 2.0, "top_p": 0.8, "min_p": 0.15},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.85, "min_p": 0.05, "repetition_penalty": 1.2},
]


def named(how: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in how.items()) or "greedy"


def theirs(logits: Tensor, how: Sampling, seen: Tensor) -> Tensor:
    """The probabilities that transformers 5.17 samples from: the processors of `_get_logits_processor`, in its order."""
    processors = hf.LogitsProcessorList()
    if how.repetition_penalty != 1:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(how.repetition_penalty))
    processors.append(hf.TemperatureLogitsWarper(how.temperature))
    if how.top_k:
        processors.append(hf.TopKLogitsWarper(how.top_k))
    if how.top_p < 1:
        processors.append(hf.TopPLogitsWarper(how.top_p))
    processors.append(hf.MinPLogitsWarper(how.min_p))
    scores = logits if logits.dtype == torch.float64 else logits.float()
    # Sequences of one length, as input_ids are: what a row has not seen stands there as something that it has.
    ids = torch.where(seen, torch.arange(logits.shape[1]), seen.int().argmax(-1, keepdim=True))
    # Which of equal tokens top-p keeps is up to their sort: make it a stable one, and turn tokens around, so that the lower stay.
    last = logits.shape[1] - 1
    with mock.patch.object(torch, "sort", partial(torch.sort, stable=True)):
        return processors(last - ids, scores.flip(-1)).softmax(-1).flip(-1)


def case(batch: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    seen = torch.rand(batch, vocabulary) < 0.3
    seen[:, 0] = True
    return torch.randn(batch, vocabulary) * 3, seen


def flat() -> tuple[Tensor, Tensor]:
    logits, seen = case(1, 47, 4)
    return logits / 2, seen


def at(step: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(step), torch.arange(batch)


def draws(logits: Tensor, how: Sampling, count: int, by: str, seen: Tensor | None = None) -> Tensor:
    """Many tokens of one distribution (V,): of as many sequences, at as many steps, or both."""
    many, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    step, rows = {"rows": (torch.tensor(3), many), "steps": (many, zero + 5), "both": (many // 100, many % 100)}[by]
    return choose(logits.expand(count, -1), how, step, rows, None if seen is None else seen.expand(count, -1))


def misfit(tokens: Tensor, expected: Tensor) -> float:
    """Chi-square as the normal deviate that is exceeded as rarely (Wilson and Hilferty), with cells under five counts joined."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    wanted = expected.double() * len(tokens)
    assert not counts[wanted == 0].any()
    rare = wanted < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    free = len(counts) - 1
    spread = 2 / (9 * free)
    return ((float(((counts - wanted) ** 2 / wanted).sum()) / free) ** (1 / 3) - 1 + spread) / math.sqrt(spread)


@pytest.mark.parametrize("how", SETTINGS, ids=named)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_probabilities(how: dict[str, Any], dtype: torch.dtype) -> None:
    """The same tokens are out; of the others, no larger a part is wrong than twice what is in theirs."""
    logits, seen = case(9, 61)
    logits = logits.to(dtype)
    ours, expected = probabilities(logits, Sampling(**how), seen), theirs(logits, Sampling(**how), seen)
    exact = theirs(logits.double(), Sampling(**how), seen)
    assert ours.dtype == expected.dtype
    assert torch.equal(ours == 0, exact == 0)
    error, allowed = (((each - exact).abs() / exact).nan_to_num(0.0).max() for each in (ours, expected))
    assert float(error) <= 2 * float(allowed) + 1e-14


@settings(max_examples=150, deadline=None)
@given(
    eighths=st.lists(st.integers(-40, 40), min_size=1, max_size=24),
    out=st.sets(st.integers(0, 23)),
    occurred=st.sets(st.integers(0, 23)),
    temperature=st.sampled_from([0.25, 1.0, 1.7, 10.0]),
    top_k=st.integers(0, 26),
    top_p=st.sampled_from([0.0, 0.011, 0.37, 0.611, 0.913, 0.9991, 1.0]),
    min_p=st.sampled_from([0.0, 0.0113, 0.173, 0.871, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.21, 0.83, 2.0]),
)
def test_any_probabilities(
    eighths: list[int], out: set[int], occurred: set[int], temperature: float, top_k: int, top_p: float, min_p: float,
    repetition_penalty: float,
) -> None:  # fmt: skip
    """Logits with many equals and -inf among them, all settings at once; in float64, where no border is hit by chance."""
    logits = torch.tensor([eighths], dtype=torch.float64) / 8
    size = logits.shape[1]
    if len(out & set(range(size))) < size:
        logits[0, [each for each in out if each < size]] = -INF
    seen = torch.zeros(1, size, dtype=torch.bool)
    seen[0, [each for each in occurred | {0} if each < size]] = True
    how = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    ours, expected = probabilities(logits, how, seen), theirs(logits, how, seen)
    assert torch.equal(ours == 0, expected == 0)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_at_a_border(dtype: torch.dtype) -> None:
    """Top-k keeps all that equal the k-th; top-p as few as hold enough, the lower ones; with top_p = 0 the greedy one."""
    logits, seen = torch.tensor([[1.0, 0, 1, 0, 1, 1, -1, 0]], dtype=dtype), torch.ones(1, 8, dtype=torch.bool)
    for how, kept in (
        (Sampling(1.0, top_k=2), [0, 2, 4, 5]),
        (Sampling(1.0, top_k=5), [0, 1, 2, 3, 4, 5, 7]),
        (Sampling(1.0, top_k=4, top_p=0.5), [0, 2]),
        (Sampling(1.0, top_k=4, top_p=0.51), [0, 2, 4]),
        (Sampling(1.0, top_p=0.0), [0]),
        (Sampling(1.0, top_k=4, top_p=0.0, min_p=1.0), [0]),
        (Sampling(1.0, min_p=1.0), [0, 2, 4, 5]),
    ):
        ours = probabilities(logits, how, None)
        assert ours[0].nonzero().flatten().tolist() == kept, how
        torch.testing.assert_close(ours, theirs(logits, how, seen))


@pytest.mark.parametrize("tenths", range(1, 10))
def test_tenths(tenths: int) -> None:
    """Equal tokens: 1 - 0.9 is not 0.1 in binary, and yet nine of ten hold 0.9. Of a hundred, too, the first ones stay."""
    for size in (10, 100):
        kept = probabilities(torch.zeros(1, size), Sampling(1.0, top_p=tenths / 10), None)[0].nonzero().flatten()
        assert kept.tolist() == list(range(size * tenths // 10))


def test_no_logit() -> None:
    """-inf and NaN are never chosen beside a number; where there is none, every token is as likely; +inf leaves only its equals."""
    nan = math.nan
    rows = [[-INF, 1, -INF, 1], [nan, 1, -INF, 1], [-INF] * 4, [nan] * 4, [-INF, nan, -INF, 0], [INF, 0, nan, INF]]
    logits = torch.tensor([*rows, [nan, -INF, nan, -INF]])
    half, fourth = [0, 0.5, 0, 0.5], [0.25] * 4
    expected = torch.tensor([half, half, fourth, fourth, [0, 0, 0, 1], [0.5, 0, 0, 0.5], fourth])
    seen = torch.ones(logits.shape, dtype=torch.bool)
    for how in (Sampling(0.7), Sampling(0.7, top_k=4), Sampling(0.7, top_p=0.999), Sampling(0.7, min_p=0.1)):
        assert torch.equal(probabilities(logits, how, None), expected), how
        for step in range(50):
            tokens = choose(logits, how, *at(step, 7), None)
            assert expected.gather(1, tokens[:, None]).all(), how
    for penalty in (1.0, 1.5):
        tokens = choose(logits, Sampling(repetition_penalty=penalty), *at(0, 7), seen)
        assert tokens.tolist() == [1, 1, 0, 0, 3, 0, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-42, 1e-300])
def test_almost_no_temperature(temperature: float) -> None:
    """Numbers that overflow or are 0 in float32 leave the likeliest token, of logits of either sign."""
    logits = torch.tensor([[3.0, 9, 4, 8], [-9, -3, -8, -4]])
    for more in ({}, {"top_k": 2}, {"top_p": 0.9}):
        how = Sampling(temperature, **more)
        assert probabilities(logits, how, None).tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]
        assert choose(logits, how, *at(0, 2), None).tolist() == [1, 1]


@pytest.mark.parametrize("vocabulary", [1, 2, 37, 4099, 151936])
def test_greedy_takes_the_first_of_equals(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(5, vocabulary).clamp_max(1.0)
    places = (torch.rand(5, vocabulary) < 3 / vocabulary).scatter_(1, torch.randint(vocabulary, (5, 1)), True)
    logits[places] = 2.0
    first = [int(row.nonzero()[0]) for row in places]
    for how in (Sampling(), Sampling(top_k=3, top_p=0.5, min_p=0.1, seed=9)):
        assert how.greedy
        assert choose(logits, how, *at(7, 5), None).tolist() == first
        assert probabilities(logits, how, None).argmax(-1).tolist() == first
        assert probabilities(logits, how, None).sum(-1).tolist() == [1.0] * 5


def test_greedy_with_penalty() -> None:
    logits = torch.tensor([[4.0, 3, -1], [-1, -1.5, -9], [4, 3, -1]])
    seen = torch.tensor([[True, False, False], [True, False, False], [False, True, True]])
    assert choose(logits, Sampling(repetition_penalty=2.0), *at(0, 3), seen).tolist() == [1, 1, 0]
    assert probabilities(logits, Sampling(repetition_penalty=2.0), seen).tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 0]]
    assert choose(logits, Sampling(), *at(0, 3), seen).tolist() == [0, 0, 0]


@pytest.mark.parametrize("how", SETTINGS, ids=named)
@pytest.mark.parametrize("by", ["rows", "steps", "both"])
def test_frequencies(how: dict[str, Any], by: str) -> None:
    """20,000 draws: chi-square below what one in 30,000 exceeds, and never a token that is out."""
    logits, seen = flat()
    wanted = probabilities(logits, Sampling(**how), seen)[0]
    tokens = draws(logits[0], Sampling(**how, seed=11), 20_000, by, seen[0])
    if int((wanted > 0).sum()) == 1:
        assert bool((tokens == wanted.argmax()).all())
    else:
        assert misfit(tokens, wanted) < 4


def test_frequencies_tell_distributions_apart() -> None:
    """What the test above measures shows a temperature that is off by a twentieth."""
    logits, _ = flat()
    tokens = draws(logits[0], Sampling(1.0, seed=11), 20_000, "rows")
    for temperature in (0.95, 1.05):
        assert misfit(tokens, probabilities(logits, Sampling(temperature), None)[0]) > 4


@pytest.mark.parametrize("apart", ["rows", "steps", "tokens", "seeds"])
def test_neighbours_are_independent(apart: str) -> None:
    """Pairs of draws whose numbers differ by one in one place: each of the sixteen pairs of four tokens as often as any other."""
    count, logits, how = 20_000, torch.zeros(20_000, 4), Sampling(1.0)
    step, rows = torch.arange(count) // 100 * 2, torch.arange(count) % 100 * 2
    first = choose(logits, how, step, rows, None)
    if apart == "tokens":  # the same race among other tokens
        first = choose(torch.zeros(count, 5).index_fill(1, torch.tensor([4]), -INF), how, step, rows, None)
        second = choose(torch.zeros(count, 9).index_fill(1, torch.arange(5), -INF), how, step, rows, None) - 5
    elif apart == "seeds":
        second = choose(logits, Sampling(1.0, seed=1), step, rows, None)
    else:
        second = choose(logits, how, step + (apart == "steps"), rows + (apart == "rows"), None)
    assert misfit(4 * first + second, torch.full((16,), 1 / 16)) < 4


def test_small_numbers_of_the_race() -> None:
    """A vocabulary's race is won by less than 1/V. There numbers keep their 24 bits: 24 bits of u alone would make dozens of ties."""
    times = -module._headstart(torch.tensor(2 + first_count(3)), torch.arange(8), 2**17).double()
    assert float(times.min()) > 0 and bool(times.isfinite().all())
    smallest = times.flatten().sort().values[:1000]
    assert len(smallest.unique()) == 1000
    for quantile in (1e-4, 0.01, 0.5, 0.99, 0.9999):
        below = float((times < -math.log1p(-quantile)).double().mean())
        assert abs(below - quantile) < 4 * math.sqrt(quantile * (1 - quantile) / times.numel())


def test_large_vocabulary_has_no_favourites() -> None:
    """600 draws from 2¹⁷ equal tokens, by the sixteen stretches that they lie in."""
    tokens = torch.cat([draws(torch.zeros(2**17), Sampling(1.0, seed=each), 30, "rows") for each in range(20)])
    assert misfit(tokens // 2**13, torch.full((16,), 1 / 16)) < 4


def test_extreme_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hash gives, E is a positive number, so that tokens without weight never win."""
    words = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), -(2**63) + 1, 2**62])
    monkeypatch.setattr(module, "_mixed", lambda given: words.expand(given.shape) if given.dim() == 2 else given)
    times = -module._headstart(torch.tensor(0), torch.arange(1), 7)
    assert bool((times > 0).all()) and bool(times.isfinite().all())
    monkeypatch.setattr(module, "_mixed", lambda given: torch.full_like(given, -1))
    logits = torch.tensor([[-INF, -INF, 0.0, -1.0]])
    assert choose(logits, Sampling(1.0), *at(0, 1), None).tolist() == [2]


def test_hash() -> None:
    """The published first outputs of splitmix64 from 1234567, whose last step is made here."""
    counters = 1234567 + module.STRIDE * torch.arange(1, 6)
    words = [each % 2**64 for each in module._mixed(counters).tolist()]
    assert [each ^ each >> 31 for each in words] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert first_count(1234567) % 2**64 == words[0]


def test_seeds() -> None:
    logits, _ = case(64, 100)
    chosen = {}
    for seed in (0, 1, 2, 2**31, 2**32, 2**63, 2**64 - 1):
        how = Sampling(2.0, seed=seed)
        tokens = choose(logits, how, *at(0, 64), None)
        assert torch.equal(tokens, choose(logits.clone(), how, *at(0, 64), None))
        chosen[seed] = tuple(tokens.tolist())
    assert len(set(chosen.values())) == 7
    # A counter that has the seed in it counts on: no seed is read beside it.
    counter, row = torch.tensor(first_count(2**63)), torch.arange(64)
    for step in range(3):
        out = torch.empty(64, dtype=torch.int64)
        drawn = draw(logits, Sampling(2.0, seed=step), counter, row, None, out)
        assert drawn is out and torch.equal(out, choose(logits, Sampling(2.0, seed=2**63), *at(step, 64), None))
        counter += 1
    # Pinned: text that somebody could make again yesterday can be made again tomorrow.
    tokens = draws(torch.zeros(1000), Sampling(1.0, seed=5), 6, "rows")
    assert tokens.tolist() == [567, 594, 836, 87, 168, 51]


@pytest.mark.parametrize("how", SETTINGS, ids=named)
def test_alone_and_in_a_batch(how: dict[str, Any]) -> None:
    """The same token whoever is beside it, in whichever order, and whether steps are one number or one each."""
    logits, seen = case(13, 501)
    drawn, rows = Sampling(**how, seed=3), torch.randint(0, 2**40, (13,))
    step = torch.arange(13) * 3
    given, steps = rows.clone(), step.clone()
    together = choose(logits, drawn, step, rows, seen)
    assert torch.equal(rows, given) and torch.equal(step, steps)
    order = torch.randperm(13)
    assert torch.equal(choose(logits[order], drawn, step[order], rows[order], seen[order]), together[order])
    for i in range(13):
        one = slice(i, i + 1)
        assert choose(logits[one], drawn, step[i], rows[one], seen[one]).tolist() == [int(together[i])]
    weights = module._weights(logits, drawn, seen)
    for i in range(13):
        assert torch.equal(module._weights(logits[i : i + 1].clone(), drawn, seen[i : i + 1])[0], weights[i])


@pytest.mark.parametrize("how", [{}, *SETTINGS], ids=named)
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("vocabulary", [1, 6])
def test_shapes(how: dict[str, Any], batch: int, vocabulary: int) -> None:
    logits, seen = case(batch, vocabulary)
    for integer in (torch.int64, torch.int32):
        step, rows = (each.to(integer) for each in at(2, batch))
        tokens = choose(logits, Sampling(**how), step, rows, seen)
        assert tokens.shape == (batch,) and tokens.dtype == torch.int64
        assert bool(((tokens >= 0) & (tokens < vocabulary)).all())
    shares = probabilities(logits, Sampling(**how), seen)
    assert shares.shape == (batch, vocabulary)
    torch.testing.assert_close(shares.sum(-1), torch.ones(batch))


@pytest.mark.parametrize("how", [{}, *SETTINGS], ids=named)
def test_nothing_is_read_on_the_host(how: dict[str, Any]) -> None:
    """Tensors without numbers: reading one, or a shape that depends on one, raises."""
    with FakeTensorMode():
        logits, seen = torch.empty(3, 50, dtype=torch.bfloat16), torch.empty(3, 50, dtype=torch.bool)
        tokens = choose(logits, Sampling(**how), torch.empty((), dtype=torch.int64), torch.arange(3), seen)
        assert tokens.shape == (3,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, INF, math.nan, "1", None, True)],
        *[("top_k", value) for value in (-1, 2.0, None, True)],
        *[(name, value) for name in ("top_p", "min_p") for value in (-0.1, 1.1, math.nan, None)],
        *[("repetition_penalty", value) for value in (0.0, -1.0, INF, math.nan, None)],
        *[("seed", value) for value in (-1, 2**64, 1.0, None)],
    ],
)
def test_settings_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"^{name}: is {value!r}\. Pass ") as caught:
        Sampling(**{name: value})
    assert caught.value.argument == name


def test_arguments_are_checked() -> None:
    logits, seen = case(2, 5)
    good = {"logits": logits, "step": torch.tensor(0), "rows": torch.arange(2), "seen": seen}
    how = Sampling(1.0, repetition_penalty=1.1)
    choose(sampling=how, **good)
    for name, bad in (
        ("logits", logits[0]),
        ("logits", logits[:, :0]),
        ("logits", logits.long()),
        ("step", torch.arange(3)),
        ("step", torch.tensor(0.0)),
        ("step", torch.tensor(0, device="meta")),
        ("rows", torch.arange(3)),
        ("rows", torch.tensor(0)),
        ("rows", torch.arange(2, device="meta")),
        ("seen", None),
        ("seen", seen.int()),
        ("seen", seen[:1]),
        ("seen", seen.to("meta")),
    ):
        with pytest.raises(ArgumentError) as caught:
            choose(sampling=how, **good | {name: bad})
        assert caught.value.argument == name
        if name in ("logits", "seen"):
            with pytest.raises(ArgumentError, match=f"^{name}: "):
                probabilities(good["logits"] if name == "seen" else bad, how, bad if name == "seen" else seen)
    choose(sampling=Sampling(1.0), **good | {"seen": None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 17), (2, 2048), (2, 2049), (1, 7001)])
def test_likeliest_by_many_blocks(rows: int, cols: int, dtype: torch.dtype) -> None:
    """The first of the largest, whatever they are: equal ones, zeros of both signs, infinities, NaN."""
    torch.manual_seed(0)
    cases = [
        torch.randn(rows, cols),
        torch.randint(-3, 3, (rows, cols)).float(),
        torch.full((rows, cols), float("-inf")),
    ]
    cases.append(torch.where(torch.rand(rows, cols) < 0.5, -0.0, 0.0))
    cases.append(torch.randn(rows, cols).masked_fill(torch.rand(rows, cols) < 0.1, float("inf")))
    cases.append(torch.randn(rows, cols).masked_fill(torch.rand(rows, cols) < 0.1, float("nan")))
    for logits in cases:
        logits = logits.to(dtype)
        assert triton_argmax.argmax(logits).tolist() == logits.argmax(-1).tolist()
        turned = logits.t().contiguous().t()
        assert triton_argmax.argmax(turned).tolist() == logits.argmax(-1).tolist()
