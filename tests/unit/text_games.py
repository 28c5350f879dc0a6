"""What tests of text games share: where story files are, and what is skipped without them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

GAMES = Path(__file__).parents[2].parent / "shared" / "data" / "games"
ZORK, LIBRARY, YOMOMMA = (GAMES / name for name in ("zork1-r119.z3", "library.z5", "yomomma.z8"))
needs_jericho = pytest.mark.skipif(find_spec("jericho") is None, reason="needs offbeat[text]")
needs_textworld = pytest.mark.skipif(find_spec("textworld") is None, reason="needs offbeat[text]")
needs_stories = pytest.mark.skipif(not GAMES.is_dir(), reason=f"story files are not in {GAMES}")
