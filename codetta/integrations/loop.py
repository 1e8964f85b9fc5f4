"""The loop of Hugging Face's `generate` (transformers 5.17, `GenerationMixin._sample`) over a Decoder.

A call whose processors are settings of Sampling and that ends by length or end tokens alone goes the short way: the choice is part of a
step. All others go the way that Hugging Face goes: its processors, its choice and its criteria, on the device, with one look of the host
at each step, and on a GPU with the next step under way meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from codetta.decode import Sent
from codetta.errors import ArgumentError, Reason
from codetta.generate import Generator
from codetta.integrations import caches
from codetta.integrations.processors import Settings, settings_of

# What a call may bring along for the model, beside tokens and what is None or False.
KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "tokenizer"}


class NoRoomError(Exception):
    """Nothing has been done yet, and nothing can be."""

    def __init__(self, reasons: list[Reason]) -> None:
        self.reasons = reasons


@dataclass
class Call:
    """What `_sample` is called with."""

    model: Any  # a plain one
    ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    synced: bool
    streamer: Any
    named: dict[str, Any]

    @classmethod
    def of(
        cls, model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, streamer: Any = None, **named: Any,
    ) -> Call:  # fmt: skip
        return cls(
            model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, named
        )

    @property
    def cache(self) -> Any:
        return self.named.get("past_key_values")

    @cached_property
    def past(self) -> int:
        return caches.length_of(self.cache)

    @cached_property
    def mask(self) -> Tensor:
        """Which columns are seen, on the host: those of the cache and of the tokens."""
        given = self.named.get("attention_mask")
        if given is None:
            return torch.ones(self.ids.shape[0], max(self.past, self.ids.shape[1]), dtype=torch.bool)
        return given.bool().cpu()

    @cached_property
    def is_padded_left(self) -> bool:
        """Whether every sequence ends in the last column and has no holes."""
        mask = self.mask
        return bool(mask[:, -1].all()) and not bool((mask[:, :-1] & ~mask[:, 1:]).any())

    @cached_property
    def has_usual_positions(self) -> bool:
        given = self.named.get("position_ids")
        if given is None:
            return True
        usual = (self.mask.long().cumsum(-1) - 1).masked_fill(~self.mask, 0)
        return given.shape[-1] == usual.shape[1] and bool((given.cpu() == usual).all())

    @property
    def tokens(self) -> int:
        """How many are generated at most."""
        return int(self.criteria.max_length) - self.ids.shape[1]

    @property
    def is_returned(self) -> bool:
        """Whether somebody sees the cache afterwards."""
        return bool(self.config.return_dict_in_generate) or bool(getattr(self.cache, "_is_user_defined", False))

    @property
    def longest(self) -> int:
        """Places that the longest sequence needs."""
        return int(self.mask.sum(1).max()) + self.tokens


def why_not(call: Call) -> list[Reason]:
    """Why the loop cannot be ours; empty if it can."""
    model, config = call.model, call.config
    if model.config.is_encoder_decoder:
        return [Reason("a decoder alone", "the model has an encoder")]
    if model.training:
        return [Reason("a model in eval mode", "this one is training")]
    if call.synced:
        return [Reason("one process", "processes wait for each other (synced_gpus)")]
    if not call.named.get("use_cache"):
        return [Reason("a cache", "use_cache is False")]
    if config.output_attentions or config.output_hidden_states:
        return [Reason("tokens and scores", "attentions or hidden states are asked for")]
    if config.prefill_chunk_size is not None or config.is_assistant:
        return [Reason("prompts at once", "prefill_chunk_size, or the model is an assistant")]
    others = sorted(
        name for name, value in call.named.items() if name not in KNOWN and value is not None and value is not False
    )
    if others:
        return [Reason("tokens alone", f"{', '.join(others)} go to the model")]
    if not call.ids.shape[1] or call.criteria.max_length is None or call.tokens < 1:
        return [Reason("a prompt and a length", f"{call.ids.shape[1]} tokens, up to {call.criteria.max_length}")]
    return _why_not_mask(call) + _why_not_cache(call)


def _why_not_mask(call: Call) -> list[Reason]:
    mask, (batch, length) = call.mask, call.ids.shape
    rule = "a mask of the tokens"
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] not in (length, call.past + length):
        return [Reason(rule, f"it is {tuple(mask.shape)} for tokens {batch}, {length} and {call.past} before them")]
    if mask.shape[1] <= call.past or (not call.past and mask.shape[1] != length):
        return [Reason(rule, f"it has {mask.shape[1]} columns, the cache {call.past}")]
    if not bool(mask.any(1).all()):
        return [Reason(rule, "it shows nothing of a sequence")]
    usual = call.is_padded_left and call.has_usual_positions
    text = call.model.config.get_text_config()
    if not usual and getattr(text, "sliding_window", None):
        return [Reason("a window over neighbours", "the mask has holes, or padding on the right")]
    return []


def _why_not_cache(call: Call) -> list[Reason]:
    most = getattr(call.model.config.get_text_config(), "max_position_embeddings", None)
    columns = call.mask.shape[1] + call.tokens
    if most is not None and max(columns, call.longest) > most:
        return [Reason("a position for each token", f"{columns} tokens, {most} positions")]
    if call.cache is None:
        return [Reason("a cache", "there is none")]
    return caches.why_not(call.cache, columns - 1 if call.is_returned else 0, call.ids.shape[0])


def run(call: Call, generator: Generator) -> Any:
    """The answer, in the form that is asked for."""
    fresh = not call.past and call.is_padded_left and call.has_usual_positions
    generator.decoder.hold(call.ids.shape[0], call.longest)
    settings = _settings(call) if fresh else None
    loop: _Short | _Loop = _Loop(call, generator, fresh) if settings is None else _Short(call, generator, settings)
    with generator.lock:
        sequences = loop.sequences()
        if call.streamer is not None:
            call.streamer.end()
        if call.is_returned:
            loop.leave(sequences.shape[1] - call.ids.shape[1] - 1)
    if not call.config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(
        sequences=sequences, scores=loop.scores, logits=loop.logits, past_key_values=call.cache
    )


class _Base:
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None

    def __init__(self, call: Call, generator: Generator) -> None:
        self.call, self.generator, self.decoder = call, generator, generator.decoder
        self.lengths = [int(each) for each in call.mask.sum(1)]  # places that are taken before the first new token

    @property
    def prompts(self) -> list[list[int]]:
        return [row[those].tolist() for row, those in zip(self.call.ids.cpu(), self.call.mask, strict=True)]

    def leave(self, count: int) -> None:
        """Put into the cache of the call what it has not seen, with `count` new tokens that were read."""
        room = self.decoder.current
        assert room is not None
        if length_of_cache := caches.length_of(self.call.cache):
            assert length_of_cache == self.call.mask.shape[1]
            caches.leave(self.call.cache, room.slots, self.lengths, [0] * len(self.lengths), count)
        else:
            columns = self.call.mask.shape[1]
            starts = [columns - each for each in self.lengths]
            caches.leave(self.call.cache, room.slots, [0] * len(starts), starts, columns + count)


class _Short(_Base):
    """The choice in the step itself; the host reads tokens."""

    def __init__(self, call: Call, generator: Generator, settings: Settings) -> None:
        super().__init__(call, generator)
        self.settings = settings

    def sequences(self) -> Tensor:
        call, batch = self.call, self.call.ids.shape[0]
        ends, pad = _ends(call.criteria), call.config._pad_token_tensor
        pad = 0 if pad is None else int(pad)
        going, made = set(range(batch)), []
        most = [call.tokens] * batch
        rounds = self.generator.rounds(
            self.prompts, most, going, self.settings.sampling, self._occurred(), self.settings.barred
        )
        try:
            # Whoever has ended gets padding; so everybody gets as many tokens as the longest.
            for chosen in rounds:
                row = [chosen[at] if at in going else pad for at in range(batch)]
                made.append(row)
                if call.streamer is not None:
                    call.streamer.put(torch.tensor(row))
                going -= {at for at in going if row[at] in ends}
                if len(made) == call.tokens:
                    going.clear()
        except ArgumentError as error:
            if made:
                raise
            raise NoRoomError([Reason("room for the cache", error.problem)]) from error
        new = torch.tensor(made, dtype=call.ids.dtype, device=call.ids.device)
        return torch.cat([call.ids, new.t()], 1)

    def _occurred(self) -> list[list[int]] | None:
        """Padding has occurred, too."""
        return None if bool(self.call.mask.all()) else self.call.ids.tolist()


class _Loop(_Base):
    """Hugging Face's processors, choice and criteria."""

    def __init__(self, call: Call, generator: Generator, fresh: bool) -> None:
        super().__init__(call, generator)
        self.fresh = fresh
        wanted = call.config.return_dict_in_generate
        self.scores = () if wanted and call.config.output_scores else None
        self.logits = () if wanted and call.config.output_logits else None

    def sequences(self) -> Tensor:
        call, ids = self.call, self.call.ids
        pads = any(hasattr(each, "eos_token_id") for each in call.criteria)
        going = torch.ones(ids.shape[0], dtype=torch.long, device=ids.device)
        logits = self._read()
        room = self.decoder.current
        assert room is not None
        sent = Sent(torch.empty(ids.shape[0] + 1, dtype=torch.int64, device=room.slots.places.device))
        ahead = False  # of the first token: it waits for nothing, and the first step may have to be compiled
        while True:
            raw = logits.to(copy=True, dtype=torch.float32, device=ids.device)
            scores = call.processors(ids, raw)
            if self.scores is not None:
                self.scores += (scores,)
            if self.logits is not None:
                self.logits += (raw,)
            if call.config.do_sample:
                chosen = torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
            else:
                chosen = scores.argmax(-1)
            if pads:
                chosen = chosen * going + call.config._pad_token_tensor.to(ids.device) * (1 - going)
            ids = torch.cat([ids, chosen[:, None]], dim=-1)
            going = going & ~call.criteria(ids, self.scores)
            room.choice.tokens.copy_(chosen)
            last = ids.shape[1] >= call.criteria.max_length
            # The device goes on while the host looks. A step too many does no harm: nobody hears it.
            sent.send(torch.cat([room.choice.tokens, (going.max() == 0)[None].to(room.choice.tokens)]))
            if ahead and not last:
                logits = room.behind()
            *tokens, ended = sent.read()
            if call.streamer is not None:
                call.streamer.put(torch.tensor(tokens))
            if ended:
                return ids
            if not ahead or last:
                logits = room.behind()
            ahead = self.decoder.ahead

    def _read(self) -> Tensor:
        """The logits behind the prompts, which are in their slots then."""
        call = self.call
        try:
            if self.fresh:
                return self.decoder.read(self.prompts)
            room = self.decoder.placed(call.ids.shape[0], call.model)
        except ArgumentError as error:
            raise NoRoomError([Reason("room for the cache", error.problem)]) from error
        # By the model itself, as it would without us: with a cache from before, with padding in other places.
        out = call.model._prefill(call.ids, call.config, call.named, is_first_iteration=True)
        self.lengths = caches.put(room.slots, call.cache, call.mask)
        given = call.named.get("position_ids")
        next_place = torch.tensor(self.lengths) if given is None else (given[:, -1].cpu() + 1).expand(len(self.lengths))
        assert room.shift is not None
        room.shift.copy_(next_place - torch.tensor(self.lengths))
        logits: Tensor = out.logits[:, -1]
        return logits


def _ends(criteria: Any) -> set[int]:
    found = [each.eos_token_id for each in criteria if hasattr(each, "eos_token_id")]
    return {token for each in found for token in each.tolist()}


def _settings(call: Call) -> Settings | None:
    """How a step chooses, where it can, and nobody wants to see scores."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    config = call.config
    if config.return_dict_in_generate and (config.output_scores or config.output_logits):
        return None
    if not {type(each) for each in call.criteria} <= {EosTokenCriteria, MaxLengthCriteria}:
        return None
    if call.is_returned and call.ids.shape[0] > 1 and _ends(call.criteria):
        return None  # whoever has ended leaves padding in the cache
    vocabulary = call.model.config.get_text_config().vocab_size
    found = settings_of(call.processors, call.ids.shape[1], vocabulary, bool(config.do_sample))
    if found is not None and config.do_sample:
        found.sampling = replace(found.sampling, seed=int(torch.randint(2**62, ())))
    return found
