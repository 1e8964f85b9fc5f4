"""Generation: the tokens that Hugging Face's own loop would choose, alone and in a batch; text, stops, errors."""

from __future__ import annotations

import copy
import json
import runpy
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import codetta
from codetta.cli import app
from codetta.decode import BEFORE, LENGTHS, SAMPLED, SHORTEST, TOGETHER, Decoder, Kind, Sent, _Weights, padded
from codetta.integrations.huggingface import Causal
from codetta.runtime.recorded import WARM, Recorded
from codetta.runtime.sized import backwards
from codetta.sampling import Sampling, choose
from codetta.steps import Launch, Run
from codetta.text import Text

WINDOW = 32
COMMON: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "attn_implementation": "eager"},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
}
PROMPTS = [[17, 40, 5, 99, 23], [8, 8, 30, 71, 64, 12, 3, 90, 55], [101, 7]]


@cache
def model(name: str) -> nn.Module:
    """A small model with random weights, whose logits differ enough for no choice to hang on the last digit."""
    import transformers

    torch.manual_seed(0)
    given = MODELS[name]
    own = {"vocab_size": 120} if name == "GPT2" else COMMON
    config = getattr(transformers, f"{name}Config")(
        **own | {k: v for k, v in given.items() if k != "attn_implementation"}
    )
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    made = getattr(transformers, kind)._from_config(
        config, attn_implementation=given.get("attn_implementation", "sdpa")
    )
    made.generation_config.eos_token_id = None
    with torch.no_grad():
        for each in made.parameters():
            each.mul_(3.0)
    return made.eval()


@cache
def expected(name: str, prompt: tuple[int, ...], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model(name).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=0
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_hugging_faces(name: str) -> None:
    """256 tokens, over the border of a sliding window; then several prompts at once, each as if it were alone."""
    generator = codetta.Generator(model(name), context=300)
    assert generator(PROMPTS[0], tokens=256).tokens == expected(name, tuple(PROMPTS[0]), 256)
    together = generator(PROMPTS, tokens=40)
    assert [each.tokens for each in together] == [expected(name, tuple(each), 40) for each in PROMPTS]
    assert {each.reason for each in together} == {"length"}


def test_rows_are_written_where_the_cache_lies() -> None:
    generator = codetta.Generator(model("Llama"), context=64)
    generator(PROMPTS[0], tokens=4)
    room = generator.decoder.current
    slots, (executor,) = room.slots, generator.decoder.turns[1, False].backend.executors
    assert "copy_" not in executor.source and "index_put" not in executor.source
    # By the programs that make them, with the rotation in their epilogues: one for each layer, of keys and of values.
    appends = [len(step.appends) for step in executor.plan.steps if isinstance(step, Launch) and step.appends]
    assert appends == [2, 2]
    assert not any(isinstance(step, Run) and "append" in step.target.name for step in executor.plan.steps)
    assert int(slots.places[0]) == len(PROMPTS[0]) + 3
    assert slots.keys[0][0, :, : int(slots.places[0])].abs().amin() > 0
    assert not slots.keys[0][0, :, SHORTEST:].any()


def test_a_longer_context_needs_no_compilation() -> None:
    """A step is compiled for its batch; rooms of all sizes share it, with the same answers."""
    generator = codetta.Generator(model("Llama"), context=64)
    decoder, prompt = generator.decoder, tuple(PROMPTS[1])
    generator(prompt, tokens=4)
    backend = decoder.turns[1, False].backend
    for context in (80, 200, 333, 64):
        decoder.context = context
        tokens = context - len(prompt)
        assert generator(prompt, tokens=tokens).tokens == expected("Llama", prompt, 333 - len(prompt))[:tokens]
    assert len(decoder.rooms) == 4 and backend.graphs == len(backend.executors) == 1
    generator([prompt, prompt], tokens=2)
    assert set(decoder.turns) == {(1, False), (2, False)} and backend.graphs == 1


def test_explained() -> None:
    """A layer of a step is four programs and attention, and nothing is left over but the mask's arithmetic and the tables of positions."""
    report = codetta.explain_decode(model("Llama"), batch=3, context=64)
    assert sum(program.where.startswith("model.layers.0.") for program in report.programs) == 4
    assert len(report.calls) == 2
    cache = 2 * 2 * 3 * 2 * 64 * 16 * 4
    assert report.decode["cache_bytes"] == cache and 0 < report.decode["workspace_bytes"] < cache
    assert "3x2x64x16 float32" in str(report) and "a step of 3 sequences, 64 tokens" in str(report)
    assert not any("index" in each["op"] or "copy_" in each["op"] for each in report.leftover_ops)


def test_hugging_faces_own_loop_and_cache() -> None:
    """generate of a compiled model, with the cache that grows and with the one that does not."""
    import copy

    plain = model("Llama")
    compiled = codetta.compile(copy.deepcopy(plain))
    ids = torch.tensor([PROMPTS[1]])
    for kind in ("dynamic", "static"):
        out = compiled.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, cache_implementation=kind, pad_token_id=0
        )  # fmt: skip
        assert out[0, len(PROMPTS[1]) :].tolist() == expected("Llama", tuple(PROMPTS[1]), 12), kind


def test_hugging_faces_generate() -> None:
    """generate of a compiled model goes to a Generator where that can do it, and does what it did where it cannot."""
    import copy

    plain = copy.deepcopy(model("Llama"))
    plain.generation_config.eos_token_id = [expected("Llama", tuple(PROMPTS[0]), 12)[7]]
    compiled = codetta.compile(copy.deepcopy(plain))
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in PROMPTS])
    both = [each.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False) for each in (plain, compiled)]
    assert torch.equal(*both)
    generator = compiled._compiled_call_impl.generation.generator
    alone = torch.tensor([PROMPTS[1]])
    both = [each.generate(input_ids=alone, max_new_tokens=9, repetition_penalty=1.3) for each in (plain, compiled)]
    assert torch.equal(*both) and compiled._compiled_call_impl.generation.generator is generator
    torch.manual_seed(3)
    first = compiled.generate(alone, max_new_tokens=9, do_sample=True, temperature=2.0)
    second = compiled.generate(alone, max_new_tokens=9, do_sample=True, temperature=2.0)
    torch.manual_seed(3)
    assert torch.equal(compiled.generate(alone, max_new_tokens=9, do_sample=True, temperature=2.0), first)
    assert not torch.equal(first, second)
    with mock.patch.object(codetta.Generator, "__call__", side_effect=AssertionError):
        for how in (
            {"num_beams": 2},
            {"use_cache": False},
        ):
            torch.manual_seed(0)
            got = compiled.generate(alone, attention_mask=torch.ones_like(alone), max_new_tokens=9, **how)
            torch.manual_seed(0)
            want = plain.generate(alone, attention_mask=torch.ones_like(alone), max_new_tokens=9, **how)
            assert got.shape == want.shape, how
        again = copy.deepcopy(compiled).generate(alone, max_new_tokens=9, repetition_penalty=1.3)  # a plain one
        assert torch.equal(again, both[0])


def test_seeds() -> None:
    generator = codetta.Generator(model("Llama"), context=64)
    sample = lambda prompt, seed: generator(prompt, tokens=12, temperature=1.0, top_p=0.95, seed=seed)  # noqa: E731
    first = sample(PROMPTS[0], 1).tokens
    assert first == sample(PROMPTS[0], 1).tokens != sample(PROMPTS[0], 2).tokens
    together = sample([PROMPTS[0], PROMPTS[1], PROMPTS[0]], 1)
    assert together[0].tokens == first  # as alone
    assert together[2].tokens != first  # the same prompt, another answer
    penalised = generator(PROMPTS[0], tokens=40, repetition_penalty=1e6).tokens
    assert len({*penalised, *PROMPTS[0]}) == 40 + len(PROMPTS[0])  # nothing twice


def test_a_changed_weight_is_seen() -> None:
    import copy

    changed = copy.deepcopy(model("Llama"))
    generator = codetta.Generator(changed, context=64)
    before = generator(PROMPTS[0], tokens=8).tokens
    with torch.no_grad():
        changed.lm_head.weight.copy_(changed.lm_head.weight.roll(1, 0))
        changed.model.layers[0].input_layernorm.weight.mul_(0.5)
    fresh = codetta.Generator(copy.deepcopy(changed), context=64)
    assert generator(PROMPTS[0], tokens=8).tokens == fresh(PROMPTS[0], tokens=8).tokens != before


@pytest.mark.parametrize("ahead", [False, True])
def test_an_interrupted_stream_leaves_nothing_behind(ahead: bool) -> None:
    generator = codetta.Generator(model("Llama"), context=64)
    generator.decoder.ahead = ahead
    want = expected("Llama", tuple(PROMPTS[0]), 12)
    stream = generator.stream(PROMPTS[0], tokens=12)
    assert [next(stream).token for _ in range(5)] == want[:5]
    stream.close()
    assert generator(PROMPTS[0], tokens=12).tokens == want


@pytest.mark.parametrize("ahead", [False, True])
def test_two_streams_of_one_generator(ahead: bool) -> None:
    """The first is told so, and does nothing before that: the second goes on as if it were alone."""
    generator = codetta.Generator(model("Llama"), context=64)
    generator.decoder.ahead = ahead
    first = generator.stream(PROMPTS[0], tokens=12)
    next(first)
    second = generator.stream(PROMPTS[1], tokens=12)
    begun = next(second).token
    with (
        pytest.raises(codetta.CodettaError, match="another stream"),
        mock.patch.object(generator.decoder, "turn", side_effect=AssertionError),
    ):
        next(first)
    assert [begun, *(each.token for each in second)] == expected("Llama", tuple(PROMPTS[1]), 12)


def test_the_end() -> None:
    """At the model's end token, which is given; at the cache's end."""
    generator = codetta.Generator(model("Llama"), context=12)
    want = expected("Llama", tuple(PROMPTS[0]), 12)
    full = generator(PROMPTS[0], tokens=100)
    assert (full.tokens, full.reason) == (want[:7], "context")
    generator.ends = {want[3]}
    ended = generator(PROMPTS[0], tokens=100)
    assert (ended.tokens, ended.reason) == (want[: want.index(want[3]) + 1], "end")


# ---- text -------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of bytes, two for some tokens, so that characters and stop strings lie across tokens."""

    pieces = [bytes([each]) for each in range(110)] + [
        b"ab",
        b"c!",
        b"\xe2\x82",
        b"\xac",
        b"\xc3",
        b"\xa9",
        b" ",
        b"END",
        b"E",
        b"ND",
    ]

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.pieces[each] for each in tokens).decode(errors="replace")


def said(tokens: list[int], stops: list[str]) -> tuple[list[str], bool]:
    text, shown = Text(Letters(), stops), []
    for number, token in enumerate(tokens):
        piece, stopped = text.add(token, last=number == len(tokens) - 1)
        shown.append(piece)
        if stopped:
            return shown, True
    return shown, False


def test_characters_across_tokens() -> None:
    assert said([110, 112, 113, 114, 115], []) == (["ab", "", "€", "", "é"], False)
    assert said([110, 112], [])[0] == ["ab", "\ufffd"]  # nothing will complete it


def test_stop_strings_across_tokens() -> None:
    assert said([110, 118, 119, 110], ["END"]) == (["ab", "", ""], True)
    assert said([110, 118, 118, 110], ["END"]) == (["ab", "", "E", "Eab"], False)  # only its beginning
    assert said([118], ["END"]) == (["E"], False)
    assert said([110, 111], ["bc"]) == (["a", ""], True)
    assert said([110, 110, 111], ["bab", "abc"]) == (["", "a"], True)  # the first that is complete


def test_text_is_streamed_and_stopped() -> None:
    tokenizer = Letters()
    generator = codetta.Generator(model("Llama"), tokenizer, context=64)
    whole = generator("abc", tokens=20)
    assert whole.tokens == expected("Llama", tuple(b"abc"), 20)
    assert whole.text == tokenizer.decode(whole.tokens)
    assert "".join(piece.text for piece in generator.stream("abc", tokens=20)) == whole.text
    stop = whole.text[4:7]
    short = generator("abc", tokens=20, stop=stop)
    assert (short.text, short.reason) == (whole.text[: whole.text.index(stop)], "stop")


# ---- prompts together, rooms again ------------------------------------------------------------------------------


def test_lengths_that_prompts_are_read_at() -> None:
    lengths = {padded(length, 8192) for length in range(1, 8193)}
    assert len(lengths) < 32 and padded(8192, 8192) == 8192
    assert all(length <= padded(length, 8192) < max(2 * length, SHORTEST + 1) for length in range(1, 8193))
    assert all(padded(length, 8192) <= 1.25 * length for length in range(513, 8193))
    assert padded(100, 120) == 120  # no place beyond those that there are


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_prompts_are_read_together(name: str) -> None:
    """In one call, or in few: each gets what it would get alone, and a length like others compiles nothing."""
    generator = codetta.Generator(model(name), context=64)
    decoder = generator.decoder
    graphs = decoder.prompt.backend
    with mock.patch.object(decoder, "prompt", wraps=decoder.prompt) as read:
        read.backend = graphs
        prompts = [list(range(3, 3 + 2 * each)) for each in range(1, 9)]
        made = [each.tokens for each in generator(prompts, tokens=4)]
        assert read.call_count == 1
        assert made == [expected(name, tuple(each), 4) for each in prompts]
        generator(PROMPTS[0], tokens=1)
        compiled = graphs.graphs
        for length in (3, 7, 12, 16, 20, 31, 40):
            assert generator([length] * length, tokens=1).tokens == expected(name, (length,) * length, 1)
        assert graphs.graphs == compiled
        read.reset_mock()
        many = [*prompts, *prompts, list(range(50, 10, -1)), [9]]
        made = [each.tokens for each in generator(many, tokens=1)]
        assert read.call_count == 2 and len(many) > TOGETHER
        assert made == [expected(name, tuple(each), 1) for each in many]


def test_rooms_are_used_again() -> None:
    """A longer context makes another room; the first is there when it is enough again. Memory is bounded."""
    decoder = codetta.Generator(model("Llama")).decoder

    def answer(tokens: int) -> tuple[int, object]:
        decoder.hold(1, tokens)
        found = [decoder.begin([PROMPTS[0]], Sampling()).read()[0], decoder.turn().read()[0]]
        assert found == expected("Llama", tuple(PROMPTS[0]), 2)
        return decoder.current.slots.context, decoder.current

    with mock.patch("codetta.decode.LEAST", 16):
        (small, first), (large, second) = answer(10), answer(100)
        assert (small, large) == (16, 128) and first is not second
        assert answer(16) == (16, first) and answer(20) == (128, second)
        assert [each.slots.context for each in decoder.rooms] == [16, 128]
        with mock.patch("codetta.decode.KEPT", 0):
            answer(300)
            assert [each.slots.context for each in decoder.rooms] == [
                16,
                128,
                512,
            ]  # together no larger than the new one
            decoder.rooms.pop(1), decoder.rooms.insert(0, decoder.rooms.pop())
            assert answer(200) == (512, decoder.rooms[-1])


def test_prompts_of_a_size_that_comes_again() -> None:
    """They are read in memory that stays, for a recording; another length, and another number of them, too."""
    generator = codetta.Generator(model("Llama"), context=64)
    decoder = generator.decoder
    with mock.patch.object(decoder, "_read", wraps=decoder._read) as plain:
        for round in range(BEFORE + 3):
            for prompts in (PROMPTS[:1], PROMPTS, [list(range(3, 30))]):
                shifted = [[(token + round) % 117 + 3 for token in each] for each in prompts]
                made = [each.tokens for each in generator(shifted, tokens=3)]
                assert made == [expected("Llama", tuple(each), 3) for each in shifted]
            if round == BEFORE:
                plain.reset_mock()
        assert plain.call_count == 0
        for length in range(1, 64):
            generator([list(range(3, 3 + length))] * 2, tokens=1)
        assert all(len(each.prompts) <= LENGTHS for each in decoder.rooms)


def test_keys_and_values_of_a_prompt_are_those_that_the_model_made() -> None:
    """A copy would be contiguous."""
    causal = Causal(model("Llama"))
    _, keys, values = causal.prompt(torch.arange(10).view(2, 5))
    assert len(keys) == len(values) == causal.config.num_hidden_layers
    assert not values[0].is_contiguous() and values[0].transpose(1, 2).is_contiguous()


def test_prompts_that_cannot_be_recorded() -> None:
    """They are read as they were before; so are those of a model that has changed its type."""
    plain = copy.deepcopy(model("Llama"))
    generator = codetta.Generator(plain, context=64)
    ask = lambda: generator(PROMPTS[0], tokens=3).tokens  # noqa: E731
    want = [ask() for _ in range(BEFORE)]
    with mock.patch.object(Recorded, "__call__", side_effect=RuntimeError("operation not permitted")) as call:
        assert generator.decoder.read([PROMPTS[0]]).argmax() == want[0][0]
        generator.decoder.read([PROMPTS[0]])
        assert call.call_count == 1
    assert [*want, ask()] == [list(expected("Llama", tuple(PROMPTS[0]), 3))] * (BEFORE + 1)
    for _ in range(BEFORE + 1):
        generator(PROMPTS[1], tokens=3)
    plain.double()
    assert generator(PROMPTS[1], tokens=3).tokens == expected("Llama", tuple(PROMPTS[1]), 3)
    assert generator.decoder.current.slots.keys[0].dtype == torch.float64


def test_weights_that_recordings_have_read() -> None:
    linear = nn.Linear(4, 4)
    weights = _Weights(linear)
    assert weights.are_there() and weights.hold(linear)
    with torch.no_grad():
        linear.weight.mul_(2)
    assert weights.are_there() and not weights.hold(linear)
    weights = _Weights(linear)
    linear.weight.data = linear.weight.data.clone()
    assert not weights.are_there()
    weights = _Weights(linear)
    linear.bias = nn.Parameter(torch.zeros(4))
    assert not weights.are_there() and not weights.hold(linear)
    weights = _Weights(linear)
    with mock.patch.object(backwards, "count", backwards.count + 1):  # an optimiser may have written what nobody counts
        assert weights.are_there() and not weights.hold(linear)
    with torch.inference_mode():
        linear = nn.Linear(4, 4)
    assert not _Weights(linear).are_there()


# ---- a step ahead of the host -----------------------------------------------------------------------------------


def answers(generator: codetta.Generator, ahead: bool, **how: Any) -> tuple[list[codetta.Generated], int]:
    """To PROMPTS, and in how many steps."""
    generator.decoder.ahead = ahead
    with mock.patch.object(generator.decoder, "turn", wraps=generator.decoder.turn) as turn:
        return generator(PROMPTS, **how), turn.call_count


def test_a_step_ahead_changes_nothing() -> None:
    """Answers are the same for every reason to end. One step more is made at most, and none where it is known that nobody wants it."""
    generator = codetta.Generator(model("Llama"), Letters(), context=24)
    whole = generator(PROMPTS, tokens=12)
    sampled = {"temperature": 2.0, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}
    stops = {"stop": [each.text[2:4] for each in whole]}
    all_end, one_ends, longest_ends = {each.tokens[4] for each in whole}, {whole[0].tokens[3]}, {whole[1].tokens[6]}
    cases: list[tuple[dict[str, Any], set[int], set[str], int]] = [
        ({"tokens": 1}, set(), {"length"}, 0),
        ({"tokens": 2}, set(), {"length"}, 0),
        ({"tokens": 12}, set(), {"length"}, 0),
        ({"tokens": 12, **sampled}, set(), {"length"}, 0),
        ({"tokens": 12, **stops}, set(), {"stop"}, 1),
        ({"tokens": 12}, all_end, {"end"}, 1),
        ({"tokens": 12}, one_ends, {"end", "length"}, 0),
        ({"tokens": 100}, set(), {"context"}, 0),
        ({"tokens": 100, **sampled}, set(), {"context"}, 0),
        ({"tokens": 100}, longest_ends, {"end", "context"}, 0),
    ]
    for how, ends, reasons, more in cases:
        generator.ends = ends
        (plain, needed), (made, steps) = (answers(generator, ahead, **how) for ahead in (False, True))
        assert made == plain, how
        assert {each.reason for each in made} == reasons, how
        assert needed == max(len(each.tokens) for each in made) - 1, how
        assert steps == needed + more, how


@pytest.mark.parametrize("ahead", [False, True])
def test_when_the_host_reads(ahead: bool) -> None:
    """One step behind the device, or after each step; the first token waits for no step either way."""
    generator = codetta.Generator(model("Llama"), context=64)
    generator.decoder.ahead = ahead
    done: list[str] = []
    turn, read = Decoder.turn, Sent.read
    with (
        mock.patch.object(Decoder, "turn", lambda self: (done.append("turn"), turn(self))[1]),
        mock.patch.object(Sent, "read", lambda self: (done.append("read"), read(self))[1]),
    ):
        generator(PROMPTS[0], tokens=3)
        assert done == ["read", "turn", *(["turn", "read"] if ahead else ["read", "turn"]), "read"]
        done.clear()
        generator(PROMPTS[0], tokens=1)
        assert done == ["read"]


# ---- recordings of sampled steps --------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.95},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.85, "min_p": 0.05, "repetition_penalty": 1.2},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0},  # again, when its recording is gone
    {},
]
ALIKE = [*PROMPTS, PROMPTS[0]]


@torch.no_grad()
def unrecorded(decoder: Decoder, tokens: int, how: Sampling) -> list[list[int]]:
    """The answers to ALIKE, chosen one step after the other from a step's logits, by tensors that are made here."""
    chosen = [decoder.begin(ALIKE, how).read()]
    room, device = decoder.current, decoder.device
    rows = torch.tensor([0, 0, 0, 1], device=device)
    seen = torch.zeros(len(ALIKE), decoder.causal.config.vocab_size, dtype=torch.bool, device=device)
    for row, prompt in enumerate(ALIKE):
        seen[row, prompt] = True
    for step in range(1, tokens):
        seen.scatter_(1, torch.tensor(chosen[-1], device=device)[:, None], True)
        found = choose(room.logits(), how, torch.tensor(step, device=device), rows, seen)
        chosen.append(room.choice.tokens.copy_(found).tolist())
    return [list(each) for each in zip(*chosen, strict=True)]


def test_sampled_steps_are_a_plain_loop() -> None:
    generator = codetta.Generator(model("Llama"), context=64)
    for seed, kind in enumerate(KINDS):
        for each in (seed, 2**64 - 1 - seed):
            want = unrecorded(generator.decoder, 12, Sampling(**kind, seed=each))
            assert [one.tokens for one in generator(ALIKE, tokens=12, **kind, seed=each)] == want, kind


def test_making_a_recording_changes_nothing() -> None:
    """As on a GPU: the function is called a few times, and what it says that it changes is put back."""

    def rehearsed(self: Recorded) -> Tensor:
        before = [each.clone() for each in self.kept]
        for _ in range(WARM + 1):
            self.function()
        for each, was in zip(self.kept, before, strict=True):
            each.copy_(was)
        return self.function()

    generator = codetta.Generator(model("Llama"), context=64)
    sample = lambda kind: [each.tokens for each in generator(ALIKE, tokens=8, **kind, seed=5)]  # noqa: E731
    want = [sample(kind) for kind in KINDS]
    with mock.patch.object(Recorded, "__call__", rehearsed):
        assert [sample(kind) for kind in KINDS] == want


def test_which_recordings_are_kept() -> None:
    """One for each kind of sampling, whatever the seed; only the last ones. What they read stays where it is; they can be forgotten."""
    generator = codetta.Generator(model("Llama"), context=64)
    decoder, (first, second, *_, other, penalised) = generator.decoder, KINDS[:6]

    def known(kind: dict[str, Any], seed: int) -> Recorded:
        generator(PROMPTS[0], tokens=3, **kind, seed=seed)
        return decoder.current.sampled[Kind(Sampling(**kind))]

    made = known(penalised, 1)
    choice = decoder.current.choice
    tensors = (choice.tokens, choice.rows, choice.counter, choice.first, choice.bars, choice.seen)
    assert known(penalised, 2) is made
    known(other, 1)
    assert known(penalised, 3) is made and len(decoder.current.sampled) == 2
    assert all(each is was for each, was in zip(vars(choice).values(), tensors, strict=False))
    known(first, 1)
    assert list(decoder.current.sampled) == [Kind(Sampling(**penalised)), Kind(Sampling(**first))]
    known(second, 1)
    assert list(decoder.current.sampled) == [Kind(Sampling(**first)), Kind(Sampling(**second))] and SAMPLED == 2
    assert known(penalised, 1) is not made
    recordings = [decoder.current.likeliest, *decoder.current.sampled.values()]
    for each in recordings:
        each.graph = each.result = mock.sentinel.made
    with mock.patch.object(Decoder, "device", torch.device("cuda")):  # where parameters are looked at
        decoder._look_at_parameters()
    assert [each.graph for each in recordings] == [None] * 3


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g([]), "is empty"),
        (lambda g: g([[1], []]), "is empty"),
        (lambda g: g(list(range(3, 67))), "has 64 tokens, the cache holds 64"),
        (lambda g: g([1, 120]), "from 0 to 119"),
        (lambda g: g([1, 2.5]), "whole numbers"),
        (lambda g: g("text"), "tokenizer"),
        (lambda g: g([1], stop="x"), "tokenizer"),
        (lambda g: g([1], tokens=0), "1 or more"),
        (lambda g: g([1], temperature=-1.0), "temperature"),
        (lambda g: g([1], warmth=1.0), "warmth"),
        (lambda g: g.stream([1], tokens=0), "1 or more"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    generator = codetta.Generator(model("Llama"), context=64)
    with pytest.raises(codetta.ArgumentError, match=message):
        call(generator)


def test_models_that_are_refused() -> None:
    with pytest.raises(codetta.ArgumentError, match="causal language model"):
        codetta.Generator(nn.Linear(2, 2))
    with pytest.raises(codetta.ArgumentError, match="positions for 512"):
        codetta.Generator(model("Llama"), context=1000)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parent.parent / "examples/generate.py"), run_name="__main__")
    assert "[7] -> " in capsys.readouterr().out
    target = f"{Path(__file__).parent.parent / 'examples/generate.py'}:example"
    result = CliRunner().invoke(app, ["explain", target, "--decode", "--batch", "4", "--context", "128", "--json"])
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert (report["decode"]["batch"], report["decode"]["context"]) == (4, 128) and len(report["programs"]) == 10
    assert CliRunner().invoke(app, ["explain", target, "--decode", "--training"]).exit_code == 2


# ---- the command ---------------------------------------------------------------------------------------------------


def command(*words: str) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(app, ["generate", *words, "--json"])
    last = result.stdout.strip().splitlines()[-1:] or ["{}"]
    return result.exit_code, json.loads(last[0]) if last[0].startswith("{") else {}, result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("checkpoint")
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:120])}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    model("Llama").save_pretrained(path)
    return path


def test_generate_from_a_folder(folder: Path) -> None:
    code, facts, said = command(
        str(folder), "--prompt", "Hello", "--tokens", "12", "--context", "64", "--dtype", "fp32"
    )
    assert code == 0
    assert len(facts["tokens"]) == 12 and facts["reason"] == "length"
    assert facts["text"] in said and "tokens, " in said and "of the memory's read stream" in said.replace("\n", " ")
    assert facts["ms"] > 0 and facts["stream_share"] > 0
    stop = facts["text"][3:5]
    _, short, _ = command(
        str(folder), "--prompt", "Hello", "--tokens", "12", "--context", "64", "--dtype", "fp32", "--stop", stop
    )
    assert (short["text"], short["reason"]) == (facts["text"][: facts["text"].index(stop)], "stop")


def test_generate_a_shape() -> None:
    words = ("tiny", "--prompt", "1 5 9", "--tokens", "3", "--temperature", "1", "--seed", "4")
    code, facts, _ = command(*words)
    assert code == 0 and len(facts["tokens"]) == 3 and "text" not in facts
    assert command(*words)[1]["tokens"] == facts["tokens"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "no folder with a config.json"),
        (("tiny", "--prompt", "words"), "token numbers"),
        (("tiny", "--dtype", "int3"), "is unknown"),
        (("bert-base",), "causal language model"),
        (("tiny", "--stop", "x"), "tokenizer"),
    ],
)
def test_commands_that_are_refused(words: tuple[str, ...], message: str) -> None:
    code, _, said = command(*words)
    assert code == 2 and message in said.replace("\n", " ")
