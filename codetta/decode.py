"""Decoder: sequences in slots that take each step together, every one at its own place.

begin   reads prompts, each by itself, whatever its length, and puts their keys and values into slots
turn    one more token for each sequence, on the device from end to end; on a GPU a recording is replayed

Both give tokens that are on their way to the host: a caller may launch the next step before reading them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from codetta.errors import ArgumentError
from codetta.integrations.dynamo import backend_of, compile
from codetta.integrations.huggingface import Causal, Slots
from codetta.options import Options
from codetta.runtime.recorded import Recorded
from codetta.runtime.sized import state_of
from codetta.sampling import Sampling, draw, first_count
from codetta.sampling import likeliest as likeliest_of

SAMPLED = 2  # recordings of a room, by kinds of sampling: each holds memory


class Sent:
    """Tokens of one step on their way to the host. Whoever reads them waits for them, not for what was launched behind them."""

    def __init__(self, tokens: Tensor) -> None:
        """Room on the host for tokens like these. Pinned: a copy into other memory would make the host wait."""
        self.arrived = torch.cuda.Event() if tokens.is_cuda else None
        self.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)

    def send(self, tokens: Tensor) -> Sent:
        self.tokens.copy_(tokens, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record(torch.cuda.current_stream(tokens.device))
        return self

    def read(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tokens.tolist()


@dataclass
class _Choice:
    """What the next tokens are chosen by. Tensors stay where they are, for recordings know them by their addresses."""

    tokens: Tensor  # (batch,): the last that were chosen
    rows: Tensor  # (batch,): which number stands for each sequence in the random numbers
    counter: Tensor  # (): how many tokens were chosen before, and the seed
    seen: Tensor | None = None  # (batch, vocabulary): which tokens have occurred; made for the first repetition penalty

    def begin(self, prompts: list[list[int]], vocabulary: int, sampling: Sampling) -> None:
        # Equal prompts get answers of their own, others the one that they would get alone.
        again = [prompts[:at].count(prompt) for at, prompt in enumerate(prompts)]
        self.rows.copy_(torch.tensor(again))
        self.counter.fill_(first_count(sampling.seed))
        if sampling.repetition_penalty == 1:
            return
        if self.seen is None:
            self.seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool, device=self.tokens.device)
        self.seen.zero_()
        for at, prompt in enumerate(prompts):
            self.seen[at, prompt] = True

    def choose(self, logits: Tensor, sampling: Sampling) -> Tensor:
        seen = self._seen(sampling)
        draw(logits, sampling, self.counter, self.rows, seen, self.tokens)
        if seen is not None:
            seen.scatter_(1, self.tokens[:, None], True)
        self.counter.add_(1)
        return self.tokens

    def changed(self, sampling: Sampling) -> list[Tensor]:
        """What `choose` changes."""
        seen = self._seen(sampling)
        return [self.tokens, self.counter] if seen is None else [self.tokens, self.counter, seen]

    def _seen(self, sampling: Sampling) -> Tensor | None:
        return None if sampling.repetition_penalty == 1 else self.seen


@dataclass
class _Room:
    """Slots for so many sequences, the tokens that go into them next, and the functions that put them there.

    None of the functions refers to the room: a circle would hold its memory until the garbage collector comes by.
    """

    slots: Slots
    choice: _Choice
    step: Any  # as compiled
    logits: Callable[[], Tensor]  # behind the tokens that were chosen; the places move on
    likeliest: Recorded  # the same, and the likeliest token becomes the next one
    sent: Iterator[Sent]  # two by turns: one is written while the other is still to be read
    # The same for tokens chosen otherwise, by the settings without the seed; the last ones used, in that order.
    sampled: dict[Sampling, Recorded] = field(default_factory=dict)

    def recorded(self, sampling: Sampling) -> Recorded:
        """A step that ends with the next tokens, chosen like this."""
        if sampling.greedy and sampling.repetition_penalty == 1:
            return self.likeliest
        kind = replace(sampling, seed=0)  # the counter has the seed
        self.sampled[kind] = found = self.sampled.pop(kind, None) or self._sampled(kind)
        if len(self.sampled) > SAMPLED:
            del self.sampled[next(iter(self.sampled))]
        return found

    def _sampled(self, kind: Sampling) -> Recorded:
        choice, logits = self.choice, self.logits
        return Recorded(lambda: choice.choose(logits(), kind), [self.slots.places, *choice.changed(kind)])

    def send(self) -> Sent:
        """The tokens. Those sent before may still be unread, but no earlier ones."""
        return next(self.sent).send(self.choice.tokens)

    def forget(self) -> None:
        for each in (self.likeliest, *self.sampled.values()):
            each.forget()


class Decoder:
    """A causal language model of Hugging Face's, with room for `context` tokens of each sequence."""

    def __init__(self, model: nn.Module, context: int | None = None, options: Options | None = None) -> None:
        self.causal = Causal(model)
        self.causal.check()
        most = getattr(self.causal.config, "max_position_embeddings", None) or 4096
        self.context = min(4096, most) if context is None else context
        if not 1 < self.context <= most:
            raise ArgumentError(
                "context", f"is {self.context}, the model has positions for {most}", f"pass 2 to {most} tokens"
            )
        known = backend_of(model)
        self.options = options or (known.options if known is not None else Options())
        self.prompt = compile(self.causal.prompt, options=self.options)
        self.current: _Room | None = None  # that of the last call
        self.recorded: Recorded | None = None
        self.weights: list[tuple[weakref.ref[Tensor], tuple[object, ...]]] = []
        # Whether a step is to be launched before the last one's tokens are read. A CPU would gain nothing by it.
        self.ahead = self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        return next(self.causal.model.parameters()).device

    @torch.no_grad()
    def begin(self, prompts: list[list[int]], sampling: Sampling) -> Sent:
        """The first token of each sequence."""
        self._look_at_parameters()
        logits = []
        for slot, prompt in enumerate(prompts):
            found, keys, values = self.prompt(torch.tensor([prompt], device=self.device))
            room = self.room(len(prompts), keys, values)
            room.slots.put(slot, keys, values)
            logits.append(found)
        room.choice.begin(prompts, logits[0].shape[1], sampling)
        room.choice.choose(torch.cat(logits), sampling)
        self.recorded = room.recorded(sampling)
        return room.send()

    @torch.no_grad()
    def turn(self) -> Sent:
        """The next token of each sequence, chosen as the first was; whoever has ended goes on unheard, as long as there is room."""
        assert self.recorded is not None and self.current is not None, "begin comes first"
        self.recorded()
        return self.current.send()

    def room(self, batch: int, keys: list[Tensor], values: list[Tensor]) -> _Room:
        """That of the last call, if it fits; if not, its memory is given back first."""
        kept = self.current
        if kept is None or len(kept.slots.places) != batch or not kept.slots.hold(keys, values):
            self.current = self.recorded = None
            try:
                slots = self.causal.slots(batch, self.context, keys, values)
            except torch.OutOfMemoryError:
                need = sum(each[0, :, 0].numel() * each.element_size() for each in [*keys, *values])
                raise ArgumentError(
                    "context", f"{self.context} tokens for {batch} sequences need {need * batch * self.context / 2**30:.1f} GiB of cache, "
                    "which are not there", "lower context, or pass fewer prompts at once",
                ) from None  # fmt: skip
            kept = self.current = self._furnished(slots)
        return kept

    def _furnished(self, slots: Slots) -> _Room:
        step = compile(self.causal.step(slots), options=self.options, dynamic=False)
        tokens, places = torch.zeros_like(slots.places), slots.places
        choice = _Choice(tokens, torch.zeros_like(places), torch.zeros_like(places[0]))

        def logits() -> Tensor:
            found = step(tokens, places.clamp(max=slots.context - 1))
            places.add_(1)
            return found

        def likeliest() -> Tensor:
            return likeliest_of(logits(), tokens)

        sent = cycle([Sent(tokens), Sent(tokens)])
        return _Room(slots, choice, step, logits, Recorded(likeliest, [places, tokens]), sent)

    def _look_at_parameters(self) -> None:
        """Recordings read what was made of parameters and buffers; they are made anew when those have changed or are others."""
        if self.device.type != "cuda":
            return
        model = self.causal.model
        now = [(weakref.ref(each), state_of(each)) for each in (*model.parameters(), *model.buffers())]
        same = len(now) == len(self.weights) and all(
            new() is old() and state == was for (new, state), (old, was) in zip(now, self.weights, strict=True)
        )
        if not same:
            self.weights = now
            if self.current is not None:
                self.current.forget()
