"""Generator: text from a language model, token by token, for one prompt or several.

    prompts --prompt--> keys and values in slots --step, choose--> tokens --pieces--> text

Each prompt is read by itself, whatever its length; then all sequences take each step together, every one at its own place. What a sequence
yields does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from codetta.errors import ArgumentError
from codetta.integrations.dynamo import backend_of, compile
from codetta.integrations.huggingface import Causal, Slots
from codetta.options import Options
from codetta.sampling import Sampling, choose
from codetta.text import Text

Prompt = str | Sequence[int] | Tensor


@dataclass
class Generated:
    """One prompt and what came of it. reason: why it ended: "stop" (a stop string), "end" (the model's end token), "length" (as many
    tokens as were asked for), or "context" (the cache is full); None while it goes on, or if nobody waited for the end."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Piece:
    """What one step brought: a token of one sequence, and the text that is certain by now."""

    sequence: int
    token: int
    text: str
    reason: str | None = None


class Generator:
    """A causal language model of Hugging Face's that continues prompts.

        generator = codetta.Generator(model, tokenizer)
        print(generator("Once upon a time", tokens=64).text)
        for piece in generator.stream("Once upon a time"):
            print(piece.text, end="", flush=True)

    tokenizer: for prompts and stop strings that are text; without one, prompts are token numbers. context: how many tokens of a
    sequence are kept, prompt and answer together.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any = None, *, context: int | None = None, options: Options | None = None
    ) -> None:
        self.causal, self.tokenizer = Causal(model), tokenizer
        most = getattr(self.causal.config, "max_position_embeddings", None) or 4096
        self.context = min(4096, most) if context is None else context
        if not 1 < self.context <= most:
            raise ArgumentError(
                "context", f"is {self.context}, the model has positions for {most}", f"pass 2 to {most} tokens"
            )
        known = backend_of(model)
        self.options = options or (known.options if known is not None else Options())
        self._prompt = compile(self.causal.prompt, options=self.options)
        self._slots: dict[int, tuple[Slots, Any]] = {}
        self._ends = _ends(model)

    def __call__(
        self, prompt: Prompt | Sequence[Prompt], *, tokens: int = 256, stop: str | Sequence[str] = (), **sampling: Any
    ) -> Any:
        """The whole answer: a Sequence for a prompt, a list of them for several."""
        prompts, alone = self._prompts(prompt)
        made = [Generated(each) for each in prompts]
        for piece in self._pieces(prompts, tokens, stop, sampling):
            one = made[piece.sequence]
            one.tokens.append(piece.token)
            one.text = None if self.tokenizer is None else (one.text or "") + piece.text
            one.reason = piece.reason
        return made[0] if alone else made

    def stream(
        self, prompt: Prompt | Sequence[Prompt], *, tokens: int = 256, stop: str | Sequence[str] = (), **sampling: Any
    ) -> Iterator[Piece]:
        """The answer piece by piece, as it comes."""
        prompts, _ = self._prompts(prompt)
        return self._pieces(prompts, tokens, stop, sampling)

    # ---- what is asked

    def _prompts(self, prompt: Prompt | Sequence[Prompt]) -> tuple[list[list[int]], bool]:
        several = isinstance(prompt, Tensor) and prompt.dim() == 2
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            several = any(isinstance(each, str | Sequence | Tensor) for each in prompt)
        given: list[Any] = list(prompt) if several else [prompt]
        found = [self._numbers(each) for each in given]
        if not found:
            raise ArgumentError("prompt", "is an empty list", "pass one prompt or several")
        for each in found:
            if not each:
                raise ArgumentError("prompt", "is empty", "pass at least one token, such as the tokenizer's bos_token")
            if len(each) >= self.context:
                raise ArgumentError(
                    "prompt", f"has {len(each)} tokens, the cache holds {self.context} with the answer",
                    "shorten it, or make the Generator with a larger context",
                )  # fmt: skip
        return found, not several

    def _numbers(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ArgumentError("prompt", "is text", "make the Generator with a tokenizer, or pass token numbers")
            return list(self.tokenizer(prompt)["input_ids"])
        numbers = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        vocabulary = self.causal.config.vocab_size
        for each in numbers:
            if not _is_number(each) or not 0 <= each < vocabulary:
                raise ArgumentError("prompt", f"has {each!r} in it", f"pass whole numbers from 0 to {vocabulary - 1}")
        return numbers

    def _stops(self, stop: str | Sequence[str]) -> list[str]:
        found = [stop] if isinstance(stop, str) else list(stop)
        if found and self.tokenizer is None:
            raise ArgumentError("stop", "is text", "make the Generator with a tokenizer")
        if "" in found:
            raise ArgumentError("stop", "has an empty string in it", "pass strings of at least one character")
        return found

    # ---- what is done

    def _pieces(
        self, prompts: list[list[int]], tokens: int, stop: str | Sequence[str], settings: dict[str, Any]
    ) -> Iterator[Piece]:
        if not _is_number(tokens) or tokens < 1:
            raise ArgumentError("tokens", f"is {tokens!r}", "pass how many tokens to generate at most, 1 or more")
        try:
            sampling = Sampling(**settings)
        except TypeError as error:
            raise ArgumentError("sampling", str(error), "pass settings of codetta.Sampling") from None
        stops = self._stops(stop)
        # Everything is checked when it is asked for, not when the first piece is.
        return self._run(prompts, tokens, stops, sampling)

    @torch.no_grad()
    def _begin(self, prompts: list[list[int]]) -> tuple[Slots, Any, Tensor]:
        """The prompts' keys and values in their slots, a function for a step, and the logits behind each prompt."""
        device = next(self.causal.model.parameters()).device
        logits = []
        for slot, prompt in enumerate(prompts):
            found, keys, values = self._prompt(torch.tensor([prompt], device=device))
            slots, step = self._room(len(prompts), keys, values)
            slots.put(slot, keys, values)
            logits.append(found)
        return slots, step, torch.cat(logits)

    def _room(self, batch: int, keys: list[Tensor], values: list[Tensor]) -> tuple[Slots, Any]:
        """Slots for so many sequences, and a function for a step of them; those of the last call, if they fit."""
        if batch not in self._slots:
            self._slots.clear()
            try:
                slots = self.causal.slots(batch, self.context, keys, values)
            except torch.OutOfMemoryError:
                need = (
                    sum(each[0, :, 0].numel() * each.element_size() for each in [*keys, *values]) * batch * self.context
                )
                raise ArgumentError(
                    "context", f"{self.context} tokens for {batch} sequences need {need / 2**30:.1f} GiB of cache, which are not there",
                    "lower context, or pass fewer prompts at once",
                ) from None  # fmt: skip
            self._slots[batch] = slots, compile(self.causal.step(slots), options=self.options, dynamic=False)
        return self._slots[batch]

    def _run(self, prompts: list[list[int]], tokens: int, stops: list[str], sampling: Sampling) -> Iterator[Piece]:
        slots, step, logits = self._begin(prompts)
        count, device = len(prompts), logits.device
        texts = [Text(self.tokenizer, stops) for _ in prompts]
        going = set(range(count))
        rows = torch.arange(count, device=device)
        # Equal prompts get answers of their own, others the one that they would get alone.
        again = torch.tensor([prompts[:at].count(prompt) for at, prompt in enumerate(prompts)], device=device)
        seen = self._seen(prompts, logits) if sampling.repetition_penalty != 1 else None
        for number in range(tokens):
            with torch.no_grad():
                chosen = choose(logits, sampling, torch.full((), number, device=device), again, seen)
                if seen is not None:
                    seen[rows, chosen] = True
            for at, token in enumerate(chosen.tolist()):
                if at not in going:
                    continue
                reason = self._reason(token, number + 1, tokens, len(prompts[at]))
                text, stopped = texts[at].add(token, last=reason is not None)
                reason = "stop" if stopped else reason
                if reason is not None:
                    going.discard(at)
                yield Piece(at, token, text, reason)
            if not going:
                return
            with torch.no_grad():
                # Sequences that have ended go on in their slots, unheard, as long as there is room.
                places = slots.places.clamp(max=slots.context - 1)
                logits = step(chosen, places)
                slots.places += 1

    def _reason(self, token: int, made: int, wanted: int, prompt: int) -> str | None:
        if token in self._ends:
            return "end"
        if made >= wanted:
            return "length"
        return "context" if prompt + made >= self.context else None

    def _seen(self, prompts: list[list[int]], logits: Tensor) -> Tensor:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for at, prompt in enumerate(prompts):
            seen[at, prompt] = True
        return seen


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ends(model: nn.Module) -> set[int]:
    """Tokens behind which there is nothing more to say."""
    config = getattr(model, "generation_config", None) or model.config
    found = getattr(config, "eos_token_id", None)
    return set() if found is None else {found} if isinstance(found, int) else set(found)
