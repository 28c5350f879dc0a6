"""Language models: a decoder-only network, its files and its tokens.

Names are imported when they are first used, so that ``import offbeat.llm`` needs neither torch nor an extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.llm.files import read_folder, write_folder
    from offbeat.llm.shape import RopeScaling, Shape, config_of, shape_of
    from offbeat.llm.tokens import CharTokenizer, HubTokenizer, Stream, Tokenizer, check_fits, load_tokenizer

__all__ = [
    "CharTokenizer",
    "HubTokenizer",
    "RopeScaling",
    "Shape",
    "Stream",
    "Tokenizer",
    "check_fits",
    "config_of",
    "load_tokenizer",
    "read_folder",
    "shape_of",
    "write_folder",
]

_HOMES = {
    "CharTokenizer": "offbeat.llm.tokens",
    "HubTokenizer": "offbeat.llm.tokens",
    "RopeScaling": "offbeat.llm.shape",
    "Shape": "offbeat.llm.shape",
    "Stream": "offbeat.llm.tokens",
    "Tokenizer": "offbeat.llm.tokens",
    "check_fits": "offbeat.llm.tokens",
    "config_of": "offbeat.llm.shape",
    "load_tokenizer": "offbeat.llm.tokens",
    "read_folder": "offbeat.llm.files",
    "shape_of": "offbeat.llm.shape",
    "write_folder": "offbeat.llm.files",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'offbeat.llm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
