"""Generate with a small Llama that knows nothing yet: one prompt, several, and a stream; the tokens are those of Hugging Face's loop.

python examples/generate.py
codetta explain examples/generate.py:example --decode     # what a step becomes
codetta generate FOLDER --prompt "Once upon a time"       # a checkpoint of yours
"""

from __future__ import annotations

import torch
import transformers

import codetta


def example() -> tuple[transformers.PreTrainedModel, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return model, (torch.tensor([[5, 17, 3]], device=model.device),)


def main() -> None:
    model, _ = example()
    prompts = [[5, 17, 3], [40, 41, 42, 43, 44], [7]]

    generator = codetta.Generator(model, context=128)
    for answer in generator(prompts, tokens=16):
        print(answer.prompt, "->", *answer.tokens)

    print("a stream, warmer:", end=" ", flush=True)
    for piece in generator.stream(prompts[0], tokens=16, temperature=0.9, top_p=0.95, seed=1):
        print(piece.token, end=" ", flush=True)
    print()

    ids = torch.tensor([prompts[0]], device=model.device)
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
    )
    assert generator(prompts[0], tokens=16).tokens == theirs[0, len(prompts[0]) :].tolist()


if __name__ == "__main__":
    main()
