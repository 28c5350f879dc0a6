"""Language models: a decoder-only network, engines that generate with it, its files and its tokens.

Names are imported when they are first used, so that ``import offbeat.llm`` needs neither torch nor an extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.llm.backend import Backend
    from offbeat.llm.engine import Engine
    from offbeat.llm.files import read_folder, write_folder
    from offbeat.llm.model import Decoder, Packing
    from offbeat.llm.reference import TransformersBackend
    from offbeat.llm.requests import Request, Response
    from offbeat.llm.scoring import Scorer, Scores
    from offbeat.llm.shape import RopeScaling, Shape, config_of, shape_of
    from offbeat.llm.tokens import (
        CharTokenizer,
        HubTokenizer,
        Stream,
        Tokenizer,
        check_fits,
        load_tokenizer,
        text_after,
    )
    from offbeat.llm.words import WordTokenizer

__all__ = [
    "Backend",
    "CharTokenizer",
    "Decoder",
    "Engine",
    "HubTokenizer",
    "Packing",
    "Request",
    "Response",
    "RopeScaling",
    "Scorer",
    "Scores",
    "Shape",
    "Stream",
    "Tokenizer",
    "TransformersBackend",
    "WordTokenizer",
    "check_fits",
    "config_of",
    "load_tokenizer",
    "read_folder",
    "shape_of",
    "text_after",
    "write_folder",
]

_HOMES = {
    "Backend": "offbeat.llm.backend",
    "CharTokenizer": "offbeat.llm.tokens",
    "Decoder": "offbeat.llm.model",
    "Engine": "offbeat.llm.engine",
    "HubTokenizer": "offbeat.llm.tokens",
    "Packing": "offbeat.llm.model",
    "Request": "offbeat.llm.requests",
    "Response": "offbeat.llm.requests",
    "RopeScaling": "offbeat.llm.shape",
    "Scorer": "offbeat.llm.scoring",
    "Scores": "offbeat.llm.scoring",
    "Shape": "offbeat.llm.shape",
    "Stream": "offbeat.llm.tokens",
    "Tokenizer": "offbeat.llm.tokens",
    "TransformersBackend": "offbeat.llm.reference",
    "WordTokenizer": "offbeat.llm.words",
    "check_fits": "offbeat.llm.tokens",
    "config_of": "offbeat.llm.shape",
    "load_tokenizer": "offbeat.llm.tokens",
    "read_folder": "offbeat.llm.files",
    "shape_of": "offbeat.llm.shape",
    "text_after": "offbeat.llm.tokens",
    "write_folder": "offbeat.llm.files",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'offbeat.llm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
