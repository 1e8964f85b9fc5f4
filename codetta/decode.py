"""Decoder: sequences in slots that take each step together, every one at its own place.

begin   reads prompts, each by itself, whatever its length, and puts their keys and values into slots
turn    one more token for each sequence, on the device from end to end; on a GPU a recording is replayed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from codetta.errors import ArgumentError
from codetta.integrations.dynamo import backend_of, compile
from codetta.integrations.huggingface import Causal, Slots
from codetta.options import Options
from codetta.runtime.recorded import Recorded
from codetta.runtime.sized import state_of
from codetta.sampling import Sampling, choose
from codetta.sampling import likeliest as likeliest_of


@dataclass
class _Room:
    """Slots for so many sequences, the tokens that go into them next, and the functions that put them there."""

    slots: Slots
    tokens: Tensor  # (batch,)
    logits: Recorded  # behind those tokens; the places move on
    likeliest: Recorded  # the same, and the likeliest token becomes the next one
    step: Any  # as compiled


class Decoder:
    """A causal language model of Hugging Face's, with room for `context` tokens of each sequence."""

    def __init__(self, model: nn.Module, context: int | None = None, options: Options | None = None) -> None:
        self.causal = Causal(model)
        most = getattr(self.causal.config, "max_position_embeddings", None) or 4096
        self.context = min(4096, most) if context is None else context
        if not 1 < self.context <= most:
            raise ArgumentError(
                "context", f"is {self.context}, the model has positions for {most}", f"pass 2 to {most} tokens"
            )
        known = backend_of(model)
        self.options = options or (known.options if known is not None else Options())
        self.prompt = compile(self.causal.prompt, options=self.options)
        self.rooms: dict[int, _Room] = {}  # by how many sequences; the last one
        self.parameters: list[tuple[object, ...]] = []

    @property
    def device(self) -> torch.device:
        return next(self.causal.model.parameters()).device

    @torch.no_grad()
    def begin(self, prompts: list[list[int]], sampling: Sampling) -> Tensor:
        """The first token of each sequence."""
        self._look_at_parameters()
        logits = []
        for slot, prompt in enumerate(prompts):
            found, keys, values = self.prompt(torch.tensor([prompt], device=self.device))
            room = self.room(len(prompts), keys, values)
            room.slots.put(slot, keys, values)
            logits.append(found)
        # Equal prompts get answers of their own, others the one that they would get alone.
        again = [prompts[:at].count(prompt) for at, prompt in enumerate(prompts)]
        self.rows = torch.tensor(again, device=self.device)
        self.number = torch.zeros((), dtype=torch.int64, device=self.device)
        self.seen = _seen(prompts, logits[0]) if sampling.repetition_penalty != 1 else None
        self.current = room
        return self._choose(torch.cat(logits), sampling)

    @torch.no_grad()
    def turn(self, sampling: Sampling) -> Tensor:
        """The next token of each sequence; whoever has ended goes on unheard, as long as there is room."""
        if sampling.greedy and self.seen is None:
            return self.current.likeliest()
        return self._choose(self.current.logits(), sampling)

    def _choose(self, logits: Tensor, sampling: Sampling) -> Tensor:
        chosen = choose(logits, sampling, self.number, self.rows, self.seen)
        if self.seen is not None:
            self.seen.scatter_(1, chosen[:, None], True)
        self.number += 1
        return self.current.tokens.copy_(chosen)

    def room(self, batch: int, keys: list[Tensor], values: list[Tensor]) -> _Room:
        """That of the last call, if it fits."""
        if batch not in self.rooms:
            self.rooms.clear()
            try:
                slots = self.causal.slots(batch, self.context, keys, values)
            except torch.OutOfMemoryError:
                need = sum(each[0, :, 0].numel() * each.element_size() for each in [*keys, *values])
                raise ArgumentError(
                    "context", f"{self.context} tokens for {batch} sequences need {need * batch * self.context / 2**30:.1f} GiB of cache, "
                    "which are not there", "lower context, or pass fewer prompts at once",
                ) from None  # fmt: skip
            self.rooms[batch] = self._furnished(slots)
        return self.rooms[batch]

    def _furnished(self, slots: Slots) -> _Room:
        step = compile(self.causal.step(slots), options=self.options, dynamic=False)
        tokens = torch.zeros_like(slots.places)

        def logits() -> Tensor:
            found = step(tokens, slots.places.clamp(max=slots.context - 1))
            slots.places.add_(1)
            return found

        def likeliest() -> Tensor:
            return likeliest_of(logits(), tokens)

        kept = [slots.places, tokens]
        return _Room(slots, tokens, Recorded(logits, kept), Recorded(likeliest, kept), step)

    def _look_at_parameters(self) -> None:
        """Recordings read what was made of parameters; they are made anew when those have changed."""
        if self.device.type != "cuda":
            return
        now = [state_of(each) for each in self.causal.model.parameters()]
        if now != self.parameters:
            self.parameters = now
            for room in self.rooms.values():
                room.logits.forget()
                room.likeliest.forget()


def _seen(prompts: list[list[int]], logits: Tensor) -> Tensor:
    seen = torch.zeros(len(prompts), logits.shape[1], dtype=torch.bool, device=logits.device)
    for at, prompt in enumerate(prompts):
        seen[at, prompt] = True
    return seen
