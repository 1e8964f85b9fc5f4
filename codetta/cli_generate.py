"""`codetta generate`: text from a checkpoint in a folder, as it comes, and how fast it came."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from codetta.bench.decode import weight_bytes
from codetta.bench.run import DTYPES, ceilings
from codetta.bench.shapes import SHAPES, build
from codetta.cli_arguments import pick_device
from codetta.errors import ArgumentError
from codetta.generate import Generator
from codetta.terminal import Json, finish, reported, screen


def add_to(app: typer.Typer) -> None:
    app.command("generate")(generate_command)


@reported
def generate_command(
    model: Annotated[str, typer.Argument(help="A folder with a checkpoint of Hugging Face's (safetensors), or a published shape.")],
    prompt: Annotated[str, typer.Option(help="Where to begin; a shape takes token numbers, such as '1 5 9'.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    context: Annotated[int, typer.Option(help="Tokens of prompt and answer that are kept; default: 4096 or the model's.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest that hold this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only those at least this likely, relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Logits of what has occurred are divided by it.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}; default: bf16 on a GPU, else the checkpoint's.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N; default: a GPU where there is one.")] = "",
    layers: Annotated[int, typer.Option(help="Give a published shape so many layers.")] = 0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Continue a prompt, and show tokens a second and the share of the memory's read stream."""
    where = pick_device(device)
    loaded, tokenizer = _load(model, where, dtype, layers)
    generator = Generator(loaded, tokenizer, context=context or None)
    given: Any = prompt if tokenizer is not None else _numbers(prompt)
    out = sys.stderr if as_json else sys.stdout
    pieces, times = [], []
    stream = generator.stream(
        given, tokens=tokens, stop=stop or (), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )  # fmt: skip
    begin = time.perf_counter()
    try:
        for piece in stream:
            times.append(time.perf_counter() - begin)
            pieces.append(piece)
            out.write(piece.text if tokenizer is not None else f"{piece.token} ")
            out.flush()
    except KeyboardInterrupt:
        pass  # what has come so far is shown
    out.write("\n")
    facts: dict[str, Any] = {"tokens": [each.token for each in pieces], "reason": pieces[-1].reason if pieces else None}
    if tokenizer is not None:
        facts["text"] = "".join(each.text for each in pieces)
    facts |= _speed(times, generator)
    screen(as_json).print(_said(facts, len(pieces)), style="dim", highlight=False)
    finish(as_json, facts)


def _speed(times: list[float], generator: Generator) -> dict[str, float]:
    """Of the steps, without the first two: one reads the prompt, one builds what is built once."""
    room = generator.decoder.current
    if len(times) < 4 or room is None:
        return {}
    seconds, slots = (times[-1] - times[1]) / (len(times) - 2), room.slots
    # On the way the cache was as full as it is on the average.
    used = slots.bytes * (int(slots.places[0]) - len(times) / 2) / slots.context
    moved = weight_bytes(generator.decoder.causal.model) + used
    share = moved / seconds / 1e12 / ceilings(slots.places.device)["read_tbs"]
    return {
        "first_s": round(times[0], 3),
        "ms": round(seconds * 1e3, 4),
        "tokens_per_s": round(1 / seconds, 2),
        "stream_share": round(share, 4),
    }


def _said(facts: dict[str, Any], count: int) -> str:
    if "ms" not in facts:
        return f"{count} tokens"
    return (
        f"{count} tokens, {facts['tokens_per_s']:.1f} a second ({facts['ms']:.2f} ms each), {facts['stream_share']:.0%} of the memory's "
        f"read stream; the first after {facts['first_s']:.2f} s"
    )


def _load(name: str, device: torch.device, dtype: str, layers: int) -> tuple[Any, Any]:
    """A model and its tokenizer; None for a shape, which has no words."""
    if dtype and dtype not in DTYPES:
        raise ArgumentError("dtype", f"{dtype!r} is unknown", f"use one of {', '.join(DTYPES)}")
    wanted = DTYPES[dtype] if dtype else torch.bfloat16 if device.type == "cuda" else None
    if name in SHAPES:
        return build(name, device, wanted or torch.bfloat16, layers), None
    if not (Path(name) / "config.json").exists():
        raise ArgumentError(
            "model", f"{name!r} is no folder with a config.json", f"pass such a folder, or one of {', '.join(SHAPES)}"
        )
    try:
        import transformers
    except ImportError:
        raise ArgumentError("model", "needs the package transformers", "install codetta[zoo]") from None
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=wanted or "auto", local_files_only=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ArgumentError("model", f"has no tokenizer that can be read: {error}", "put it into the folder") from None
    return model.to(device).eval(), tokenizer


def _numbers(prompt: str) -> list[int]:
    try:
        return [int(each) for each in prompt.replace(",", " ").split()] or [1]
    except ValueError:
        raise ArgumentError(
            "prompt", f"is {prompt!r}", "a shape has no words: pass token numbers, such as '1 5 9'"
        ) from None
