"""Generator: text from a language model, token by token, for one prompt or several (decode.py makes the tokens)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from codetta.barring import Barred
from codetta.decode import Decoder, Sent
from codetta.errors import ArgumentError, CodettaError
from codetta.options import Options
from codetta.sampling import Sampling
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
    sequence are kept, prompt and answer together. Calls from several threads take turns; a stream that another call or stream has
    overtaken says so.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any = None, *, context: int | None = None, options: Options | None = None
    ) -> None:
        self.decoder, self.tokenizer = Decoder(model, context, options), tokenizer
        self._streams = 0  # that have begun
        self.lock = threading.RLock()  # whoever holds it has the decoder to himself
        self.ends = _ends(model)  # tokens behind which there is nothing more to say

    def __call__(
        self, prompt: Prompt | Sequence[Prompt], *, tokens: int = 256, stop: str | Sequence[str] = (), **sampling: Any
    ) -> Any:
        """The whole answer: one Generated for a prompt, a list of them for several."""
        prompts, alone = self._prompts(prompt)
        made = [Generated(each) for each in prompts]
        with self.lock:
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
            if len(each) >= self.decoder.context:
                raise ArgumentError(
                    "prompt", f"has {len(each)} tokens, the cache holds {self.decoder.context} with the answer",
                    "shorten it, or make the Generator with a larger context",
                )  # fmt: skip
        return found, not several

    def _numbers(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ArgumentError("prompt", "is text", "make the Generator with a tokenizer, or pass token numbers")
            return list(self.tokenizer(prompt)["input_ids"])
        numbers = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        vocabulary = self.decoder.causal.config.vocab_size
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

    def _run(self, prompts: list[list[int]], tokens: int, stops: list[str], sampling: Sampling) -> Iterator[Piece]:
        texts = [Text(self.tokenizer, stops) for _ in prompts]
        going = set(range(len(prompts)))
        most = [min(tokens, self.decoder.context - len(each)) for each in prompts]  # tokens that each can get
        for number, chosen in enumerate(self.rounds(prompts, most, going, sampling), 1):
            for at in sorted(going):
                token = chosen[at]
                reason = self._reason(token, number, tokens, len(prompts[at]))
                text, stopped = texts[at].add(token, last=reason is not None)
                reason = "stop" if stopped else reason
                if reason is not None:
                    going.discard(at)
                yield Piece(at, token, text, reason)

    def rounds(
        self, prompts: list[list[int]], most: list[int], going: set[int], sampling: Sampling,
        occurred: list[list[int]] | None = None, barred: Barred | None = None,
    ) -> Iterator[list[int]]:  # fmt: skip
        """What each step chose, for every sequence, until nobody is left in `going`, which the caller empties. Sequences that are not in
        it go on unheard. most: how many tokens each can get. occurred, barred: as for `Decoder.begin`."""
        with self.lock:
            self._streams += 1
            mine = self._streams
            coming = self.decoder.begin(prompts, sampling, occurred, barred)
            chosen = coming.read()  # waits for nothing else: the first step may have to be compiled
            ahead: Sent | None = None
        for number in itertools.count(2):
            yield chosen
            if not going:
                return
            with self.lock:
                if mine != self._streams:
                    raise CodettaError(
                        "another stream of this Generator has begun: make one for each that run side by side"
                    )
                coming = ahead or self.decoder.turn()
                # The device goes on while the host reads. Where what it reads is the end of all, the step was for nothing and does no
                # harm: nobody hears it, a place without room is the last one again, and the next call's prompts set tokens and places
                # anew.
                wanted = self.decoder.ahead and any(number < most[at] for at in going)
                ahead = self.decoder.turn() if wanted else None
                chosen = coming.read()

    def _reason(self, token: int, made: int, wanted: int, prompt: int) -> str | None:
        if token in self.ends:
            return "end"
        if made >= wanted:
            return "length"
        return "context" if prompt + made >= self.decoder.context else None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ends(model: nn.Module) -> set[int]:
    """As the model's configuration names them."""
    config = getattr(model, "generation_config", None) or model.config
    found = getattr(config, "eos_token_id", None)
    return set() if found is None else {found} if isinstance(found, int) else set(found)
