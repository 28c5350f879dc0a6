"""The shape of a decoder-only network: Hugging Face's ``config.json`` read and written. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from offbeat.errors import ConfigError

Architecture = Literal["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
Size = tuple[int, ...]

_MODEL_TYPES: Mapping[str, Architecture] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SUPPORTED = "LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM are supported"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_MAX_SIZE = 1 << 31
_MAX_LAYERS = 1_000
_ROPE_THETA = 10_000.0
_NORM_EPS = 1e-6
_QWEN3_HEAD_SIZE = 128
_MAX_POSITIONS: Mapping[Architecture, int] = {
    "LlamaForCausalLM": 2048,
    "Qwen2ForCausalLM": 32768,
    "Qwen3ForCausalLM": 32768,
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Stretching of rotary frequencies for longer texts; ``linear`` divides all of them by ``factor``.

    The other fields are those of ``llama3``: frequencies whose wavelength exceeds
    ``original_max_positions / low_freq_factor`` are divided, those below
    ``original_max_positions / high_freq_factor`` are kept, and those between are interpolated.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything that decides what a decoder-only network computes, apart from its weights.

    Example: ``shape_of(json.loads(Path("model/config.json").read_text()))``.
    """

    architecture: Architecture
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ff_width: int
    norm_eps: float = _NORM_EPS
    rope_theta: float = _ROPE_THETA
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    max_positions: int = 2048
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads: {self.num_kv_heads} does not divide"
                f" num_attention_heads = {self.num_heads}; each key-value head serves equally many heads"
            )
        if self.head_size % 2:
            raise ConfigError(
                f"head_dim: {self.head_size} is odd; rotary embeddings rotate pairs, so it has to be even"
            )
        for key, ids in (("eos_token_id", self.eos_ids), ("bos_token_id", (self.bos_id or 0,))):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise ConfigError(
                        f"{key}: {token} is outside of the vocabulary;"
                        f" ids from 0 to {self.vocab_size - 1} (vocab_size - 1) are supported"
                    )

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied output layer counts once."""
        return sum(math.prod(size) for size in tensor_sizes(self).values())


def tensor_sizes(shape: Shape) -> dict[str, Size]:
    """Return the size of each weight of our network by its name, in the order of computation."""
    sizes: dict[str, Size] = {"embed": (shape.vocab_size, shape.width)}
    for layer in range(shape.num_layers):
        for name, size in _layer_sizes(shape).items():
            sizes[f"layers.{layer}.{name}"] = size
    sizes["norm"] = (shape.width,)
    if not shape.tied:
        sizes["head"] = (shape.vocab_size, shape.width)
    return sizes


def _layer_sizes(shape: Shape) -> dict[str, Size]:
    width, heads = shape.width, shape.num_heads * shape.head_size
    rows = heads + 2 * shape.num_kv_heads * shape.head_size
    sizes: dict[str, tuple[bool, Size]] = {
        "input_norm": (True, (width,)),
        "qkv": (True, (rows, width)),
        "qkv_bias": (shape.qkv_bias, (rows,)),
        "q_norm": (shape.qk_norm, (shape.head_size,)),
        "k_norm": (shape.qk_norm, (shape.head_size,)),
        "out": (True, (width, heads)),
        "out_bias": (shape.out_bias, (width,)),
        "post_norm": (True, (width,)),
        "gate_up": (True, (2 * shape.ff_width, width)),
        "gate_up_bias": (shape.mlp_bias, (2 * shape.ff_width,)),
        "down": (True, (width, shape.ff_width)),
        "down_bias": (shape.mlp_bias, (width,)),
    }
    return {name: size for name, (there, size) in sizes.items() if there}


def shape_of(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> Shape:
    """Read the content of ``config.json``, and of ``generation_config.json`` for the ids that end a text.

    ConfigError names the key, its value and what is supported, for whatever our network does not compute.
    """
    architecture = _architecture(config)
    _refuse_other_networks(config)
    num_layers = _count(config, "num_hidden_layers", limit=_MAX_LAYERS)
    _refuse_other_attention(config, num_layers)
    num_heads = _count(config, "num_attention_heads")
    width = _count(config, "hidden_size")
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    # Qwen2 computes q, k and v with a bias and the rest without, whatever its configuration says.
    attention_bias = not qwen2 and _flag(config, "attention_bias")
    vocab_size = _count(config, "vocab_size")
    max_positions = _count(config, "max_position_embeddings", default=_MAX_POSITIONS[architecture])
    theta, scaling = _rope(config, max_positions)
    pad_id = _token(config, "pad_token_id")
    return Shape(
        architecture=architecture,
        vocab_size=vocab_size,
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_count(config, "num_key_value_heads", default=num_heads),
        head_size=_head_size(config, width, num_heads, qwen3),
        ff_width=_count(config, "intermediate_size"),
        norm_eps=_number(config, "rms_norm_eps", default=_NORM_EPS),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=qwen2 or attention_bias,
        out_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and _flag(config, "mlp_bias"),
        qk_norm=qwen3,
        tied=_flag(config, "tie_word_embeddings"),
        max_positions=max_positions,
        eos_ids=_eos_ids(config, generation or {}),
        bos_id=_token(config, "bos_token_id"),
        # Padding is ours to choose: -1 and ids behind the vocabulary mean that there is none.
        pad_id=pad_id if pad_id is not None and 0 <= pad_id < vocab_size else None,
    )


def config_of(shape: Shape, dtype: str = "float32") -> dict[str, object]:
    """Return the content of a ``config.json`` that transformers loads, with the old and the new rope keys."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        rope |= _rope_keys(shape.rope_scaling)
    model_type = next(kind for kind, name in _MODEL_TYPES.items() if name == shape.architecture)
    config: dict[str, object] = {
        "architectures": [shape.architecture],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.ff_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": rope,
        "tie_word_embeddings": shape.tied,
        **token_ids_of(shape),
    }
    if shape.rope_scaling is not None:
        config["rope_scaling"] = rope
    if shape.architecture != "Qwen2ForCausalLM":
        config["attention_bias"] = shape.qkv_bias
    if shape.architecture == "LlamaForCausalLM":
        config["mlp_bias"] = shape.mlp_bias
    else:
        config["use_sliding_window"] = False
    return config


def token_ids_of(shape: Shape) -> dict[str, object]:
    """Return the special ids as ``config.json`` and ``generation_config.json`` have them."""
    ends = list(shape.eos_ids)
    return {
        "bos_token_id": shape.bos_id,
        "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None,
        "pad_token_id": shape.pad_id,
    }


def _rope_keys(scaling: RopeScaling) -> dict[str, object]:
    keys: dict[str, object] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        keys["low_freq_factor"] = scaling.low_freq_factor
        keys["high_freq_factor"] = scaling.high_freq_factor
        keys["original_max_position_embeddings"] = scaling.original_max_positions
    return keys


def _architecture(config: Mapping[str, object]) -> Architecture:
    named, kind = config.get("architectures"), config.get("model_type")
    found = named[0] if isinstance(named, list) and named else _MODEL_TYPES.get(str(kind))
    if found is None:
        raise ConfigError(f"model_type: {_show(kind)} is unknown; {_SUPPORTED}")
    for model_type, architecture in _MODEL_TYPES.items():
        if found == architecture:
            if kind not in (None, model_type):
                raise ConfigError(
                    f"model_type: {_show(kind)} contradicts architectures, {found}; {_SUPPORTED}"
                )
            return architecture
    raise ConfigError(f"architectures: {_show(found)} is unknown; {_SUPPORTED}")


def _refuse_other_networks(config: Mapping[str, object]) -> None:
    if config.get("quantization_config") is not None:
        raise ConfigError(
            f"quantization_config: {_show(config['quantization_config'])} needs kernels that are not here;"
            " weights in float32, float16 and bfloat16 are supported"
        )
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"hidden_act: {_show(act)} is unknown; silu is supported")
    for key in _EXPERTS:
        if config.get(key):
            raise ConfigError(
                f"{key}: {_show(config[key])} means a mixture of experts; dense layers are supported"
            )


def _refuse_other_attention(config: Mapping[str, object], num_layers: int) -> None:
    kinds = config.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * num_layers:
        raise ConfigError(
            f"layer_types: {_show(kinds)}; full_attention in each of {num_layers} layers is supported"
        )
    window = config.get("sliding_window")
    first = config.get("max_window_layers", 0)
    begins = isinstance(first, int) and first < num_layers
    if _flag(config, "use_sliding_window") and window is not None and begins and kinds is None:
        raise ConfigError(
            f"use_sliding_window: true with sliding_window: {_show(window)};"
            " attention to the whole text is supported (use_sliding_window: false)"
        )


def _head_size(config: Mapping[str, object], width: int, num_heads: int, qwen3: bool) -> int:
    if config.get("head_dim") is not None:
        return _count(config, "head_dim")
    if qwen3:
        return _QWEN3_HEAD_SIZE
    if width % num_heads:
        raise ConfigError(
            f"num_attention_heads: {num_heads} does not divide hidden_size = {width}; give head_dim"
        )
    return width // num_heads


def _rope(config: Mapping[str, object], max_positions: int) -> tuple[float, RopeScaling | None]:
    """Read ``rope_parameters``, or the older ``rope_theta`` beside ``rope_scaling``."""
    # Where both are there, transformers reads the older one.
    section = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(section)
    rope = {} if rope is None else rope
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError(f"{section}: {_show(rope)}; one set of numbers for all layers is supported")
    for key, values in ((f"{section}.partial_rotary_factor", rope), ("partial_rotary_factor", config)):
        if (part := values.get("partial_rotary_factor")) not in (None, 1, 1.0):
            raise ConfigError(f"{key}: {_show(part)}; rotating the whole head is supported (1.0)")
    theta = rope if rope.get("rope_theta") is not None else config
    return _number(theta, "rope_theta", default=_ROPE_THETA), _scaling(config, section, rope, max_positions)


def _scaling(
    config: Mapping[str, object], section: str, rope: Mapping[str, object], max_positions: int
) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in (None, "default"):
        return None
    if kind == "linear":
        return RopeScaling("linear", _number(rope, "factor", section))
    if kind != "llama3":
        raise ConfigError(f"{section}.rope_type: {_show(kind)}; default, linear and llama3 are supported")
    key = "original_max_position_embeddings"
    scaling = RopeScaling(
        kind="llama3",
        factor=_number(rope, "factor", section),
        low_freq_factor=_number(rope, "low_freq_factor", section),
        high_freq_factor=_number(rope, "high_freq_factor", section),
        # transformers prefers the key outside of the section, and takes the maximum where there is none.
        original_max_positions=_count(config if key in config else rope, key, default=max_positions),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError(
            f"{section}.high_freq_factor: {scaling.high_freq_factor}; it has to be above"
            f" low_freq_factor = {scaling.low_freq_factor}"
        )
    return scaling


def _eos_ids(config: Mapping[str, object], generation: Mapping[str, object]) -> tuple[int, ...]:
    source = generation if generation.get("eos_token_id") is not None else config
    found = source.get("eos_token_id")
    if isinstance(found, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in found
    ):
        return tuple(dict.fromkeys(found))
    token = _token(source, "eos_token_id")
    return () if token is None else (token,)


def _token(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigError(f"{key}: {_show(value)} is no token id; a whole number or null is supported")


def _count(
    config: Mapping[str, object], key: str, *, default: int | None = None, limit: int = _MAX_SIZE
) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= limit:
        return value
    raise ConfigError(f"{key}: {_show(value)}; a whole number from 1 to {limit:,} is supported")


def _number(
    config: Mapping[str, object], key: str, section: str | None = None, *, default: float | None = None
) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    name = key if section is None else f"{section}.{key}"
    raise ConfigError(f"{name}: {_show(value)}; a number above 0 is supported")


def _flag(config: Mapping[str, object], key: str) -> bool:
    value = config.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ConfigError(f"{key}: {_show(value)}; true and false are supported")


def _show(value: object) -> str:
    """Return a value as an error shows it: short, and ``missing`` for none."""
    return "missing" if value is None else f"{value!r:.80}"
