"""A set of small integers that finds its next member from any point on, whatever its size."""

from __future__ import annotations

_BITS = 10  # of a member within its word: words of 1,024 bits keep both levels short up to 10^6 members

_MASK = (1 << _BITS) - 1


class IntSet:
    """A set of integers >= 0 with `next_from`: one bit for each member in words, one for each word.

    Example: ``IntSet`` with members 2 and 5: ``next_from(3)`` is 5, ``next_from(6)`` is 2.
    """

    __slots__ = ("_len", "_used", "_words")

    def __init__(self) -> None:
        self._words: dict[int, int] = {}
        self._used = 0  # bit i: word i has members
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, member: int) -> bool:
        word = self._words.get(member >> _BITS, 0)
        return bool(word >> (member & _MASK) & 1)

    def add(self, member: int) -> None:
        """Add a member; nothing changes when it is one already."""
        place, bit = member >> _BITS, 1 << (member & _MASK)
        word = self._words.get(place, 0)
        if not word & bit:
            self._words[place] = word | bit
            self._used |= 1 << place
            self._len += 1

    def discard(self, member: int) -> None:
        """Remove a member; nothing changes when it is none."""
        place, bit = member >> _BITS, 1 << (member & _MASK)
        word = self._words.get(place, 0)
        if word & bit:
            self._len -= 1
            if word == bit:
                del self._words[place]
                self._used ^= 1 << place
            else:
                self._words[place] = word ^ bit

    def next_from(self, start: int) -> int | None:
        """Return the smallest member >= ``start``, else the smallest of all; None when there is none."""
        if not self._len:
            return None
        place = start >> _BITS
        upper = start & _MASK
        bits = self._words.get(place, 0) >> upper << upper
        if not bits:
            places = self._used >> (place + 1) << (place + 1) or self._used
            place = (places & -places).bit_length() - 1
            bits = self._words[place]
        return (place << _BITS) + (bits & -bits).bit_length() - 1
