"""Tiny Transformers with random weights: the architectures that a rewrite of whole models must cope with.

    entry = ZOO["llama"]
    args, kwargs = entry.example(batch=2, length=12)
    result = outputs(entry.model(torch.float32)(*args, **kwargs))

Published architectures come from their configurations, never from the network. Same name, same numbers: the weights of a
model in one dtype are those in any other, rounded. They have the scale of trained ones, and norms and biases are away from
1 and 0, so that a factor folded into the wrong product shows. Nothing here knows what is tested with it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Read when transformers is imported, which is when the first of its models is built.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

HIDDEN, LAYERS, HEADS, HEAD, WIDE, VOCABULARY = 64, 2, 4, 16, 96, 211
POSITIONS = 128  # the longest sequence
WINDOW = 5  # of sliding attention: shorter than the sequences of tests
IMAGE, PATCH, CHANNELS = 16, 4, 3

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int, torch.Generator], Inputs]  # of a batch and a length, in float32
    padded: bool = False  # takes an attention mask

    def model(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            model = self.build()
        _randomize(model, torch.Generator().manual_seed(self._seed))
        # Buffers stay as they are: checkpoints are loaded that way, and rotary frequencies are float32 in every model.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model.eval().to(device)

    def pair(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[nn.Module, nn.Module]:
        """The model, and the same with the very same weights in float64."""
        model, exact = self.model(dtype, device), self.model(torch.float64, device)
        exact.load_state_dict(model.state_dict())
        return model, exact

    def example(
        self,
        batch: int = 2,
        length: int = 12,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Inputs:
        args, kwargs = self.inputs(batch, length, torch.Generator().manual_seed(self._seed + 1))

        def placed(x: Tensor) -> Tensor:
            return x.to(device, dtype if x.is_floating_point() else x.dtype)

        return tuple(map(placed, args)), {name: placed(x) for name, x in kwargs.items()}

    def masked_example(
        self,
        batch: int = 2,
        length: int = 12,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        side: Literal["left", "right"] = "right",
    ) -> Inputs:
        """The same with samples of different lengths, down to about half of the longest.

        Padding on the left leaves rows without a key to attend to in models that look back only: what comes out there is up
        to the implementation.
        """
        if not self.padded:
            raise ValueError(f"{self.name} takes no attention mask")
        args, kwargs = self.example(batch, length, device, dtype)
        missing = torch.arange(batch) * length // (2 * batch)
        position = torch.arange(length)
        kept = position < length - missing[:, None] if side == "right" else position >= missing[:, None]
        return args, kwargs | {"attention_mask": kept.long().to(device)}

    @property
    def _seed(self) -> int:
        return zlib.crc32(self.name.encode())


def outputs(result: Any) -> list[Tensor]:
    """The tensors of whatever a model returned, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        return outputs(result.values())
    if isinstance(result, Iterable) and not isinstance(result, str):
        return [tensor for part in result for tensor in outputs(part)]
    return []


@torch.no_grad()
def _randomize(model: nn.Module, generator: torch.Generator) -> None:
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.add_(0.2 * noise)  # a norm's weight or a bias, where its initial value has left it
        elif id(parameter) in embeddings or parameter.dim() == 3:  # a table of positions has a batch dimension in ViT
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)


def _tokens(batch: int, length: int, generator: torch.Generator) -> Inputs:
    return (), {"input_ids": torch.randint(VOCABULARY, (batch, length), generator=generator)}


def _image(batch: int, length: int, generator: torch.Generator) -> Inputs:
    return (), {"pixel_values": torch.randn(batch, CHANNELS, IMAGE, IMAGE, generator=generator)}


def _conditioned(batch: int, length: int, generator: torch.Generator) -> Inputs:
    return (
        torch.randn(batch, length, HIDDEN, generator=generator),
        torch.randn(batch, HIDDEN, generator=generator),
    ), {}


def _published(config: str, model: str, attention: str = "sdpa", **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        configuration = getattr(transformers, config)(**_SIZES | settings)
        return getattr(transformers, model)._from_config(configuration, attn_implementation=attention)

    return build


_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": HEAD}  # two queries to a key


class EpsOutside(nn.Module):
    """Pre-norm: x * w / (rms(x) + eps), rotary by pairs from a table, a GELU gate whose columns alternate with the values'."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(EpsOutsideLayer() for _ in range(LAYERS))
        self.norm = EpsOutsideNorm()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        frequency = 10000.0 ** -(torch.arange(0, HEAD, 2) / HEAD)
        angle = torch.arange(POSITIONS)[:, None] * frequency
        self.table = nn.Buffer(torch.stack((angle.cos(), angle.sin())), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        table = self.table[:, : x.shape[1]]
        for layer in self.layers:
            x = layer(x, table)
        return self.head(self.norm(x))


class EpsOutsideNorm(nn.Module):
    def __init__(self, eps: float = 0.05) -> None:  # large enough to be missed where it is left away or misplaced
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        rms = x.float().square().mean(-1, keepdim=True).sqrt()
        return (x * self.weight / (rms + self.eps)).to(x.dtype)  # the weight in x's precision, the division in float32


class EpsOutsideLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.gate_norm = EpsOutsideNorm(), EpsOutsideNorm()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 2 * WIDE, bias=False)
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = map(_heads, self.qkv(self.attention_norm(x)).chunk(3, -1))
        x = x + self.out(_attend(_rotated_pairs(q, table), _rotated_pairs(k, table), v, causal=True))
        both = self.up(self.gate_norm(x))
        return x + self.down(F.gelu(both[..., 0::2], approximate="tanh") * both[..., 1::2])


class PostNormTied(nn.Module):
    """Post-norm, each norm after its sum and without parameters; relu squared; the layers share matrices, not biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        first, *others = layers = [PostNormLayer() for _ in range(LAYERS)]
        for layer in others:
            layer.up.weight, layer.down.weight = first.up.weight, first.down.weight
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class PostNormLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, elementwise_affine=False)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = _heads(self.q(x)), _heads(self.k(x)), _heads(self.v(x))
        x = self.norm(x + self.out(_attend(q, k, v)))
        return self.norm(x + self.down(F.relu(self.up(x)).square()))


class AdaNorm(nn.Module):
    """As in DiT: norms without parameters, and a shift, a scale and a gate per sample from what it is conditioned on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AdaNormLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.head = nn.Linear(HIDDEN, 2 * PATCH * PATCH)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cond)
        shift, scale = self.modulation(F.silu(cond)).chunk(2, -1)
        return self.head(_modulated(self.norm(x), shift, scale))


class AdaNormLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(HIDDEN, 6 * HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(F.silu(cond)).chunk(6, -1)
        q, k, v = map(_heads, self.qkv(_modulated(self.norm(x), shift, scale)).chunk(3, -1))
        x = x + gate[:, None] * self.out(_attend(q, k, v))
        y = F.gelu(self.up(_modulated(self.norm(x), shift2, scale2)), approximate="tanh")
        return x + gate2[:, None] * self.down(y)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def _rotated_pairs(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


_ENTRIES = [
    Entry("llama", _published("LlamaConfig", "LlamaForCausalLM", **_GROUPED), _tokens, padded=True),
    Entry("qwen2", _published("Qwen2Config", "Qwen2ForCausalLM", num_key_value_heads=2), _tokens, padded=True),
    Entry("qwen3", _published("Qwen3Config", "Qwen3ForCausalLM", **_GROUPED), _tokens, padded=True),
    Entry(
        "mistral",
        _published("MistralConfig", "MistralForCausalLM", sliding_window=WINDOW, **_GROUPED),
        _tokens,
        padded=True,
    ),
    Entry(
        "gemma2",
        # sdpa would leave the cap on the scores away without a word. The caps are small enough to bend these values, and
        # the scale of the scores is not that of the head.
        _published(
            "Gemma2Config",
            "Gemma2ForCausalLM",
            attention="eager",
            sliding_window=WINDOW,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=6.0,
            query_pre_attn_scalar=24,
            **_GROUPED,
        ),
        _tokens,
        padded=True,
    ),
    Entry("gpt2", _published("GPT2Config", "GPT2LMHeadModel", n_inner=2 * HIDDEN), _tokens, padded=True),
    Entry(
        "gpt_neox",
        _published(
            "GPTNeoXConfig",
            "GPTNeoXForCausalLM",
            use_parallel_residual=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        ),
        _tokens,
        padded=True,
    ),
    Entry("phi3", _published("Phi3Config", "Phi3ForCausalLM", num_key_value_heads=2), _tokens, padded=True),
    Entry("bert", _published("BertConfig", "BertForMaskedLM"), _tokens, padded=True),
    Entry(
        "vit",
        _published(
            "ViTConfig",
            "ViTForImageClassification",
            image_size=IMAGE,
            patch_size=PATCH,
            num_channels=CHANNELS,
            num_labels=7,
        ),
        _image,
    ),
    Entry("eps_outside", EpsOutside, _tokens),
    Entry("post_norm_tied", PostNormTied, _tokens),
    Entry("ada_norm", AdaNorm, _conditioned),
]
ZOO: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
