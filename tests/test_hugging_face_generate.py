"""`generate` of a compiled model: what Hugging Face's own gives for the plain model, from whatever calls it."""

from __future__ import annotations

import copy
import threading
from typing import Any

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
