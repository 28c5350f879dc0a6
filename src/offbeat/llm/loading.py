"""A folder made an engine, with a sentence for each thing that may stand between them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from offbeat.errors import ConfigError
from offbeat.llm.engine import Engine
from offbeat.llm.files import read_shape
from offbeat.llm.model import Decoder
from offbeat.llm.shape import Shape
from offbeat.llm.tokens import Tokenizer, check_fits, load_tokenizer

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def read_description(folder: Path) -> tuple[Shape, Tokenizer]:
    """Read all but the weights: the shape, and a tokenizer that fits it."""
    if folder.is_file() and folder.suffix.lower() == ".gguf":
        raise ConfigError(
            f"{folder} is a GGUF file; convert it to a folder first: offbeat convert {folder} FOLDER"
        )
    shape = read_shape(folder)
    tokenizer = load_tokenizer(folder)
    check_fits(tokenizer, shape)
    return shape, tokenizer


def open_engine(
    folder: Path,
    shape: Shape,
    *,
    slots: int = 64,
    max_length: int | None = None,
    threads: int = 1,
    dtype: str = "fp32",
    device: str = "cpu",
) -> Engine:
    """Return an engine with the weights of a folder; ``shape`` is its own, from `read_description`."""
    chosen = dtype_of(dtype)
    check_device(device)
    _check_memory(folder, shape, chosen, dtype)
    try:
        return Engine(
            Decoder.read(folder, chosen),
            slots=slots,
            max_length=max_length,
            threads=threads,
            device=device,
        )
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{folder} with {slots} slots does not fit into the memory of {device}: use fewer slots, "
            "a smaller max_length or bf16"
        ) from None


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as ``bf16``."""
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r:.40}: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_device(name: str) -> None:
    """Refuse a device that torch does not know or cannot compute on here."""
    try:
        is_usable = torch.zeros(1, device=name).add(1).device.type != "meta"
        reason = "nothing is computed there"
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        is_usable, reason = False, str(error).strip().partition("\n")[0]
    if not is_usable:
        raise ConfigError(f"torch cannot compute on device {name!r:.40} here ({reason:.200}): use cpu")


def _check_memory(folder: Path, shape: Shape, dtype: torch.dtype, name: str) -> None:
    # What is read and the network made of it are there at once, and then that one and the engine's.
    needed, available = 2 * shape.num_parameters * dtype.itemsize, psutil.virtual_memory().available
    if needed > available:
        fix = "use bf16, which takes half, or" if name == "fp32" and needed <= 2 * available else "use"
        raise ConfigError(
            f"{folder} has {shape.num_parameters / 1e6:,.0f} million parameters; to read them as {name} "
            f"takes {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB are free: "
            f"{fix} a machine with more memory"
        )
