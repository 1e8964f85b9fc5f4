"""Tokens that may not be chosen next, as a step on the device knows them: some until so many others are there, some behind certain others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# In a pattern: whatever is there, or nothing; a token, whichever. Beside tokens: nothing is there.
ANY, SOME, NONE = -1, -2, -3
KEPT = (
    8  # shapes of words whose tensors stay: more than there are recordings that read them, which go in the same order
)


@dataclass(frozen=True)
class Barred:
    """until: how many new tokens have to be there before one may be chosen. words: the last token of each is not chosen behind the others
    of it, if there is one more token before them (as Hugging Face's `bad_words_ids` has it)."""

    until: dict[int, int] = field(default_factory=dict)
    words: tuple[tuple[int, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.until or self.words)

    @property
    def shape(self) -> Shape:
        words = (len(self.words), max(map(len, self.words))) if self.words else None
        return Shape(bool(self.until), words)


@dataclass(frozen=True)
class Shape:
    """What a recording knows of Barred: whether tokens are barred by their number, and how many words of how many tokens at most there are."""

    until: bool = False
    words: tuple[int, int] | None = None


NOTHING = Shape()


class _Words:
    """So many words, and the last tokens of each sequence."""

    def __init__(self, batch: int, shape: tuple[int, int], device: torch.device) -> None:
        count, width = shape
        self.width = width
        self.pattern = torch.empty(count, width, dtype=torch.int64, device=device)
        self.last = torch.empty(count, dtype=torch.int64, device=device)
        self.recent = torch.empty(batch, width, dtype=torch.int64, device=device)

    def begin(self, words: tuple[tuple[int, ...], ...], context: list[list[int]]) -> None:
        self.pattern.copy_(torch.tensor([[ANY] * (self.width - len(each)) + [SOME, *each[:-1]] for each in words]))
        self.last.copy_(torch.tensor([each[-1] for each in words]))
        ends = [each[-self.width :] for each in context]
        self.recent.copy_(torch.tensor([[NONE] * (self.width - len(each)) + each for each in ends]))

    def without(self, logits: Tensor) -> Tensor:
        recent = self.recent[:, None]
        fits = (self.pattern == recent) | (self.pattern == ANY) | ((self.pattern == SOME) & (recent != NONE))
        out = torch.zeros_like(logits[:, :1]).masked_fill(fits.all(-1), -torch.inf)
        # Words may end alike; 0 and -inf have one sum in whichever order they come.
        return logits.index_add(1, self.last, out)

    def follow(self, tokens: Tensor) -> None:
        self.recent.copy_(torch.cat([self.recent[:, 1:], tokens[:, None]], 1))


class Bars:
    """What is barred of so many sequences. Tensors stay where they are, for recordings know them by their addresses."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch, self.device = batch, device
        self.until: Tensor | None = None  # (vocabulary,)
        self.words: dict[tuple[int, int], _Words] = {}  # by their shape; the last ones used, in that order

    def begin(self, barred: Barred, vocabulary: int, context: list[list[int]]) -> None:
        """context: the tokens of each sequence."""
        with torch.inference_mode(False):  # a later call may be of another mode
            if barred.until:
                if self.until is None or len(self.until) != vocabulary:
                    self.until = torch.empty(vocabulary, dtype=torch.int64, device=self.device)
                self.until.zero_()
                known = {token: count for token, count in barred.until.items() if token < vocabulary}
                those, counts = torch.tensor([[*known], [*known.values()]], dtype=torch.int64).to(self.device)
                self.until[those] = counts
            shape = barred.shape.words
            if shape is not None:
                self.words[shape] = words = self.words.pop(shape, None) or _Words(self.batch, shape, self.device)
                words.begin(barred.words, context)
                if len(self.words) > KEPT:
                    del self.words[next(iter(self.words))]

    def without(self, logits: Tensor, count: Tensor, shape: Shape) -> Tensor:
        """The logits with -inf for what is barred. count: how many tokens have been chosen."""
        if shape.until:
            assert self.until is not None
            logits = logits.masked_fill(count < self.until, -torch.inf)
        return logits if shape.words is None else self.words[shape.words].without(logits)

    def follow(self, tokens: Tensor, shape: Shape) -> None:
        """These have been chosen."""
        if shape.words is not None:
            self.words[shape.words].follow(tokens)

    def changed(self, shape: Shape) -> list[Tensor]:
        """What `follow` changes."""
        return [] if shape.words is None else [self.words[shape.words].recent]
