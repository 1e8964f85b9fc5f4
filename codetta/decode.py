"""Decoder: sequences in slots that take each step together, every one at its own place.

begin   reads prompts together, padded to one of a few lengths, and puts their keys and values into slots
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
TOGETHER = 16  # prompts that are read at once: logits are made for each pair of a prompt and an end
SHORTEST = 16  # tokens that a prompt is padded to
LEAST = 1024  # tokens of a room that is made for a call
KEPT = 1 << 30  # bytes of rooms that are kept for later calls, beside the current one, or as many as that has


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


@dataclass(frozen=True)
class Kind:
    """How a step chooses, as far as its recording knows: without the seed, which the counter has, and without which tokens are barred."""

    sampling: Sampling
    barred: bool = False

    @classmethod
    def of(cls, sampling: Sampling, barred: bool) -> Kind:
        return cls(replace(sampling, seed=0), barred)


def _zeros(kept: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in the tensor that is there, for recordings know it by its address."""
    if kept is not None and kept.shape == shape:  # the vocabulary may have grown: then recordings are made anew
        return kept.zero_()
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


@dataclass
class _Choice:
    """What the next tokens are chosen by. Tensors stay where they are, for recordings know them by their addresses."""

    tokens: Tensor  # (batch,): the last that were chosen
    rows: Tensor  # (batch,): which number stands for each sequence in the random numbers
    counter: Tensor  # (): how many tokens were chosen before, and the seed
    first: Tensor  # (): what the counter began with
    seen: Tensor | None = None  # (batch, vocabulary): which tokens have occurred; made for the first repetition penalty
    until: Tensor | None = None  # (vocabulary,): how many tokens must be there before each may be chosen

    def begin(
        self, prompts: list[list[int]], vocabulary: int, sampling: Sampling, occurred: list[list[int]], barred: dict[int, int]
    ) -> None:  # fmt: skip
        # Equal prompts get answers of their own, others the one that they would get alone.
        again = [prompts[:at].count(prompt) for at, prompt in enumerate(prompts)]
        self.rows.copy_(torch.tensor(again))
        self.counter.fill_(first_count(sampling.seed))
        self.first.copy_(self.counter)
        if barred:
            self.until = _zeros(self.until, (vocabulary,), torch.int64, self.tokens.device)
            known = {token: count for token, count in barred.items() if token < vocabulary}
            those, counts = torch.tensor([[*known], [*known.values()]], dtype=torch.int64).to(self.until.device)
            self.until[those] = counts
        if sampling.repetition_penalty != 1:
            self.seen = _zeros(self.seen, (len(prompts), vocabulary), torch.bool, self.tokens.device)
            for at, each in enumerate(occurred):
                self.seen[at, each] = True

    def choose(self, logits: Tensor, kind: Kind) -> Tensor:
        seen = self._seen(kind.sampling)
        if kind.barred:
            assert self.until is not None
            logits = logits.masked_fill(self.counter - self.first < self.until, -torch.inf)
        draw(logits, kind.sampling, self.counter, self.rows, seen, self.tokens)
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
    # The same for tokens chosen otherwise; the last ones used, in that order.
    sampled: dict[Kind, Recorded] = field(default_factory=dict)
    shift: Tensor | None = None  # (batch,): how far positions are from places, where somebody has said so
    bare: Recorded | None = None

    def behind(self) -> Tensor:
        """The logits behind the tokens, for somebody else to choose by; the next call's come into the same memory."""
        if self.bare is None:
            self.bare = Recorded(self.logits, [self.slots.places])
        return self.bare()

    def recorded(self, kind: Kind) -> Recorded:
        """A step that ends with the next tokens, chosen like this."""
        greedy = kind.sampling.greedy and kind.sampling.repetition_penalty == 1
        if greedy and not kind.barred:
            return self.likeliest
        self.sampled[kind] = found = self.sampled.pop(kind, None) or self._sampled(kind)
        if len(self.sampled) > SAMPLED:
            del self.sampled[next(iter(self.sampled))]
        return found

    def _sampled(self, kind: Kind) -> Recorded:
        choice, logits = self.choice, self.logits
        return Recorded(lambda: choice.choose(logits(), kind), [self.slots.places, *choice.changed(kind.sampling)])

    def send(self) -> Sent:
        """The tokens. Those sent before may still be unread, but no earlier ones."""
        return next(self.sent).send(self.choice.tokens)

    def forget(self) -> None:
        for each in (self.likeliest, self.bare, *self.sampled.values()):
            if each is not None:
                each.forget()


def padded(length: int, most: int) -> int:
    """The length that a prompt is read at: one of a few, an eighth longer on the average where it counts. So few sizes are compiled,
    bound and recorded."""
    step = max(SHORTEST, 1 << max((length - 1).bit_length() - 3, 0)) if length > 512 else 1 << (length - 1).bit_length()
    return min(max(-(-length // step) * step, SHORTEST), most)


class Decoder:
    """A causal language model of Hugging Face's, with room for `context` tokens of each sequence."""

    def __init__(self, model: nn.Module, context: int | None = None, options: Options | None = None) -> None:
        self.causal = Causal(model)
        self.causal.check()
        self.most = getattr(self.causal.config, "max_position_embeddings", None) or 4096  # tokens of a sequence
        self.context = min(4096, self.most) if context is None else context
        if not 1 < self.context <= self.most:
            raise ArgumentError(
                "context",
                f"is {self.context}, the model has positions for {self.most}",
                f"pass 2 to {self.most} tokens",
            )
        known = backend_of(model)
        self.options = options or (known.options if known is not None else Options())
        self.prompt = compile(self.causal.prompt, options=self.options)
        self.rooms: list[_Room] = []  # of the last calls, the current one last
        self.current: _Room | None = None
        self.recorded: Recorded | None = None
        self.weights: list[tuple[weakref.ref[Tensor], tuple[object, ...]]] = []
        # Whether a step is to be launched before the last one's tokens are read. A CPU would gain nothing by it.
        self.ahead = self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        return next(self.causal.model.parameters()).device

    def hold(self, batch: int, tokens: int) -> None:
        """Have room for so many tokens of so many sequences from the next call on. Rooms are of a few sizes, and one that is there and
        large enough will do: a step is compiled for its room."""
        there = [each.slots.context for each in self.rooms if len(each.slots.places) == batch]
        fitting = [context for context in there if context >= tokens]
        self.context = min(min(fitting) if fitting else max(LEAST, 1 << (tokens - 1).bit_length()), self.most)

    @torch.no_grad()
    def begin(
        self, prompts: list[list[int]], sampling: Sampling, occurred: list[list[int]] | None = None,
        barred: dict[int, int] | None = None,
    ) -> Sent:  # fmt: skip
        """The first token of each sequence. occurred: what a repetition penalty counts, if that is not the prompts. barred: how many
        tokens must be there before one may be chosen, for some."""
        logits = self.read(prompts)
        room = self.current
        assert room is not None
        kind = Kind.of(sampling, bool(barred))
        room.choice.begin(prompts, logits.shape[1], sampling, occurred or prompts, barred or {})
        room.choice.choose(logits, kind)
        self.recorded = room.recorded(kind)
        return room.send()

    @torch.no_grad()
    def read(self, prompts: list[list[int]]) -> Tensor:
        """The logits behind each prompt, with its keys and values in the slot of its number."""
        self._look_at_parameters()
        # Neighbours in length are padded least.
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at])) if len(prompts) > TOGETHER else None
        logits: list[Tensor] = []
        for begin in range(0, len(prompts), TOGETHER):
            rows = range(len(prompts))[begin : begin + TOGETHER] if order is None else order[begin : begin + TOGETHER]
            given = [prompts[at] for at in rows]
            lengths = [len(each) for each in given]
            length = padded(max(lengths), self.context)
            tokens = torch.tensor([each + [0] * (length - len(each)) for each in given], device=self.device)
            last = torch.tensor(lengths, device=self.device) - 1
            found, keys, values = self.prompt(tokens, last)
            room = self.room(len(prompts), keys, values)
            room.slots.put(slice(None) if order is None else list(rows), keys, values, lengths)
            logits.append(found)
        if order is None:
            return logits[0]
        whole = torch.cat(logits)
        return torch.empty_like(whole).index_copy_(0, torch.tensor(order, device=whole.device), whole)

    @torch.no_grad()
    def turn(self) -> Sent:
        """The next token of each sequence, chosen as the first was; whoever has ended goes on unheard, as long as there is room."""
        assert self.recorded is not None and self.current is not None, "begin comes first"
        self.recorded()
        return self.current.send()

    @torch.no_grad()
    def placed(self, batch: int, model: nn.Module) -> _Room:
        """A room whose slots and positions somebody else fills in. model: the same, not compiled."""
        self._look_at_parameters()
        _, keys, values = Causal(model).prompt(torch.zeros((1, 1), dtype=torch.int64, device=self.device))
        return self.room(batch, keys, values, shifted=True)

    def room(self, batch: int, keys: list[Tensor], values: list[Tensor], shifted: bool = False) -> _Room:
        """One that was used before, if it fits, with what was compiled for it."""
        rooms = self.rooms = [each for each in self.rooms if each.slots.hold(keys, values)]
        for each in rooms:
            same = len(each.slots.places) == batch and each.slots.context == self.context
            if same and (each.shift is not None) == shifted:
                self.rooms = [*(other for other in rooms if other is not each), each]
                self.current = each
                return each
        self.current = self.recorded = None
        bytes_of = sum(each[0, :, 0].numel() * each.element_size() for each in [*keys, *values]) * batch * self.context
        while rooms and sum(each.slots.bytes for each in rooms) > max(KEPT, bytes_of):
            rooms.pop(0)
        made = None
        while made is None:
            try:
                # Not in inference mode, whose tensors nobody may write to outside of it.
                with torch.inference_mode(False):
                    made = self._furnished(self.causal.slots(batch, self.context, keys, values), shifted)
            except torch.OutOfMemoryError:
                if not rooms:
                    raise ArgumentError(
                        "context", f"{self.context} tokens for {batch} sequences need {bytes_of / 2**30:.1f} GiB of cache, which are not there",
                        "lower context, or pass fewer prompts at once",
                    ) from None  # fmt: skip
            if made is None:
                rooms.clear()  # their memory is given back first
        rooms.append(made)
        self.current = made
        return made

    def _furnished(self, slots: Slots, shifted: bool) -> _Room:
        shift = torch.zeros_like(slots.places) if shifted else None
        step = compile(self.causal.step(slots, shift), options=self.options, dynamic=False)
        tokens, places = torch.zeros_like(slots.places), slots.places
        choice = _Choice(tokens, torch.zeros_like(places), torch.zeros_like(places[0]), torch.zeros_like(places[0]))

        def logits() -> Tensor:
            found = step(tokens, places.clamp(max=slots.context - 1))
            places.add_(1)
            return found

        def likeliest() -> Tensor:
            return likeliest_of(logits(), tokens)

        sent = cycle([Sent(tokens), Sent(tokens)])
        return _Room(slots, choice, step, logits, Recorded(likeliest, [places, tokens]), sent, shift=shift)

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
            for each in self.rooms:
                each.forget()
