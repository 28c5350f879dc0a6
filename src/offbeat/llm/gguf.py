"""GGUF files of the llama family, converted to folders of Hugging Face's layout."""

from __future__ import annotations

import json
import math
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.llm.files import check_new, fuse, parts_of, write_folder
from offbeat.llm.shape import RopeScaling, Shape, Size
from offbeat.reading import ARRAYS_BYTES, open_file

TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
_INSTALL = "pip install 'offbeat[gguf]'"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4
_ROPE_THETA = 10_000.0
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def convert(file: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Shape:
    """Convert a GGUF file of architecture ``llama`` into a new folder; returns the model's shape.

    Weights are dequantized to ``dtype``; float32 keeps all that is in the file. The tokenizer has to be
    byte-level BPE with the pre-tokenizer ``smollm`` or ``gpt-2``. Example:
    ``convert(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), Path("smollm2"))``.
    """
    file, folder = Path(file), Path(folder)
    check_new(folder)
    packages = _packages()
    content = _read(file)
    try:
        shape = _shape(content)
        with tempfile.TemporaryDirectory() as tokens:
            _write_tokenizer(content.values, Path(tokens), packages)
            read = _reader(content, shape, packages, dtype)
            write_folder(folder, shape, fuse(shape, read), Path(tokens))
    except _Unsupported as error:
        raise ConfigError(f"{file}: {error}") from None
    return shape


class _Unsupported(Exception):
    """A feature of a file that is not supported; the message names it and what is."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in the file: its type, its size with rows first, and where it begins."""

    kind: int
    size: Size
    begin: int


@dataclass(frozen=True, slots=True)
class _Content:
    """A whole file: its bytes, its keys and values, and its tensors."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    values: Mapping[str, Any]
    tensors: Mapping[str, _Stored]


@dataclass(frozen=True, slots=True)
class _Packages:
    gguf: Any
    tokenizers: Any


def _packages() -> _Packages:
    try:
        import gguf
        import tokenizers
    except ImportError as error:
        raise ConfigError(f"GGUF files need the package {error.name}: {_INSTALL}") from None
    return _Packages(gguf, tokenizers)


class _Cursor:
    """Reads values one after another; ValueError for lengths that the file does not have."""

    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]], at: int) -> None:
        self._data = data
        self.at = at

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError(f"{count} bytes at {self.at} of {len(self._data)}")
        self.at += count
        return self._data[self.at - count : self.at].tobytes()

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"a list of values of type {kind}")
        code = _SCALARS[kind]
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"))))


def _read(file: Path) -> _Content:
    try:
        with open_file(file, ARRAYS_BYTES) as opened:
            magic = opened.read(len(_MAGIC))
            if magic != _MAGIC:
                raise ConfigError(
                    f"{file} is not a GGUF file (it begins with {magic!r});"
                    " give one, or a folder with safetensors"
                )
            data: Any = np.memmap(opened, np.uint8, mode="r")
        return _parse(data)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give a GGUF file") from None
    except (ValueError, struct.error, MemoryError) as error:
        raise ConfigError(f"{file} is torn or not a GGUF file ({error}); download it again") from None


def _parse(data: np.ndarray[Any, np.dtype[np.uint8]]) -> _Content:
    cursor = _Cursor(data, len(_MAGIC))
    if (version := cursor.number("I")) not in _VERSIONS:
        raise ValueError(f"version {version}; 2 and 3 are supported")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        values[key] = cursor.value(cursor.number("I"))
    tensors: dict[str, _Stored] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        size = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
        tensors[name] = _Stored(cursor.number("I"), size, cursor.number("Q"))
    alignment = values.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"an alignment of {alignment!r:.20}")
    start = cursor.at + -cursor.at % alignment
    return _Content(
        data, values, {name: _Stored(at.kind, at.size, start + at.begin) for name, at in tensors.items()}
    )


def _shape(content: _Content) -> Shape:
    values = content.values
    if (name := values.get("general.architecture")) != "llama":
        raise _Unsupported(f"general.architecture is {name!r:.40}; llama is supported")
    if values.get("llama.expert_count"):
        raise _Unsupported("llama.expert_count means a mixture of experts; dense layers are supported")
    width, num_heads = _count(values, "llama.embedding_length"), _count(values, "llama.attention.head_count")
    head_size = _count(values, "llama.attention.key_length", default=max(width // num_heads, 1))
    if (rotated := values.get("llama.rope.dimension_count", head_size)) != head_size:
        raise _Unsupported(f"llama.rope.dimension_count is {rotated}; rotating the whole head is supported")
    embed = content.tensors.get("token_embd.weight")
    if embed is None or len(embed.size) != 2:
        raise _Unsupported("token_embd.weight is missing or no matrix; download the file again")
    bos, eos, eot, pad = (
        values.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "padding")
    )
    return Shape(
        architecture="LlamaForCausalLM",
        vocab_size=embed.size[0],
        width=width,
        num_layers=_count(values, "llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=_count(values, "llama.attention.head_count_kv", default=num_heads),
        head_size=head_size,
        ff_width=_count(values, "llama.feed_forward_length"),
        norm_eps=_shortest(values.get("llama.attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=_shortest(values.get("llama.rope.freq_base", _ROPE_THETA)),
        rope_scaling=_scaling(values),
        tied="output.weight" not in content.tensors,
        max_positions=_count(values, "llama.context_length"),
        eos_ids=tuple(dict.fromkeys(token for token in (eos, eot) if token is not None)),
        bos_id=bos,
        pad_id=pad,
    )


def _scaling(values: Mapping[str, Any]) -> RopeScaling | None:
    kind = values.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise _Unsupported(f"llama.rope.scaling.type is {kind!r:.40}; none and linear are supported")
    return RopeScaling("linear", _shortest(values.get("llama.rope.scaling.factor", 1.0)))


def _count(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if not isinstance(value, int) or not 0 < value < 1 << 31:
        raise _Unsupported(f"{key} is {value!r:.40}; one whole number above 0 is supported")
    return value


def _shortest(value: Any) -> float:
    """Return a stored float32 as the number that was meant: 1e-05, not 9.999999747378752e-06."""
    number = float(str(np.float32(value)))
    if not 0 < number < math.inf:
        raise _Unsupported(f"{number} stands where a number above 0 is needed; download the file again")
    return number


def _reader(
    content: _Content, shape: Shape, packages: _Packages, dtype: torch.dtype
) -> Callable[[str], Tensor]:
    """Check that the file has exactly the shape's tensors; returns what reads one by Hugging Face's name."""
    sizes = {name: size for parts in parts_of(shape).values() for name, size in parts}
    names = {name: _stored_name(name) for name in sizes}
    if missing := sorted(set(names.values()) - content.tensors.keys()):
        raise _Unsupported(f"{len(missing)} tensors are missing, first {missing[0]}; download the file again")
    if extra := sorted(content.tensors.keys() - set(names.values())):
        raise _Unsupported(
            f"the tensor {extra[0]} belongs to no network that is supported: llama without biases"
        )
    for name, size in sizes.items():
        if (found := content.tensors[names[name]].size) != size:
            raise _Unsupported(f"{names[name]} has the size {found}, but the header makes it {size}")
        _check_tensor(content, names[name], packages)

    def read(name: str) -> Tensor:
        rows = _dequantized(content, content.tensors[names[name]], packages)
        if "q_proj" in name or "k_proj" in name:
            rows = _hub_order(rows, shape.head_size)
        return torch.from_numpy(np.array(rows, order="C")).to(dtype)

    return read


def _stored_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_PARTS[module]}.weight"


def _check_tensor(content: _Content, name: str, packages: _Packages) -> None:
    stored, kinds = content.tensors[name], packages.gguf.GGMLQuantizationType
    known = {int(kinds[kind]): kind for kind in TENSOR_TYPES}
    if stored.kind not in known:
        kind = next((kind.name for kind in kinds if kind == stored.kind), str(stored.kind))
        raise _Unsupported(f"{name} is stored as {kind}; {', '.join(TENSOR_TYPES)} are supported")
    block, _ = packages.gguf.GGML_QUANT_SIZES[kinds(stored.kind)]
    if stored.size[-1] % block:
        raise _Unsupported(
            f"{name} has rows of {stored.size[-1]}, no multiple of {block}; download the file again"
        )
    if stored.begin + _num_bytes(stored, packages) > len(content.data):
        raise _Unsupported(f"it ends within {name}: it is torn; download it again")


def _num_bytes(stored: _Stored, packages: _Packages) -> int:
    block, size = packages.gguf.GGML_QUANT_SIZES[packages.gguf.GGMLQuantizationType(stored.kind)]
    return math.prod(stored.size) // int(block) * int(size)


def _dequantized(
    content: _Content, stored: _Stored, packages: _Packages
) -> np.ndarray[Any, np.dtype[np.float32]]:
    data = content.data[stored.begin : stored.begin + _num_bytes(stored, packages)]
    rows = data.reshape(*stored.size[:-1], -1)
    found = packages.gguf.quants.dequantize(rows, packages.gguf.GGMLQuantizationType(stored.kind))
    return np.asarray(found, np.float32).reshape(stored.size)


def _hub_order(
    rows: np.ndarray[Any, np.dtype[np.float32]], head_size: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Put rows of queries or keys from pairs beside each other to pairs half a head apart.

    GGUF rotates rows 2i and 2i + 1 of a head together, Hugging Face rows i and i + head_size / 2.
    """
    return rows.reshape(-1, head_size // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_tokenizer(values: Mapping[str, Any], folder: Path, packages: _Packages) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokens = _list(values, "tokens", str)
    merges = _list(values, "merges", str)
    kinds = _list(values, "token_type", int)
    if len(kinds) != len(tokens):
        raise _Unsupported("tokenizer.ggml.token_type and tokens differ in length; download the file again")
    try:
        tokenizer = _byte_level(
            values, tokens, [tuple(merge.split(" ", 1)) for merge in merges], packages.tokenizers
        )
        for kind in (_CONTROL, _USER_DEFINED):
            added = [
                packages.tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, its_kind in zip(tokens, kinds, strict=True)
                if its_kind == kind
            ]
            (tokenizer.add_special_tokens if kind == _CONTROL else tokenizer.add_tokens)(added)
    except _Unsupported:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        raise _Unsupported(
            f"its tokenizer cannot be built ({error!s:.200}); download the file again"
        ) from None
    config = _tokenizer_config(values, tokens)
    if config["add_bos_token"] and "bos_token" in config:
        bos = config["bos_token"]
        tokenizer.post_processor = packages.tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8"
    )


def _byte_level(values: Mapping[str, Any], tokens: list[str], merges: list[Any], package: Any) -> Any:
    model, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in ("smollm", "gpt-2"):
        raise _Unsupported(
            f"its tokenizer is {model!r:.40} with pre-tokenizer {pre!r:.40};"
            " gpt2 (byte-level BPE) with smollm or gpt-2 is supported"
        )
    vocab = {token: place for place, token in enumerate(tokens)}
    tokenizer = package.Tokenizer(package.models.BPE(vocab=vocab, merges=merges))
    steps = [package.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if pre == "smollm":
        steps.insert(0, package.pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = package.pre_tokenizers.Sequence(steps)
    tokenizer.decoder = package.decoders.ByteLevel()
    return tokenizer


def _tokenizer_config(values: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(values.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": _count(values, "llama.context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = values.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    if isinstance(template := values.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return config


def _list(values: Mapping[str, Any], key: str, kind: type[Any]) -> list[Any]:
    found = values.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
        raise _Unsupported(f"tokenizer.ggml.{key} is missing or no list; use a GGUF file with its tokenizer")
    return found
