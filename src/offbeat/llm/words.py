"""A tokenizer made from texts: common words are one token each, all others are spelled with learned pieces.

Invented names, which no text it was made from may contain, are spelled: their pieces occur in other names.
"""

from __future__ import annotations

import json
import os
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

from offbeat.errors import ConfigError
from offbeat.llm.chat import checked
from offbeat.reading import DESCRIPTION_BYTES, parse_json, read_file

WORDS = "words.json"
_ALPHABET = "\n " + string.digits + string.ascii_letters + string.punctuation
_CHUNK = re.compile(r" ?[A-Za-z]+| ?[^A-Za-z\n]|\n")
"""Words and single other characters, each with the space before it."""
_UNKNOWN = "\ufffd"
_MOST_CACHED = 100_000
Merge = tuple[str, str]


class WordTokenizer:
    """One id per common word, per piece of other words, and per character. Needs no package.

    Ids 0, 1 and 2 are padding, end and unknown; a word and the same word behind a space have two ids.
    ``merges`` join the characters of words that have no id, the first ones first (BPE,
    https://arxiv.org/abs/1508.07909). Characters outside of ASCII become the unknown id.

    Example: ``WordTokenizer.of(["take rope\\n", "take lamp\\n"])`` has ids for "take", but not for " rope".
    """

    pad_id, end_id, unknown_id = 0, 1, 2
    _FIRST = 3

    def __init__(self, words: Sequence[str], merges: Sequence[Merge]) -> None:
        self.words, self.merges = tuple(words), tuple(merges)
        pieces = [*_ALPHABET, *(left + right for left, right in self.merges), *self.words]
        self._pieces = list(dict.fromkeys(pieces))
        self._ids = {piece: self._FIRST + place for place, piece in enumerate(self._pieces)}
        self._ranks = {merge: rank for rank, merge in reversed(list(enumerate(self.merges)))}
        self._cache: dict[str, tuple[int, ...]] = {word: (self._ids[word],) for word in self.words}

    @staticmethod
    def of(texts: Sequence[str], *, common: float = 0.1, pieces_in: int = 4) -> WordTokenizer:
        """Make a tokenizer from texts, such as one for each game.

        Words of more than a share ``common`` of them, and of two at least, get an id. A piece is learned
        from others when it occurs in ``pieces_in`` of these.
        """
        counts = Counter(word for text in texts for word in set(_CHUNK.findall(text)) if len(word) > 1)
        least = max(2.0, common * len(texts))
        words = sorted(word for word, count in counts.items() if count >= least)
        others = sorted(word for word, count in counts.items() if count < least)
        return WordTokenizer(words, _learn_merges(others, pieces_in))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return self._FIRST + len(self._pieces)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The id that ends a text."""
        return (self.end_id,)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; cut before a space or a newline, its parts have the same ids."""
        return [token for chunk in _CHUNK.findall(text) for token in self._encode_chunk(chunk)]

    def encode_more(self, text: str) -> list[int]:
        """Return the ids of a text that comes after others: there are no tokens around texts."""
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; an unknown character, and an id behind the vocabulary, become U+FFFD."""
        return "".join(map(self._decode_one, ids))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of the messages' contents, joined by newlines."""
        return self.encode("\n".join(turn["content"] for turn in checked(messages)))

    def save(self, folder: Path) -> None:
        """Write ``words.json`` into a folder."""
        path = Path(folder) / WORDS
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            temporary.write_text(json.dumps({"words": self.words, "merges": self.merges}, indent=0) + "\n")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, folder: Path) -> WordTokenizer:
        """Read ``words.json`` of a folder."""
        path = Path(folder) / WORDS
        try:
            content = parse_json(read_file(path, DESCRIPTION_BYTES).decode())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); make the folder again") from None
        entries = content if isinstance(content, dict) else {}
        words, merges = entries.get("words"), entries.get("merges")
        if not _are_words(words) or not isinstance(merges, list) or not all(map(_is_merge, merges)):
            raise ConfigError(f'{path} has to hold {{"words": [" take"], "merges": [["a", "b"]]}}')
        return cls(words, [(left, right) for left, right in merges])

    def _encode_chunk(self, chunk: str) -> tuple[int, ...]:
        found = self._cache.get(chunk)
        if found is None:
            pieces = self._merge(list(chunk))
            found = tuple(self._ids.get(piece, self.unknown_id) for piece in pieces)
            if len(self._cache) < _MOST_CACHED:
                self._cache[chunk] = found
        return found

    def _merge(self, pieces: list[str]) -> list[str]:
        """Join neighbours by the earliest learned merge, until there is none."""
        while len(pieces) > 1:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairwise(pieces)]
            if (best := min(ranks)) == len(self._ranks):
                break
            pieces = _joined(pieces, self.merges[best])
        return pieces

    def _decode_one(self, token: int) -> str:
        if token in (self.pad_id, self.end_id):
            return ""
        place = token - self._FIRST
        return self._pieces[place] if 0 <= place < len(self._pieces) else _UNKNOWN


def _learn_merges(words: Iterable[str], least: int) -> list[Merge]:
    """Learn which pieces to join: again and again the pair of neighbours that most words have."""
    spelled = [list(word) for word in words]
    merges: list[Merge] = []
    while True:
        counts = Counter(pair for pieces in spelled for pair in set(pairwise(pieces)))
        if not counts:
            return merges
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        if counts[best] < least:
            return merges
        merges.append(best)
        spelled = [_joined(pieces, best) for pieces in spelled]


def _joined(pieces: list[str], merge: Merge) -> list[str]:
    found: list[str] = []
    for piece in pieces:
        if found and (found[-1], piece) == merge:
            found[-1] += piece
        else:
            found.append(piece)
    return found


def _are_words(found: object) -> TypeGuard[list[str]]:
    return isinstance(found, list) and all(isinstance(word, str) and word for word in found)


def _is_merge(found: object) -> bool:
    return _are_words(found) and isinstance(found, list) and len(found) == 2
