"""Decoder: sequences in slots that take each step together, every one at its own place.

begin   reads prompts together, padded to one of a few lengths, and puts their keys and values into slots
turn    one more token for each sequence, on the device from end to end

Both give tokens that are on their way to the host: a caller may launch the next step before reading them. On a GPU both are recorded as
CUDA graphs: a step at once, a prompt of a size that comes again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from codetta.barring import NOTHING, Barred, Bars, Shape
from codetta.errors import ArgumentError, CodettaError
from codetta.integrations.dynamo import backend_of, compile
from codetta.integrations.huggingface import Causal, Slots
from codetta.options import Options
from codetta.runtime.recorded import Recorded
from codetta.runtime.sized import addresses_of, backwards, lie_at, state_of
from codetta.sampling import Sampling, draw, first_count
from codetta.sampling import likeliest as likeliest_of

SAMPLED = 2  # recordings of a room, by kinds of sampling: each holds memory
TOGETHER = 16  # prompts that are read at once: logits are made for each pair of a prompt and an end
SHORTEST = 16  # tokens that a prompt is padded to
LEAST = 1024  # tokens of a room that is made for a call
RECORDED = 4096  # tokens, with their padding, of prompts that are read by a recording: for more, the device takes longer than the host
TURNS = 16  # compiled steps that are kept, by batch
LENGTHS = 8  # of prompts, whose recordings a room keeps
BEFORE = 2  # prompts of a length that are read without a recording: as many as it takes to bind a plan
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
    barred: Shape = NOTHING

    @classmethod
    def of(cls, sampling: Sampling, barred: Barred) -> Kind:
        return cls(replace(sampling, seed=0), barred.shape)


@dataclass
class _Choice:
    """What the next tokens are chosen by. Tensors stay where they are, for recordings know them by their addresses."""

    tokens: Tensor  # (batch,): the last that were chosen
    rows: Tensor  # (batch,): which number stands for each sequence in the random numbers
    counter: Tensor  # (): how many tokens were chosen before, and the seed
    first: Tensor  # (): what the counter began with
    bars: Bars
    seen: Tensor | None = None  # (batch, vocabulary): which tokens have occurred; made for the first repetition penalty

    def begin(
        self, prompts: list[list[int]], vocabulary: int, sampling: Sampling, occurred: list[list[int]], barred: Barred
    ) -> None:  # fmt: skip
        # Equal prompts get answers of their own, others the one that they would get alone.
        again = [prompts[:at].count(prompt) for at, prompt in enumerate(prompts)]
        if any(again):
            self.rows.copy_(torch.tensor(again))
        else:
            self.rows.zero_()  # a copy from the host would wait for the prompts
        self.counter.fill_(first_count(sampling.seed))
        self.first.copy_(self.counter)
        self.bars.begin(barred, vocabulary, occurred)
        if sampling.repetition_penalty != 1:
            if self.seen is None or self.seen.shape[1] != vocabulary:  # which may have grown
                with torch.inference_mode(False):
                    self.seen = torch.empty((len(prompts), vocabulary), dtype=torch.bool, device=self.tokens.device)
            self.seen.zero_()
            for at, each in enumerate(occurred):
                self.seen[at, each] = True

    def choose(self, logits: Tensor, kind: Kind) -> Tensor:
        seen = self._seen(kind.sampling)
        logits = self.bars.without(logits, self.counter - self.first, kind.barred)
        draw(logits, kind.sampling, self.counter, self.rows, seen, self.tokens)
        if seen is not None:
            seen.scatter_(1, self.tokens[:, None], True)
        self.bars.follow(self.tokens, kind.barred)
        self.counter.add_(1)
        return self.tokens

    def changed(self, kind: Kind) -> list[Tensor]:
        """What `choose` changes."""
        seen = self._seen(kind.sampling)
        return [self.tokens, self.counter, *self.bars.changed(kind.barred), *([] if seen is None else [seen])]

    def _seen(self, sampling: Sampling) -> Tensor | None:
        return None if sampling.repetition_penalty == 1 else self.seen


@dataclass
class _Room:
    """Slots for so many sequences, the tokens that go into them next, and the functions that put them there.

    None of the functions refers to the room: a circle would hold its memory until the garbage collector comes by.
    """

    slots: Slots
    choice: _Choice
    logits: Callable[[], Tensor]  # behind the tokens that were chosen; the places move on
    likeliest: Recorded  # the same, and the likeliest token becomes the next one
    sent: Iterator[Sent]  # two by turns: one is written while the other is still to be read
    # The same for tokens chosen otherwise; the last ones used, in that order.
    sampled: dict[Kind, Recorded] = field(default_factory=dict)
    shift: Tensor | None = None  # (batch,): how far positions are from places, where somebody has said so
    bare: Recorded | None = None
    # By their padded length; the last ones used, in that order.
    prompts: dict[int, _Prompts] = field(default_factory=dict)

    def behind(self) -> Tensor:
        """The logits behind the tokens, for somebody else to choose by; the next call's come into the same memory."""
        if self.bare is None:
            self.bare = Recorded(self.logits, [self.slots.places])
        return self.bare()

    def recorded(self, kind: Kind) -> Recorded:
        """A step that ends with the next tokens, chosen like this."""
        greedy = kind.sampling.greedy and kind.sampling.repetition_penalty == 1
        if greedy and kind.barred == NOTHING:
            return self.likeliest
        self.sampled[kind] = found = self.sampled.pop(kind, None) or self._sampled(kind)
        if len(self.sampled) > SAMPLED:
            del self.sampled[next(iter(self.sampled))]
        return found

    def _sampled(self, kind: Kind) -> Recorded:
        choice, logits = self.choice, self.logits
        return Recorded(lambda: choice.choose(logits(), kind), [self.slots.places, *choice.changed(kind)])

    def prompts_of(self, length: int, prompt: Callable[..., Any]) -> _Prompts | None:
        """Those of a length that comes again; None if it does not yet, or cannot be recorded."""
        self.prompts[length] = found = self.prompts.pop(length, None) or _Prompts(self.slots, length, prompt)
        if len(self.prompts) > LENGTHS:
            del self.prompts[next(iter(self.prompts))]
        found.times += 1
        return found if found.times > BEFORE and found.fails is None else None

    def send(self) -> Sent:
        """The tokens. Those sent before may still be unread, but no earlier ones."""
        return next(self.sent).send(self.choice.tokens)

    def forget(self) -> None:
        for each in (self.likeliest, self.bare, *self.sampled.values()):
            if each is not None:
                each.forget()
        for prompts in self.prompts.values():
            prompts.recorded.forget()
            prompts.times = 0


class _Prompts:
    """The prompts of a room, padded to one length, in memory that stays: how they are read can be recorded."""

    def __init__(self, slots: Slots, length: int, prompt: Callable[..., Any]) -> None:
        batch, places = len(slots.places), slots.places
        with torch.inference_mode(False):
            # One tensor, and so one copy from the host: the tokens of all, then how many of each count.
            self.given = torch.zeros(batch * (length + 1), dtype=torch.int64, device=places.device)
        self.length = length
        tokens, lengths = self.given[: batch * length].view(batch, length), self.given[batch * length :]

        def read() -> Tensor:
            logits: Tensor
            logits, keys, values = prompt(tokens, lengths - 1)
            if not slots.hold(keys, values):
                raise CodettaError("the model's keys and values are of another kind than they were")
            slots.put(slice(None), keys, values, lengths)
            return logits

        self.recorded = Recorded(read, [places])
        self.times = 0  # that prompts of this length have come
        self.fails: str | None = None  # why they cannot be recorded

    def __call__(self, prompts: list[list[int]]) -> Tensor:
        """The logits behind each, with keys and values in slots; the next call's come into the same memory."""
        numbers = [token for each in prompts for token in (*each, *[0] * (self.length - len(each)))]
        self.given.copy_(torch.tensor([*numbers, *map(len, prompts)]))
        return self.recorded()


class _Weights:
    """Parameters and buffers as recordings have read them."""

    def __init__(self, model: nn.Module) -> None:
        tensors = _tensors(model)
        self.refs = [weakref.ref(each) for each in tensors]
        self.states, self.backwards = [state_of(each) for each in tensors], backwards.count
        self.counted = not any(
            each.is_inference() for each in tensors
        )  # where nobody counts versions, everything is looked at anew
        self.which = list(range(len(tensors)))
        self.addresses = addresses_of(tensors, self.which)

    def are_there(self) -> bool:
        """Whether all of them are in memory, where they were: what reads them does no harm."""
        tensors = [each() for each in self.refs]
        there = self.counted and all(each is not None for each in tensors)
        return there and lie_at(tensors, self.addresses, self.which)

    def hold(self, model: nn.Module) -> bool:
        """Whether they still are the model's, and unchanged."""
        tensors = _tensors(model)
        if self.backwards != backwards.count:  # an optimiser may have followed, whose writes nobody counts
            return False
        return len(tensors) == len(self.refs) and all(
            ref() is each and state_of(each) == state
            for ref, each, state in zip(self.refs, tensors, self.states, strict=True)
        )


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


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
        # What is recorded here as a whole needs no recordings of parts.
        self.prompt = compile(self.causal.prompt, options=replace(self.options, graphs="off"))
        self.pool: Any = None  # memory of the recordings of prompts, which never run at the same time
        self.turns: dict[
            tuple[int, bool], Callable[..., Tensor]
        ] = {}  # by batch, and whether positions are shifted; the last ones used
        self.rooms: list[_Room] = []  # of the last calls, the current one last
        self.current: _Room | None = None
        self.recorded: Recorded | None = None
        self.weights: _Weights | None = None
        # Whether a step is to be launched before the last one's tokens are read. A CPU would gain nothing by it.
        self.ahead = self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        return next(self.causal.model.parameters()).device

    def hold(self, batch: int, tokens: int) -> None:
        """Have room for so many tokens of so many sequences from the next call on. Rooms are of a few sizes, and one that is there and
        large enough will do: a step is bound and recorded for its room."""
        there = [each.slots.context for each in self.rooms if len(each.slots.places) == batch]
        fitting = [context for context in there if context >= tokens]
        self.context = min(min(fitting) if fitting else max(LEAST, 1 << (tokens - 1).bit_length()), self.most)

    @torch.no_grad()
    def begin(
        self, prompts: list[list[int]], sampling: Sampling, occurred: list[list[int]] | None = None,
        barred: Barred | None = None,
    ) -> Sent:  # fmt: skip
        """The first token of each sequence. occurred: the tokens before it, as a repetition penalty and words that are barred count them,
        if those are not the prompts."""
        barred = barred or Barred()
        logits = self.read(prompts)
        room = self.current
        assert room is not None
        kind = Kind.of(sampling, barred)
        room.choice.begin(prompts, logits.shape[1], sampling, occurred or prompts, barred)
        room.choice.choose(logits, kind)
        self.recorded = room.recorded(kind)
        return room.send()

    @torch.no_grad()
    def read(self, prompts: list[list[int]]) -> Tensor:
        """The logits behind each prompt, with its keys and values in the slot of its number."""
        logits = self._read_again(prompts)
        return self._read(prompts) if logits is None else logits

    def _read_again(self, prompts: list[list[int]]) -> Tensor | None:
        """By a recording, if there are as many prompts of the same padded length as before; None if not."""
        length = padded(max(map(len, prompts)), self.context)
        room = self._fitting(len(prompts)) if len(prompts) * length <= RECORDED else None
        if room is None or self.options.graphs == "off" or self._has_moved():
            return None
        found = room.prompts_of(length, self.prompt)
        if found is None:
            return None
        self._take(room)
        if found.recorded.is_there:
            logits = found(prompts)
            # The host looks while the device reads: where parameters have changed, all is read once more.
            return None if self._look_at_parameters() else logits
        self._look_at_parameters()
        found.recorded.pool = self._pool()
        try:
            return found(prompts)
        except Exception as error:  # such as a model that waits for the device: it can be called, and no more
            found.fails = f"{type(error).__name__}: {error}"
            return None

    def _pool(self) -> Any:
        """Memory for one more recording of prompts: that of the others. PyTorch refuses a pool whose last recording is gone."""
        others = [each.recorded for room in self.rooms for each in room.prompts.values()]
        if self.device.type == "cuda" and not any(each.is_there for each in others):
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool

    def _read(self, prompts: list[list[int]]) -> Tensor:
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
            room.slots.put(slice(None) if order is None else list(rows), keys, values, last + 1)
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
        fitting = self._fitting(batch, shifted)
        if fitting is not None:
            return self._take(fitting)
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

    def _fitting(self, batch: int, shifted: bool = False) -> _Room | None:
        for each in self.rooms:
            same = len(each.slots.places) == batch and each.slots.context == self.context
            if same and (each.shift is not None) == shifted:
                return each
        return None

    def _take(self, room: _Room) -> _Room:
        """Have it the current one."""
        self.rooms = [*(other for other in self.rooms if other is not room), room]
        self.current = room
        return room

    def _furnished(self, slots: Slots, shifted: bool) -> _Room:
        shift = torch.zeros_like(slots.places) if shifted else None
        turn = self._compiled(len(slots.places), shifted)
        tokens, places = torch.zeros_like(slots.places), slots.places
        inside = torch.zeros_like(places)  # places, the last one for all that are past it
        slots.only_context_varies(tokens, inside, *([] if shift is None else [shift]))
        choice = _Choice(
            tokens, torch.zeros_like(places), torch.zeros_like(places[0]), torch.zeros_like(places[0]), Bars(len(places), places.device)
        )  # fmt: skip

        def logits() -> Tensor:
            torch.clamp(places, max=slots.context - 1, out=inside)
            found = turn(tokens, inside, slots.keys, slots.values, shift)
            places.add_(1)
            return found

        def likeliest() -> Tensor:
            return likeliest_of(logits(), tokens)

        sent = cycle([Sent(tokens), Sent(tokens)])
        return _Room(slots, choice, logits, Recorded(likeliest, [places, tokens]), sent, shift=shift)

    def _compiled(self, batch: int, shifted: bool) -> Callable[..., Tensor]:
        """A step of so many sequences, for rooms of every size. Each batch has a compilation of its own."""
        key = batch, shifted
        made = self.turns.pop(key, None) or compile(self.causal.turn, options=self.options, dynamic=True)
        self.turns[key] = made
        if len(self.turns) > TURNS:
            del self.turns[next(iter(self.turns))]
        return made

    def _has_moved(self) -> bool:
        """Whether what recordings read may be no more, or elsewhere. Much faster than looking for all changes."""
        return self.device.type == "cuda" and (self.weights is None or not self.weights.are_there())

    def _look_at_parameters(self) -> bool:
        """Recordings read what was made of parameters and buffers; they are made anew when those have changed or are others, which is
        returned."""
        if self.device.type != "cuda":  # where nothing is recorded
            return False
        if self.weights is not None and self.weights.hold(self.causal.model):
            return False
        self.weights = _Weights(self.causal.model)
        for each in self.rooms:
            each.forget()
        return True
