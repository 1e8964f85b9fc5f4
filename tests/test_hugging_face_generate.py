"""`generate` of a compiled model: what Hugging Face's own gives for the plain model, from whatever calls it."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from test_generate import PROMPTS, expected, model
from torch import Tensor, nn

import codetta


def compiled(name: str = "Llama") -> Any:
    return codetta.compile(copy.deepcopy(model(name)))


def alone(prompt: list[int]) -> dict[str, Tensor]:
    ids = torch.tensor([prompt])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def taken_over(made: Any) -> bool:
    """Whether a Generator has done something for this model."""
    kept = vars(made._compiled_call_impl).get("generation")
    return kept is not None and kept.generator is not None


# ---- several callers ----------------------------------------------------------------------------------------------


def in_threads(calls: list[Any]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            results[at] = calls[at]()
        except Exception as error:  # shown where it is compared
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return results


def test_threads_take_turns() -> None:
    made, prompts = compiled(), [*PROMPTS, [5, 6, 7, 8]]
    want = [expected("Llama", tuple(each), 12) for each in prompts]
    calls = [lambda each=each: made.generate(**alone(each), max_new_tokens=12, do_sample=False) for each in prompts]
    for _ in range(2):
        found = in_threads(calls)
        assert [each[0, len(prompt) :].tolist() for each, prompt in zip(found, prompts, strict=True)] == want
    generator = codetta.Generator(model("Llama"), context=64)
    found = in_threads([lambda each=each: generator(each, tokens=12).tokens for each in prompts])
    assert found == want


def test_a_stream_beside_calls_of_other_threads() -> None:
    """It is told, and harms nobody."""
    generator = codetta.Generator(model("Llama"), context=64)
    stream = generator.stream(PROMPTS[0], tokens=12)
    next(stream)
    (found,) = in_threads([lambda: generator(PROMPTS[1], tokens=12).tokens])
    assert found == expected("Llama", tuple(PROMPTS[1]), 12)
    with pytest.raises(codetta.CodettaError, match="another stream"):
        next(stream)
    abandoned = generator.stream(PROMPTS[2], tokens=12)
    next(abandoned)
    assert generator(PROMPTS[0], tokens=12).tokens == expected("Llama", tuple(PROMPTS[0]), 12)


# ---- a model that changes -----------------------------------------------------------------------------------------


def test_a_model_of_another_dtype() -> None:
    """Seen by the next call, there and back."""
    made, changed = compiled(), copy.deepcopy(model("Llama")).bfloat16()
    generate = lambda each: each.generate(**alone(PROMPTS[0]), max_new_tokens=8, do_sample=False)[0, 5:].tolist()  # noqa: E731
    want = expected("Llama", tuple(PROMPTS[0]), 8)
    assert generate(made) == want
    assert generate(made.bfloat16()) == codetta.Generator(changed, context=64)(PROMPTS[0], tokens=8).tokens
    assert taken_over(made)
    back = copy.deepcopy(changed).float()
    assert generate(made.float()) == codetta.Generator(back, context=64)(PROMPTS[0], tokens=8).tokens


def test_parameters_that_are_replaced() -> None:
    made = compiled()
    generate = lambda: made.generate(**alone(PROMPTS[0]), max_new_tokens=8, do_sample=False)[0, 5:].tolist()  # noqa: E731
    before = generate()
    with torch.no_grad():
        made.lm_head.weight = nn.Parameter(made.lm_head.weight.roll(1, 0))
        made.model.layers[0].mlp = copy.deepcopy(made.model.layers[1].mlp)
    want = copy.deepcopy(made).generate(**alone(PROMPTS[0]), max_new_tokens=8, do_sample=False)[0, 5:].tolist()
    assert generate() == want != before


def test_a_vocabulary_that_grows() -> None:
    made = compiled()
    asked = alone(PROMPTS[0]) | {
        "max_new_tokens": 6,
        "repetition_penalty": 1.2,
        "suppress_tokens": [7],
        "do_sample": False,
    }
    made.generate(**asked)
    made.resize_token_embeddings(130, mean_resizing=False)
    want = copy.deepcopy(made).generate(**asked)
    assert torch.equal(made.generate(**asked), want) and taken_over(made)


# ---- models of other kinds ----------------------------------------------------------------------------------------

SMALL: dict[str, dict[str, Any]] = {
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "RecurrentGemma": {
        "hidden_size": 32, "lru_width": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_a_cache_of_another_kind(name: str) -> None:
    """Positions from a mask, or states beside keys and values: the original loop, and its answer."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=99, **SMALL[name])
    plain = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    plain.generation_config.eos_token_id, plain.generation_config.pad_token_id = None, 0
    asked = alone([5, 6, 7, 8]) | {"max_new_tokens": 6, "do_sample": False}
    made = codetta.compile(copy.deepcopy(plain))
    assert torch.equal(made.generate(**asked), plain.generate(**asked)) and not taken_over(made)
    with pytest.raises(codetta.ArgumentError, match="model"):
        codetta.Generator(plain)


def test_a_model_with_a_generate_of_its_own() -> None:
    """Its arguments are its own, by name and by place."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32,
        decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=20, max_target_positions=30, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    plain = WhisperForConditionalGeneration(config).eval()
    made, features = codetta.compile(copy.deepcopy(plain)), torch.randn(1, 8, 40)
    want = plain.generate(input_features=features, max_new_tokens=6)
    assert torch.equal(made.generate(input_features=features, max_new_tokens=6), want)
    assert torch.equal(made.generate(features, max_new_tokens=6), want)


# ---- every setting ------------------------------------------------------------------------------------------------

LONG = max(map(len, PROMPTS))
# The longest one, the others padded: what follows them must not depend on it.
BATCH = {
    "input_ids": torch.tensor([[0] * (LONG - len(each)) + each for each in PROMPTS]),
    "attention_mask": torch.tensor([[0] * (LONG - len(each)) + [1] * len(each) for each in PROMPTS]),
}


@cache
def pair(name: str) -> tuple[Any, Any]:
    """The plain model and the compiled one, which is used by all tests: it must not remember settings."""
    return copy.deepcopy(model(name)), compiled(name)


@cache
def tokenizer() -> Any:
    """A letter for each token."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = {chr(ord("a") + at if at < 26 else 0x400 + at): at for at in range(120)}
    inner = Tokenizer(models.BPE(letters, []))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def both(name: str, seed: int = 0, fresh: Any = None, **asked: Any) -> tuple[Any, Any]:
    """What the plain model answers, and the compiled one, which takes it over. fresh: makes arguments anew for each."""
    found = []
    for each in pair(name):
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="codetta")
            found.append(each.generate(**BATCH | asked | (fresh() if fresh else {})))
    return found[0], found[1]


def greedy(prompt: int = 0, tokens: int = 12, name: str = "Llama") -> list[int]:
    return expected(name, tuple(PROMPTS[prompt]), tokens)


def no_even_token(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor of a user's own: after an even token comes an odd one."""
    even = torch.arange(scores.shape[1]) % 2 == 0
    return scores.masked_fill(even & (ids[:, -1:] % 2 == 0), -torch.inf)


def seven_in_all(ids: Tensor, scores: Any, **_: Any) -> Tensor:
    """A criterion of a user's own: each for itself, at another length."""
    return ids.shape[1] >= LONG + 3 + torch.arange(ids.shape[0])


def settings() -> dict[str, dict[str, Any]]:
    from transformers import LogitsProcessorList, StoppingCriteriaList

    end = greedy()[3]
    first, second = greedy()[:2]
    ended = {"eos_token_id": [end, greedy(1)[5]], "pad_token_id": 7, "max_new_tokens": 12}
    sampled = {"do_sample": True, "max_new_tokens": 9}
    return {
        "max_new_tokens": {"max_new_tokens": 12},
        "max_length": {"max_length": 20},
        "no length": {},
        "eos_token_id": ended,
        "min_new_tokens": ended | {"min_new_tokens": 7},
        "min_length": ended | {"min_length": 16},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "max_new_tokens": 30},
        "bad_words_ids": {"bad_words_ids": [[end], [first, second], [6, 7, 8, 9, 10]], "max_new_tokens": 12},
        "bad words alone": {"bad_words_ids": [greedy()[1:3], greedy()[4:8], [9, greedy()[7]]], "max_new_tokens": 12},
        "bad words of a token": {"bad_words_ids": [[end], [first]], "repetition_penalty": 1.2, "max_new_tokens": 12},
        "sampled and barred": sampled | {"top_k": 1, "min_new_tokens": 5, "eos_token_id": end, "pad_token_id": 7, "suppress_tokens": [first]},
        "suppress_tokens": {"suppress_tokens": greedy()[:3], "max_new_tokens": 12},
        "begin_suppress_tokens": {"begin_suppress_tokens": greedy()[:1], "max_new_tokens": 12},
        "sequence_bias": {"sequence_bias": [[[5], 9.0], [[first, 6], 9.0]], "max_new_tokens": 12},
        "repetition_penalty": {"repetition_penalty": 1.3, "max_new_tokens": 12},
        "repetition_penalty of padding": {"repetition_penalty": 30.0, "max_new_tokens": 12},
        "forced_eos_token_id": {"forced_eos_token_id": 9, "max_new_tokens": 6},
        "exponential_decay_length_penalty": ended | {"exponential_decay_length_penalty": (2, 3.0)},
        "logits_processor": {"logits_processor": LogitsProcessorList([no_even_token]), "max_new_tokens": 12},
        "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([seven_in_all]), "max_new_tokens": 12},
        "stop_strings": {"stop_strings": [tokenizer().decode(greedy()[4:6])], "tokenizer": tokenizer(), "pad_token_id": 7, "max_new_tokens": 12},
        "cache_implementation": {"cache_implementation": "static", "max_new_tokens": 12},
        "typical_p": sampled | {"typical_p": 0.8},
        "epsilon_cutoff": sampled | {"epsilon_cutoff": 0.02},
        "eta_cutoff": sampled | {"eta_cutoff": 0.02},
        "num_return_sequences": sampled | {"num_return_sequences": 2, "typical_p": 0.99, "temperature": 2.0},
        "sampled and processed": sampled | {"top_k": 20, "typical_p": 0.9, "min_new_tokens": 4, "eos_token_id": end, "pad_token_id": 7},
    }  # fmt: skip


NAMES = [
    "max_new_tokens", "max_length", "no length", "eos_token_id", "min_new_tokens", "min_length", "no_repeat_ngram_size", "bad_words_ids", "bad words alone",
    "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "repetition_penalty", "repetition_penalty of padding", "forced_eos_token_id",
    "exponential_decay_length_penalty", "logits_processor", "stopping_criteria", "stop_strings", "cache_implementation", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "num_return_sequences", "sampled and processed", "bad words of a token", "sampled and barred",
]  # fmt: skip


@pytest.mark.parametrize("setting", NAMES)
def test_a_setting(setting: str) -> None:
    """The same tokens. Random ones too, where Hugging Face draws them: by its processors, from the same numbers."""
    want, found = both("Llama", **settings()[setting])
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    "setting", ["max_new_tokens", "min_new_tokens", "no_repeat_ngram_size", "cache_implementation"]
)
def test_a_setting_with_a_window(setting: str) -> None:
    asked = settings()[setting] | {"max_new_tokens": 40}  # beyond the window
    want, found = both("Mistral", **asked)
    assert torch.equal(found, want)


IN_THE_STEP = {
    "max_new_tokens", "max_length", "no length", "eos_token_id", "min_new_tokens", "min_length", "suppress_tokens", "begin_suppress_tokens",
    "repetition_penalty", "repetition_penalty of padding", "cache_implementation", "bad words of a token", "sampled and barred",
    "bad_words_ids", "bad words alone",
}  # fmt: skip


@pytest.mark.parametrize("setting", NAMES)
def test_what_is_part_of_the_step(setting: str) -> None:
    """The choice is, unless Hugging Face has to make it."""
    _, made = pair("Llama")
    inside = []
    seen = mock.patch("codetta.integrations.loop._Short", side_effect=lambda *_: inside.append(1) or 1 / 0)
    with seen, contextlib.suppress(ZeroDivisionError):
        made.generate(**BATCH | settings()[setting])
    assert bool(inside) == (setting in IN_THE_STEP)


def test_settings_are_all_tested() -> None:
    assert sorted(settings()) == sorted(NAMES)


def test_sampling_in_the_step() -> None:
    """Several answers to each prompt, by numbers of our own: as many as asked for, not all the same, within what top_k leaves."""
    asked = {"do_sample": True, "top_k": 2, "temperature": 3.0, "num_return_sequences": 8, "max_new_tokens": 1}
    want, found = both("Llama", output_scores=True, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, want.sequences)
    _, found = both("Llama", **asked)
    assert found.shape == (24, LONG + 1) and torch.equal(found[:, :LONG], want.sequences[:, :LONG])
    allowed = want.scores[0].isfinite()
    assert bool(allowed.gather(1, found[:, LONG:]).all()) and len(found[:8].unique(dim=0)) == 2


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("setting", ["eos_token_id", "min_new_tokens"])
@pytest.mark.parametrize("ahead", [False, True])
def test_streamers(setting: str, ahead: bool) -> None:
    """The prompts, then every token as it comes, with padding where Hugging Face has it; nothing of a step too many."""
    plain, made = pair("Llama")
    asked, heard = settings()[setting], [Heard(), Heard()]
    both("Llama", **asked)
    decoder = made._compiled_call_impl.generation.generator.decoder
    with mock.patch.object(decoder, "ahead", ahead):
        out = [
            each.generate(**BATCH | asked, streamer=streamer)
            for each, streamer in zip((plain, made), heard, strict=True)
        ]
    assert torch.equal(*out)
    assert heard[1].puts == heard[0].puts and heard[0].ends == heard[1].ends == 1


# ---- what is returned ---------------------------------------------------------------------------------------------


def same_caches(found: Any, want: Any, seen: Tensor | None = None) -> None:
    """Of the same kind, as long, and with the same in it wherever somebody sees it."""
    assert type(found) is type(want) and len(found.layers) == len(want.layers)
    for one, other in zip(found.layers, want.layers, strict=True):
        assert type(one) is type(other) and int(one.get_seq_length()) == int(other.get_seq_length())
        assert one.keys.shape == other.keys.shape
        for x, y in ((one.keys, other.keys), (one.values, other.values)):
            if seen is not None:
                x, y = (each * seen[:, None, -each.shape[2] :, None] for each in (x, y))
            assert torch.allclose(x, y, atol=1e-4), float((x - y).abs().max())


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("scores", [False, True])
def test_returned_in_a_dictionary(name: str, scores: bool) -> None:
    tokens = 40 if name == "Mistral" else 8
    asked = {
        "return_dict_in_generate": True,
        "output_scores": scores,
        "output_logits": scores,
        "max_new_tokens": tokens,
        "min_new_tokens": 5,
    }
    asked |= {"eos_token_id": [greedy(0, 8, name)[6], greedy(1, 8, name)[6]], "pad_token_id": 7}
    want, found = both(name, **asked)
    assert torch.equal(found.sequences, want.sequences) and type(found) is type(want)
    for one, other in ((found.scores, want.scores), (found.logits, want.logits)):
        assert (one is None) == (other is None) == (not scores)
        for x, y in zip(one or (), other or (), strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, atol=1e-3)
    length = int(want.past_key_values.get_seq_length())
    seen = torch.cat([BATCH["attention_mask"], torch.ones(3, length - LONG)], 1)
    same_caches(found.past_key_values, want.past_key_values, seen)


# ---- caches from before -------------------------------------------------------------------------------------------


def caches(name: str, kind: str) -> Any:
    from transformers import DynamicCache, StaticCache

    config = model(name).config
    return {
        "dynamic": lambda: DynamicCache(),
        "of the model": lambda: DynamicCache(config=config),
        "static": lambda: StaticCache(config=config, max_cache_len=64),
    }[kind]()


@pytest.mark.parametrize(("name", "kind"), [
    ("Llama", "dynamic"), ("Llama", "static"), ("Mistral", "of the model"), ("Mistral", "static"),
])  # fmt: skip
def test_a_cache_that_goes_on(name: str, kind: str) -> None:
    """A conversation: the answer to a prompt, then to more of it with the cache of the first, as the whole text or its end alone."""
    results = []
    for each in pair(name):
        cache = caches(name, kind)
        ids = torch.tensor([PROMPTS[1], PROMPTS[1]])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="codetta")
            first = each.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=8)
            between = copy.deepcopy(cache)
            more = torch.cat([first, torch.tensor([[5, 6, 9], [8, 4, 9]])], 1)
            second = each.generate(more, attention_mask=torch.ones_like(more), past_key_values=cache, max_new_tokens=18)
            news = torch.cat([second[:, -1:], torch.tensor([[3], [4]])], 1)
            mask = torch.ones(2, second.shape[1] + 1, dtype=torch.long)
            third = each.generate(news, attention_mask=mask, past_key_values=cache, max_new_tokens=6, min_new_tokens=2)
        results.append((first, between, second, third, cache))
    (_, want_between, *_, want), (_, found_between, *_, found) = results
    for one, other in zip(*[[each for each in result if isinstance(each, Tensor)] for result in results], strict=True):
        assert torch.equal(one, other)
    same_caches(found_between, want_between)
    same_caches(found, want)


# ---- masks of other kinds -----------------------------------------------------------------------------------------

MASKS = {
    "right": [[1] * len(each) + [0] * (LONG - len(each)) for each in PROMPTS],
    "holes": [[0, 1, 1, 0, 1, 1, 1, 1, 1], [1] * 9, [1, 0, 0, 0, 0, 0, 0, 0, 1]],
    "both ends": [[0, 1, 1, 1, 1, 1, 1, 1, 0], [1] * 9, [0, 0, 1, 1, 1, 1, 0, 0, 0]],
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind: str) -> None:
    """Whatever they leave out, the answer is Hugging Face's (which warns of padding on the right, for its positions start again there)."""
    torch.manual_seed(0)
    ids = torch.randint(3, 120, (3, LONG))
    want, found = both("Llama", input_ids=ids, attention_mask=torch.tensor(MASKS[kind]), max_new_tokens=12)
    assert torch.equal(found, want)


def test_a_mask_that_is_not_given() -> None:
    """Guessed as Hugging Face does, from padding."""
    want, found = both("Llama", attention_mask=None, max_new_tokens=12)
    assert torch.equal(found, want)


# ---- what is not taken over ---------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 2},
    "use_cache": {"use_cache": False},
    "attentions": {"output_hidden_states": True, "return_dict_in_generate": True},
    "chunk": {"prefill_chunk_size": 4},
    "assistant": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("asked", REFUSED)
def test_what_is_not_taken_over(asked: str) -> None:
    """Said once, and done by the plain model."""
    plain, made = copy.deepcopy(model("Llama")), compiled()
    how = alone(PROMPTS[0]) | {"max_new_tokens": 6, "do_sample": False} | REFUSED[asked]
    want = plain.generate(**how)
    frame = type(made._compiled_call_impl)
    with mock.patch.object(frame, "__call__", side_effect=AssertionError):
        with pytest.warns(UserWarning, match=f"codetta.*{asked}"):
            found = made.generate(**how)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="codetta")
            again = made.generate(**how)
    if not isinstance(want, Tensor):
        want, found, again = want.sequences, found.sequences, again.sequences
    assert torch.equal(found, want) and torch.equal(again, want)


def test_a_call_out_of_a_call() -> None:
    """A streamer that asks the same model something else gets its answer, and the first goes on."""
    made, inner = compiled(), []

    class Asks(Heard):
        def put(self, value: Tensor) -> None:
            super().put(value)
            inner.append(made.generate(**alone(PROMPTS[1]), max_new_tokens=3, do_sample=False)[0, LONG:].tolist())

    with pytest.warns(UserWarning, match="out of another"):
        out = made.generate(**alone(PROMPTS[0]), max_new_tokens=6, do_sample=False, streamer=Asks())
    assert out[0, 5:].tolist() == greedy(0, 6) and inner == [greedy(1, 3)] * 7


def test_inference_mode() -> None:
    """What is made in it can be used outside of it."""
    made = compiled()
    with torch.inference_mode():
        first = made.generate(**alone(PROMPTS[0]), max_new_tokens=6, repetition_penalty=1.2)
    assert torch.equal(made.generate(**alone(PROMPTS[0]), max_new_tokens=6, repetition_penalty=1.2), first)
