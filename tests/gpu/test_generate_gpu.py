"""Generation on a GPU: recorded steps choose what Hugging Face's loop chooses, see changed weights, and read prompts of any length."""

from __future__ import annotations

import copy

import pytest
import test_generate as small
import torch
from torch import nn

import codetta

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def on_gpu(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return copy.deepcopy(small.model(name)).to("cuda", dtype)


def expected(model: nn.Module, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=0
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", small.MODELS)
def test_greedy_is_hugging_faces(name: str) -> None:
    model = on_gpu(name)
    generator = codetta.Generator(model, context=128)
    want = [expected(model, each, 60) for each in small.PROMPTS]
    assert generator(small.PROMPTS[0], tokens=60).tokens == want[0]
    assert generator.decoder.current.likeliest.graph is not None
    assert [each.tokens for each in generator(small.PROMPTS, tokens=60)] == want
    assert generator(small.PROMPTS[1], tokens=60).tokens == want[1]


def test_a_longer_context_needs_no_compilation() -> None:
    model = on_gpu("Llama")
    generator = codetta.Generator(model, context=64)
    decoder, prompt = generator.decoder, small.PROMPTS[1]
    want = expected(model, prompt, 40)
    assert generator(prompt, tokens=40).tokens == want
    backend = decoder.turns[1, False].backend
    for context in (200, 80, 64):
        decoder.context = context
        assert generator(prompt, tokens=40).tokens == want
    assert len(decoder.rooms) == 3 and backend.graphs == len(backend.executors) == 1


def test_bf16_is_as_close_as_eager() -> None:
    """The logits of a step, against float64."""
    exact = on_gpu("Llama", torch.float64)
    prompt = torch.tensor([small.PROMPTS[1]], device="cuda")
    with torch.no_grad():
        want = exact(prompt).logits[0, -1]
    model = on_gpu("Llama", torch.bfloat16)
    decoder = codetta.Generator(model, context=64).decoder
    with torch.no_grad():
        eager = model(prompt).logits[0, -1]
        decoder.begin([small.PROMPTS[1][:-1]], codetta.Sampling())
        decoder.current.choice.tokens.fill_(small.PROMPTS[1][-1])
        ours = decoder.current.logits()[0]
    error, theirs = ((each.double() - want).norm() / want.norm() for each in (ours, eager))
    assert error <= 2 * theirs + 1e-6


def test_samples_and_changed_weights() -> None:
    model = on_gpu("Llama")
    generator = codetta.Generator(model, context=64)
    sample = lambda seed: generator(small.PROMPTS[0], tokens=20, temperature=1.0, top_k=50, seed=seed).tokens  # noqa: E731
    assert sample(1) == sample(1) != sample(2)
    before = generator(small.PROMPTS[0], tokens=12).tokens
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
        model.model.layers[0].input_layernorm.weight.mul_(0.5)
    assert generator(small.PROMPTS[0], tokens=12).tokens == expected(model, small.PROMPTS[0], 12) != before
    fresh = codetta.Generator(copy.deepcopy(model), context=64)
    assert sample(1) == fresh(small.PROMPTS[0], tokens=20, temperature=1.0, top_k=50, seed=1).tokens


def test_recorded_prompts() -> None:
    """Prompts of a size that comes again: the tokens are right, whatever becomes of the parameters between two calls."""
    model = on_gpu("Llama")
    generator = codetta.Generator(model, context=64)

    def check(seed: int) -> bool:
        """Whether a recording was there."""
        for prompts in (small.PROMPTS[:1], small.PROMPTS):
            shifted = [[(token + seed) % 117 + 3 for token in each] for each in prompts]
            found = [each.tokens for each in generator(shifted, tokens=3)]
            assert found == [expected(model, each, 3) for each in shifted]
        return all(each.recorded.is_there for room in generator.decoder.rooms for each in room.prompts.values())

    for seed in range(small.BEFORE + 2):
        check(seed)
    assert all(check(seed) for seed in range(20, 24))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-2.0)
        assert not check(1)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.roll(1, 0))
        assert not check(2)
        for seed in range(small.BEFORE + 2):
            check(seed)
        for each in model.parameters():
            each.data = each.data.flip(0).contiguous()
        torch.cuda.empty_cache()
        assert not check(3)
    for seed in range(small.BEFORE + 2):
        check(seed)
    assert check(9)


def test_prompts_that_wait_for_the_device_are_not_recorded() -> None:
    model = on_gpu("Llama")
    generator = codetta.Generator(model, context=64)
    want = generator(small.PROMPTS[0], tokens=3).tokens
    read = generator.decoder.prompt
    generator.decoder.prompt = lambda *args: (torch.cuda.synchronize(), read(*args))[1]
    for _ in range(small.BEFORE + 3):
        assert generator(small.PROMPTS[0], tokens=3).tokens == want
    assert torch.randn(3, device="cuda").isfinite().all()


def test_recorded_samples_are_those_of_a_plain_loop() -> None:
    """A step ahead of the host and not, and with one recording for two seeds."""
    generator = codetta.Generator(on_gpu("Llama"), context=64)
    decoder = generator.decoder
    assert decoder.ahead
    for seed, kind in enumerate(small.KINDS):
        graphs = set()
        for each in (seed, 2**64 - 1 - seed):
            want = small.unrecorded(decoder, 24, codetta.Sampling(**kind, seed=each))
            for decoder.ahead in (True, False):
                found = [one.tokens for one in generator(small.ALIKE, tokens=24, **kind, seed=each)]
                assert found == want, (kind, each, decoder.ahead)
                graphs.add(decoder.recorded.graph)
        assert len(graphs) == 1 and None not in graphs, kind


def test_a_step_ahead_changes_nothing() -> None:
    """Whatever the end is: as many tokens as asked for, a full cache, the end token, a stream that is not read to its end."""
    generator = codetta.Generator(on_gpu("Llama"), context=24)
    decoder = generator.decoder
    whole = generator(small.PROMPTS, tokens=12)
    for ends in (set(), {whole[0].tokens[3]}, {each.tokens[4] for each in whole}):
        generator.ends = ends
        for tokens in (1, 12, 100):
            found = []
            for decoder.ahead in (False, True):
                found.append(generator(small.PROMPTS, tokens=tokens))
                stream = generator.stream(small.PROMPTS, tokens=tokens)
                next(stream)
                stream.close()
            assert found[0] == found[1], (ends, tokens)


def test_no_room_says_what_to_lower() -> None:
    import transformers

    config = transformers.LlamaConfig(**small.COMMON | {"max_position_embeddings": 1 << 30})
    model = transformers.LlamaForCausalLM(config).to("cuda").eval()
    generator = codetta.Generator(model, context=1 << 30)
    with pytest.raises(codetta.ArgumentError, match="Lower context"):
        generator([1, 2, 3], tokens=2)
