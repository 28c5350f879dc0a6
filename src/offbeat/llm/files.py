"""Folders of Hugging Face's layout: a model's shape and weights, read without running anything."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offbeat.errors import ConfigError, OffbeatError
from offbeat.llm.shape import Shape, Size, config_of, shape_of, tensor_sizes, token_ids_of
from offbeat.reading import ARRAYS_BYTES, DESCRIPTION_BYTES, open_file, parse_json, read_file

Part = tuple[str, Size]
"""A tensor's name and size in a Hugging Face folder."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "characters.json",
    "words.json",
)
_TOKENIZER_BYTES = 1 << 28
_INDEX_BYTES = 1 << 26
_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DOWNLOAD = "copy or download the folder again"
_HEAD = "lm_head.weight"
_EMBED = "model.embed_tokens.weight"


def read_folder(folder: Path, dtype: torch.dtype | None = None) -> tuple[Shape, dict[str, Tensor]]:
    """Read a model's shape and weights; ConfigError for whatever is missing, torn, strange or unsupported.

    Weights have the names and sizes of ``shape.tensor_sizes`` and one dtype: the given one, or the narrowest
    that holds all stored ones. Nothing in the folder is run or unpickled.
    """
    shape = read_shape(folder)
    with ExitStack() as stack:
        stored = _open_weights(Path(folder), stack)
        _check_names(Path(folder), shape, stored)
        chosen = dtype or reduce(torch.promote_types, {_dtype(stored[name], name) for name in stored})

        def read(name: str) -> Tensor:
            return cast(Tensor, stored[name].get_tensor(name)).to(chosen, copy=True)

        tensors = fuse(shape, read)
        if shape.tied and _HEAD in stored and not torch.equal(read(_HEAD), tensors["embed"]):
            raise ConfigError(
                f"{folder}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBED};"
                " set tie_word_embeddings to false in config.json, or remove the tensor"
            )
    return shape, tensors


def read_shape(folder: Path) -> Shape:
    """Read ``config.json`` and, where there is one, ``generation_config.json``."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        hint = f"give the folder that holds config.json and {WEIGHTS}"
        if what == "does not exist" and len(folder.parts) == 2 and not folder.is_absolute():
            hint += f". A model of that name on Hugging Face: hf download {folder} --local-dir FOLDER"
        raise ConfigError(f"{folder} {what}; {hint}")
    if not (folder / "config.json").exists():
        hint = f"give a folder of Hugging Face's layout, with config.json and {WEIGHTS}"
        if files := sorted(path.name for path in folder.glob("*.gguf")):
            hint = f"convert {files[0]} to one: offbeat convert {folder / files[0]} FOLDER"
        raise ConfigError(f"{folder} has no config.json; {hint}")
    config = _read_json(folder / "config.json", DESCRIPTION_BYTES)
    generation = folder / "generation_config.json"
    ends = _read_json(generation, DESCRIPTION_BYTES) if generation.exists() else None
    try:
        return shape_of(config, ends)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from None


def fuse(shape: Shape, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return weights by our names, made of tensors that ``read`` returns by Hugging Face's names."""
    return {
        name: torch.cat([read(part) for part, _ in parts]) if len(parts) > 1 else read(parts[0][0])
        for name, parts in parts_of(shape).items()
    }


def split(shape: Shape, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by Hugging Face's names: views of ours. ConfigError when names or sizes do not fit."""
    sizes = tensor_sizes(shape)
    if tensors.keys() != sizes.keys():
        missing, extra = _listed(sizes.keys() - tensors.keys()), _listed(tensors.keys() - sizes.keys())
        raise ConfigError(f"weights do not fit the shape: missing {missing}; superfluous {extra}")
    for name, size in sizes.items():
        if tuple(tensors[name].shape) != size:
            raise ConfigError(f"{name} has the size {tuple(tensors[name].shape)}; the shape needs {size}")
    found: dict[str, Tensor] = {}
    for name, parts in parts_of(shape).items():
        pieces = torch.split(tensors[name].detach(), [size[0] for _, size in parts])
        found |= {part: piece for (part, _), piece in zip(parts, pieces, strict=True)}
    return found


def parts_of(shape: Shape) -> dict[str, list[Part]]:
    """Return, for each of our weights, the tensors of Hugging Face that its rows are made of."""
    queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    rows = {
        "qkv": (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)),
        "out": (("self_attn.o_proj", shape.width),),
        "gate_up": (("mlp.gate_proj", shape.ff_width), ("mlp.up_proj", shape.ff_width)),
        "down": (("mlp.down_proj", shape.width),),
        "input_norm": (("input_layernorm", shape.width),),
        "post_norm": (("post_attention_layernorm", shape.width),),
        "q_norm": (("self_attn.q_norm", shape.head_size),),
        "k_norm": (("self_attn.k_norm", shape.head_size),),
    }
    top = {"embed": _EMBED, "norm": "model.norm.weight", "head": _HEAD}
    parts: dict[str, list[Part]] = {}
    for name, size in tensor_sizes(shape).items():
        if name in top:
            parts[name] = [(top[name], size)]
            continue
        _, layer, kind = name.split(".")
        suffix = "bias" if kind.endswith("_bias") else "weight"
        parts[name] = [
            (f"model.layers.{layer}.{module}.{suffix}", (count, *size[1:]))
            for module, count in rows[kind.removesuffix("_bias")]
        ]
    return parts


def write_folder(
    folder: Path, shape: Shape, tensors: Mapping[str, Tensor], tokenizer_files_from: Path | None = None
) -> None:
    """Write a model that transformers loads: a new folder, which appears when all of it is on the disk.

    ``tensors`` are ours, of one of float32, float16 and bfloat16. Tokenizer files come from another folder.
    """
    folder = Path(folder).absolute()
    check_new(folder)
    parts = split(shape, tensors)
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in parts.values()})
    if len(kinds) > 1 or getattr(torch, kinds[0]) not in _DTYPES.values():
        raise ConfigError(f"weights are {' and '.join(kinds)}; give all as float32, float16 or bfloat16")
    copied = _tokenizer_files(tokenizer_files_from)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write(temporary / "config.json", _as_json(config_of(shape, kinds[0])))
        _write_weights(temporary / WEIGHTS, parts)
        # safetensors makes files that only their owner reads.
        shutil.copymode(temporary / "config.json", temporary / WEIGHTS)
        _write(temporary / "generation_config.json", _as_json(token_ids_of(shape)))
        for name, data in copied.items():
            _write(temporary / name, data)
        if folder.exists():
            folder.rmdir()
        temporary.replace(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise OffbeatError(
            f"{folder} cannot be written ({error!s:.200}); make room there, or give a folder elsewhere"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_new(folder: Path) -> None:
    """Refuse a folder that holds something already."""
    try:
        is_taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}; give a new folder") from None
    if is_taken:
        raise ConfigError(f"{folder} exists and is not empty; give a new folder, or remove it first")


def _tokenizer_files(source: Path | None) -> dict[str, bytes]:
    if source is None:
        return {}
    found = {
        name: _read(Path(source) / name, _TOKENIZER_BYTES)
        for name in TOKENIZER_FILES
        if (Path(source) / name).exists()
    }
    if not found:
        raise ConfigError(f"{source} has no tokenizer files; give the folder that holds tokenizer.json")
    return found


def _write_weights(path: Path, parts: Mapping[str, Tensor]) -> None:
    # A view of a part of its storage is contiguous, but saving wants tensors that share no memory.
    save_file({name: tensor.cpu().clone() for name, tensor in parts.items()}, path, {"format": "pt"})
    _sync(path)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    _sync(path)


def _as_json(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_weights(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Open all files of weights; returns the opened file of each tensor."""
    stored: dict[str, Any] = {}
    for name, listed in _weight_files(folder).items():
        path = folder / name
        try:
            open_file(path, ARRAYS_BYTES).close()
            opened = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{path} is missing, torn or no safetensors file ({error}); {_DOWNLOAD}"
            ) from None
        held = set(opened.keys())
        if listed is not None and (lost := listed - held):
            raise ConfigError(f"{path} lacks {_listed(lost)}, which {INDEX} expects there; {_DOWNLOAD}")
        stored |= dict.fromkeys(held if listed is None else listed, opened)
    return stored


def _weight_files(folder: Path) -> dict[str, set[str] | None]:
    """Return names of files with the tensors to take from each, None for all of them."""
    if (folder / WEIGHTS).exists():
        return {WEIGHTS: None}
    if (folder / INDEX).exists():
        return _indexed(folder / INDEX)
    if pickles := sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind)):
        raise ConfigError(
            f"{folder} has weights as pickle only ({pickles[0]}), which could run code;"
            " save them as safetensors with transformers:"
            " AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
        )
    raise ConfigError(f"{folder} has no weights; it needs {WEIGHTS}, or {INDEX} and the files it names")


def _indexed(path: Path) -> dict[str, set[str] | None]:
    places = _read_json(path, _INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConfigError(f"{path} has no weight_map of tensors and their files; {_DOWNLOAD}")
    files: dict[str, set[str]] = {}
    for tensor, name in places.items():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or "\\" in name
            or not name.endswith(".safetensors")
        ):
            raise ConfigError(
                f"{path} looks for {tensor} in {name!r:.80}; only .safetensors files beside it are read"
            )
        files.setdefault(name, set()).add(tensor)
    return dict(files)


def _check_names(folder: Path, shape: Shape, stored: Mapping[str, Any]) -> None:
    needed = {name: size for parts in parts_of(shape).values() for name, size in parts}
    if missing := needed.keys() - stored.keys():
        fix = (
            "set tie_word_embeddings to true in config.json if it is the embedding"
            if missing == {_HEAD}
            else _DOWNLOAD
        )
        raise ConfigError(
            f"{folder} lacks {len(missing)} of {len(needed)} tensors: {_listed(missing)}; {fix}"
        )
    # Tied models may store the embedding twice, and older Llama folders hold what rotary embeddings compute.
    extra = {name for name in stored.keys() - needed.keys() if not name.endswith("rotary_emb.inv_freq")}
    if shape.tied:
        extra -= {_HEAD}
        needed[_HEAD] = needed[_EMBED]
    if extra:
        raise ConfigError(
            f"{folder} has {len(extra)} tensors that {shape.architecture} does not use: {_listed(extra)};"
            " check architectures and biases in config.json, or merge adapters into the model first"
        )
    for name, size in needed.items():
        if name in stored and (found := tuple(stored[name].get_slice(name).get_shape())) != size:
            raise ConfigError(
                f"{folder}: {name} has the size {found}, but config.json makes it {size}; {_DOWNLOAD}"
            )


def _dtype(file: Any, name: str) -> torch.dtype:
    kind = file.get_slice(name).get_dtype()
    if kind not in _DTYPES:
        raise ConfigError(f"{name} is stored as {kind}; {', '.join(_DTYPES)} are supported (no quantization)")
    return _DTYPES[kind]


def _read_json(path: Path, limit: int) -> dict[str, Any]:
    try:
        content = parse_json(_read(path, limit))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); {_DOWNLOAD}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object; {_DOWNLOAD}")
    return content


def _read(path: Path, limit: int) -> bytes:
    try:
        return read_file(path, limit)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {_DOWNLOAD}") from None


def _listed(names: Iterable[str]) -> str:
    """Return a few names for an error."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return (", ".join(ordered[:3]) or "nothing") + more
