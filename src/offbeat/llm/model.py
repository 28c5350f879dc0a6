"""A decoder-only network (Llama, Qwen2, Qwen3 and SmolLM families), one for the learner and the engine.

The learner runs it over packed sequences (`Decoder.forward`), the engine over rows with a cache (`step.py`):
both call `Decoder.run` and differ in nothing but where a token finds the keys and values it attends to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.errors import ConfigError
from offbeat.llm.files import read_folder, write_folder
from offbeat.llm.shape import Shape

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``: queries ``[N, heads, head]``, keys and values ``[N, kv heads, head]`` of the
tokens at hand; returns what they attend to, ``[N, heads * head]``."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Sequences of several lengths, one behind the other in one tensor of N tokens.

    ``positions`` ``[N]`` count from the start of each sequence. ``padded`` ``[B, T]`` are the places of its
    tokens, 0 beyond its end; ``places`` ``[N]`` are the places of the tokens in the padded layout.
    """

    lengths: tuple[int, ...]
    positions: Tensor
    padded: Tensor
    places: Tensor

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Packing:
        """Pack sequences of these lengths. Example: ``Packing.of([3, 2])`` is for 5 tokens."""
        longest, starts = max(lengths), [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        sizes = torch.tensor(lengths)
        steps = torch.arange(longest)
        is_token = steps < sizes[:, None]
        padded = (torch.tensor(starts[:-1])[:, None] + steps) * is_token
        positions = steps.expand(len(lengths), longest)[is_token]
        places = is_token.flatten().nonzero()[:, 0]
        return Packing(tuple(lengths), positions.to(device), padded.to(device), places.to(device))


class Layer(nn.Module):
    """Weights of one transformer layer: q, k and v are rows of one matrix, as are gate and up."""

    def __init__(self, shape: Shape, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__()

        def weight(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, device=device, dtype=dtype))

        def weight_if(is_there: bool, *size: int) -> nn.Parameter | None:
            return weight(*size) if is_there else None

        width, head = shape.width, shape.head_size
        inner, outer = shape.num_heads * head, (shape.num_heads + 2 * shape.num_kv_heads) * head
        self.input_norm = weight(width)
        self.qkv, self.qkv_bias = weight(outer, width), weight_if(shape.qkv_bias, outer)
        self.q_norm, self.k_norm = weight_if(shape.qk_norm, head), weight_if(shape.qk_norm, head)
        self.out, self.out_bias = weight(width, inner), weight_if(shape.out_bias, width)
        self.post_norm = weight(width)
        self.gate_up = weight(2 * shape.ff_width, width)
        self.gate_up_bias = weight_if(shape.mlp_bias, 2 * shape.ff_width)
        self.down, self.down_bias = weight(width, shape.ff_width), weight_if(shape.mlp_bias, width)
        self._eps, self._heads = shape.norm_eps, (shape.num_heads, shape.num_kv_heads)
        self._head, self._is_normed = head, shape.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Return the residual stream ``[N, width]`` after this layer."""
        heads, kv_heads = self._heads
        qkv = F.linear(self._norm(x, self.input_norm), self.qkv, self.qkv_bias)
        qkv = qkv.view(len(x), heads + 2 * kv_heads, self._head)
        if self._is_normed:
            normed = (
                self._norm(qkv[:, :heads], self.q_norm),
                self._norm(qkv[:, heads:-kv_heads], self.k_norm),
            )
            qk = rotated(torch.cat(normed, 1), cos, sin)
        else:
            qk = rotated(qkv[:, :-kv_heads], cos, sin)
        seen = attend(qk[:, :heads], qk[:, heads:], qkv[:, -kv_heads:])
        x = x + F.linear(seen, self.out, self.out_bias)
        gate, up = F.linear(self._norm(x, self.post_norm), self.gate_up, self.gate_up_bias).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down, self.down_bias)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)


class Decoder(nn.Module):
    """The network. ``shape`` says what it computes; its weights are empty until set or `initialize`-d."""

    def __init__(
        self, shape: Shape, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.shape = shape
        size = (shape.vocab_size, shape.width)
        self.embed = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.layers = nn.ModuleList([Layer(shape, device, dtype) for _ in range(shape.num_layers)])
        self.norm = nn.Parameter(torch.empty(shape.width, device=device, dtype=dtype))
        self.head = None if shape.tied else nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self._angles = nn.Buffer(frequencies(shape).to(device), persistent=False)

    @staticmethod
    def read(folder: Path | str, dtype: torch.dtype | None = torch.float32) -> Decoder:
        """Read a folder in the layout of Hugging Face; ``dtype`` None keeps that of its weights."""
        shape, weights = read_folder(Path(folder), dtype)
        model = Decoder(shape, dtype=weights["norm"].dtype)
        model.set_weights(weights)
        return model

    def write(self, folder: Path | str, tokenizer_from: Path | None = None) -> None:
        """Write such a folder, with the tokenizer's files of another one."""
        write_folder(Path(folder), self.shape, self.weights(), tokenizer_from)

    def initialize(self, seed: int) -> Decoder:
        """Draw new weights: normal with deviation 0.02, less for what adds to the residual stream (GPT-2)."""
        generator = torch.Generator().manual_seed(seed)
        inner = 0.02 / math.sqrt(2 * self.shape.num_layers)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                kind = name.rsplit(".", 1)[-1]
                if kind.endswith("norm"):
                    weight.fill_(1.0)
                elif kind.endswith("bias"):
                    weight.zero_()
                else:
                    deviation = inner if kind in ("out", "down") else 0.02
                    drawn = torch.randn(weight.shape, generator=generator) * deviation
                    weight.copy_(drawn)
        return self

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raise ConfigError unless these have all names and shapes of this network's weights."""
        own = dict(self.named_parameters())
        if own.keys() != weights.keys():
            wrong = sorted(own.keys() ^ weights.keys())
            raise ConfigError(
                f"these weights are of another network: {', '.join(wrong[:4])} on one side only"
            )
        for name, weight in own.items():
            if weight.shape != weights[name].shape:
                raise ConfigError(
                    f"these weights are of another network: {name} is {tuple(weights[name].shape)}, "
                    f"{tuple(weight.shape)} is expected"
                )

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights into place; all or none (see `check_weights`)."""
        self.check_weights(weights)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                weight.copy_(weights[name])

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name, without copying them."""
        return {name: weight.detach() for name, weight in self.named_parameters()}

    # ------------------------------------------------------------ computing

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[N, 1, head]`` that rotate queries and keys at these positions."""
        angles = positions.to(torch.float32)[:, None] * self._angles
        cos, sin = angles.cos(), angles.sin()
        dtype = self.norm.dtype
        return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)

    def run(self, tokens: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the final hidden states ``[N, width]`` of tokens ``[N]``."""
        x = F.embedding(tokens, self.embed)
        for index, layer in enumerate(self.layers):

            def at_layer(q: Tensor, k: Tensor, v: Tensor, index: int = index) -> Tensor:
                return attend(index, q, k, v)

            x = layer(x, *rotation, at_layer)
        return F.rms_norm(x, (x.shape[-1],), self.norm, self.shape.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[N, vocabulary]`` in fp32."""
        return F.linear(hidden, self.embed if self.head is None else self.head).float()

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Return the final hidden states ``[N, width]`` of packed sequences; each sees its own past alone."""
        groups = self.shape.num_heads // self.shape.num_kv_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (one[packing.padded].transpose(1, 2) for one in (q, k, v))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
            return seen.transpose(1, 2).flatten(2).flatten(0, 1)[packing.places]

        return self.run(tokens, self.rotation(packing.positions), attend)

    def log_probs(self, tokens: Tensor, packing: Packing, temperature: float = 1.0) -> Tensor:
        """Return log-probs ``[N]`` of each token given those before it; 0 for the first of each sequence."""
        logits = self.logits(self.forward(tokens, packing)) / temperature
        found = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        return F.pad(found, (1, 0)) * (packing.positions > 0)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of heads ``[N, heads, head]`` by their positions (RoPE, https://arxiv.org/abs/2104.09864)."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat([x[..., half:], x[..., :half]], -1), sin)


def frequencies(shape: Shape) -> Tensor:
    """Return the angle per position of each pair of a head, with the scaling of long contexts."""
    angles = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_size, 2).float() / shape.head_size)
    scaling = shape.rope_scaling
    if scaling is None:
        return angles
    if scaling.kind == "linear":
        return angles / scaling.factor
    # Llama 3: long waves are stretched, short ones are kept, those between are mixed.
    waves = scaling.original_max_positions * angles / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return kept * angles + (1.0 - kept) * angles / scaling.factor
