"""Words of the tiny family: places and what is kept there, tools and what they open, and invented names.

The nouns are the same in all games; they carry what can be learned once and for all: where a tool is kept
and what it opens. Names are invented: two syllables, all of which occur in every set of games, in pairs that
occur in one set only.
"""

from __future__ import annotations

from typing import NamedTuple


class Tool(NamedTuple):
    """A tool, the one kind of thing it opens, and the kind of room where it is kept."""

    noun: str
    opens: str
    room: str


KEY = "key"
"""The noun of the one tool that opens only the thing of its own name, and of which there are several."""

_KEPT = {
    "smithy": ("crowbar crate", "hammer vase", "bellows oven"),
    "stable": ("rope well", "pitchfork haystack", "bridle saddlebag"),
    "kitchen": ("corkscrew bottle", "ladle cauldron", "cleaver melon"),
    "workshop": ("saw log", "screwdriver clock", "chisel statue"),
    "garden": ("spade mound", "shears hedge", "rake pile"),
    "harbour": ("net pond", "knife oyster", "oar float"),
    "chapel": ("candle alcove", "censer shrine", "bell belfry"),
    "mine": ("pickaxe boulder", "lantern burrow", "fuse rubble"),
    "mill": ("sieve bin", "lever millstone", "scoop sack"),
    "tower": ("ladder nest", "hook chimney", "telescope mirror"),
    "infirmary": ("tweezers cactus", "scalpel cocoon", "syringe vial"),
    "gatehouse": ("key chest", "whistle kennel", "winch portcullis"),
}
TOOLS = tuple(
    Tool(noun, opens, room)
    for room, pairs in _KEPT.items()
    for noun, opens in (pair.split() for pair in pairs)
)
ROOMS = tuple(_KEPT)
HOME = "hall"
"""The room where games begin and where things are brought."""

_FIRST = """
    bal bren cas cor dar del dro fal fen gar gol hal hes jor kal kem lan lor mar mel nar nol or pel
    quin ras ros sel tar tol ul var ven wil wor yar zan zel bru thal
"""
_SECOND = """
    a ac ad an ax bek bin da dek dor ek el en eth fin ga gan ian ik in ir ka kis lin lo mar mis na
    nor ok on os ra rin ta tis us va vin zo
"""
NUM_SETS = 3


def names_of(part: int) -> list[str]:
    """Return the names that occur in games of one of the `NUM_SETS` sets, and in no other.

    Example: ``names_of(0)[:2]`` are ``["bala", "balan"]``; "balac" belongs to set 1.
    """
    found: dict[str, int] = {}
    for i, first in enumerate(_FIRST.split()):
        for j, second in enumerate(_SECOND.split()):
            found.setdefault(first + second, (i + j) % NUM_SETS)
    return [name for name, owner in found.items() if owner == part]
