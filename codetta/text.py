"""Text out of tokens as they come: only what no later token can change, and nothing of a stop string."""

from __future__ import annotations

from typing import Any

OPEN = "\ufffd"  # how tokenizers write a character that is not complete yet
BEHIND = 8  # tokens before the new ones that are decoded again with them: spaces depend on what stands before


class Text:
    """The text of one sequence."""

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.tokens: list[int] = []
        self.known = 0  # tokens whose text is certain
        self.held = ""  # certain, but perhaps the beginning of a stop string

    def add(self, token: int, last: bool) -> tuple[str, bool]:
        """What can be shown now, and whether a stop string has ended the text. last: nothing will follow."""
        if self.tokenizer is None:
            return "", False
        self.tokens.append(token)
        self.held += self._certain(last)
        found = [at for at in (self.held.find(stop) for stop in self.stops) if at >= 0]
        if found:
            text, self.held = self.held[: min(found)], ""
            return text, True
        keep = 0 if last else self._could_stop()
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text, False

    def _certain(self, last: bool) -> str:
        """The text of the tokens that were not certain before, if it is now."""
        begin = max(0, self.known - BEHIND)
        before, now = (self._decode(self.tokens[begin:end]) for end in (self.known, len(self.tokens)))
        if now.endswith(OPEN) and not last:
            return ""
        self.known = len(self.tokens)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _could_stop(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        for size in range(min(longest, len(self.held)), 0, -1):
            if any(stop.startswith(self.held[-size:]) for stop in self.stops):
                return size
        return 0
