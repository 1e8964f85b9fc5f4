"""Words that are barred, beside Hugging Face's processor; tensors that recordings know by their addresses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codetta.barring import KEPT, NOTHING, Barred, Bars
from codetta.decode import SAMPLED

VOCABULARY = 6
tokens = st.integers(0, VOCABULARY - 1)
several = st.lists(st.lists(tokens, min_size=2, max_size=4).map(tuple), min_size=1, max_size=4, unique=True).map(tuple)


@settings(max_examples=80, deadline=None)
@given(
    several,
    st.lists(st.lists(tokens, min_size=3, max_size=3), min_size=1, max_size=3),
    st.lists(tokens, min_size=1, max_size=5),
)
def test_words_are_barred_as_hugging_face_bars_them(
    words: tuple[tuple[int, ...], ...], context: list[list[int]], more: list[int]
) -> None:
    """At the beginning, where a word may be longer than what there is, and behind each further token."""
    known = pytest.importorskip("transformers.generation.logits_process")
    theirs = known.NoBadWordsLogitsProcessor([list(each) for each in words])
    for length in (1, 2, 3):
        ids = torch.tensor(context)[:, :length]
        barred, bars = Barred(words=words), Bars(len(context), torch.device("cpu"))
        bars.begin(barred, VOCABULARY, ids.tolist())
        for token in more:
            logits = torch.randn(len(context), VOCABULARY)
            found = bars.without(logits, torch.tensor(0), barred.shape)
            torch.testing.assert_close(found, theirs(ids, logits.clone()))
            chosen = torch.full((len(context),), token)
            bars.follow(chosen, barred.shape)
            ids = torch.cat([ids, chosen[:, None]], 1)


def test_tensors_stay_where_they_are() -> None:
    bars, some = Bars(2, torch.device("cpu")), Barred({1: 3}, ((1, 2), (3, 4, 5)))
    bars.begin(some, VOCABULARY, [[1], [2, 3]])
    (recent,) = bars.changed(some.shape)
    until = bars.until
    bars.begin(Barred(words=((1, 2, 3, 4),)), VOCABULARY, [[1], [1]])
    bars.begin(Barred({2: 1}, ((3, 2, 1), (1, 1))), VOCABULARY, [[3, 2], [0, 1]])
    assert bars.changed(some.shape)[0] is recent and bars.until is until
    assert recent.tolist() == [[-3, 3, 2], [-3, 0, 1]]
    logits = torch.zeros(2, VOCABULARY)
    barred = bars.without(logits, torch.tensor(0), some.shape).isinf()
    assert barred.tolist() == [[False, False, True, False, False, False], [False, True, True, False, False, False]]
    assert not bars.without(logits, torch.tensor(1), some.shape).isinf()[0].any()
    assert bars.without(logits, torch.tensor(0), NOTHING) is logits
    assert not Barred() and Barred().shape == NOTHING


def test_words_of_the_last_shapes_are_kept() -> None:
    """So many that the recordings of a room find theirs."""
    bars = Bars(1, torch.device("cpu"))
    for count in range(1, 3 * KEPT):
        bars.begin(Barred(words=tuple((1, token) for token in range(count))), VOCABULARY, [[1]])
        assert len(bars.words) == min(count, KEPT) and (count, 2) in bars.words
    assert KEPT > SAMPLED
