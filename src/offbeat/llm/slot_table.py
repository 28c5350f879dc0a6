"""The host's side of the slots: which response each one holds, the tokens so far, and the order of slots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.llm.layout import FREE, HELD, ROW, ceil_to, groups_of, last_positions, length_classes, moves
from offbeat.llm.open_response import Open
from offbeat.llm.step import Group, Slots


class SlotTable:
    """A row for each slot of the device, in the same order.

    A slot is free, held (its response has memory and is not computed) or a row. `arrange` moves slots, here
    and on the device, so that rows come first and the longest are in front; `Open.slot` follows. What changes
    the state of a slot only notes that this is due.

    Args:
        slots: those on the device; their number is a multiple of eight.
        num_usable: how many of them responses may have.
        bucket: attention looks at multiples of so many positions.
    """

    def __init__(self, slots: Slots, num_usable: int, bucket: int) -> None:
        size, length = slots.cache[0][0].shape[0], slots.cache[0][0].shape[2]
        self.tokens = np.zeros((size, length), np.int32)
        self.log_probs = np.zeros((size, length), np.float32)
        self.made_s = np.full((size, length), np.nan)  # seconds since 1970
        self.num_rows = 0  # as arranged last
        self._slots, self._num_usable, self._bucket = slots, num_usable, bucket
        self._size, self._length = size, length
        self._at: list[Open | None] = [None] * size
        self._position = np.zeros(size, np.int64)  # of the last token of a row
        self._classes = np.full(size, FREE, np.int64)
        self._class_ends = np.zeros(size, np.int64)  # last positions of the classes of rows
        self._regions: list[tuple[int, int]] = []  # begin, end
        self._is_arranged = True
        self._grouped: tuple[Any, tuple[Group, ...]] = (None, ())

    # ------------------------------------------------------------ what there is

    @property
    def num_active(self) -> int:
        """Number of rows, also of those that are not arranged yet."""
        return int((self._classes >= 0).sum())

    @property
    def num_held(self) -> int:
        """Number of slots whose response is not computed."""
        return int((self._classes == HELD).sum())

    @property
    def num_free(self) -> int:
        """Number of slots that responses may still have."""
        return self._num_usable - int((self._classes != FREE).sum())

    @property
    def responses(self) -> list[Open]:
        """Those with a slot, in the order of slots."""
        return [one for one in self._at if one is not None]

    def known(self, one: Open) -> int:
        """Return the number of tokens of a sequence so far."""
        return int(self._position[one.slot]) + 1 if one.is_row else one.length

    # ------------------------------------------------------------ states of slots

    def put(self, ones: Sequence[Open]) -> None:
        """Give free slots to responses, which are held then."""
        free = np.flatnonzero(self._classes == FREE).tolist()
        for one, slot in zip(ones, free, strict=False):
            one.slot, self._at[slot], self._classes[slot] = slot, one, HELD
            self._is_arranged = False

    def take_out(self, one: Open) -> None:
        """Free the slot of a response."""
        self._at[one.slot] = None
        self._classes[one.slot] = FREE
        one.slot, one.is_row, self._is_arranged = -1, False, False

    def start(self, ones: Sequence[Open]) -> None:
        """Make held responses rows."""
        for one in ones:
            one.is_row = True
            self._position[one.slot] = one.length - 1
            self._classes[one.slot] = ROW
        self._is_arranged = False

    def pause(self, one: Open) -> None:
        """Make a row a slot that is held."""
        one.length, one.is_row = self.known(one), False
        self._classes[one.slot] = HELD
        self._is_arranged = False

    def append(
        self,
        slots: NDArray[np.int64],
        tokens: NDArray[np.int32],
        log_probs: NDArray[np.float32],
        has_ended: NDArray[np.int32],
    ) -> list[Open]:
        """Write the next token of rows; return those that have ended, which are held from now on."""
        position = self._position[slots] + 1
        self._position[slots] = position
        self.tokens[slots, position] = tokens
        self.log_probs[slots, position] = log_probs
        self.made_s[slots, position] = time.time()
        ended = []
        for index in np.flatnonzero(has_ended):
            one = self._at[slots[index]]
            assert one is not None, "a slot without a response is no row"
            self.pause(one)
            ended.append(one)
        if self._is_arranged and (position > self._class_ends[slots]).any():
            self._is_arranged = False
        return ended

    # ------------------------------------------------------------ the order of slots

    def arrange(self) -> None:
        """Move slots so that rows come first, the longest in front."""
        if self._is_arranged:
            return
        bucket, rows = self._bucket, np.flatnonzero(self._classes >= 0)
        self._classes[rows] = length_classes(self._position[rows], bucket)
        sources, targets = moves(self._classes)
        if len(sources):
            self._move(sources, targets)
        classes = self._classes[self._classes >= 0]
        self.num_rows = len(classes)
        self._class_ends[: self.num_rows] = last_positions(classes, bucket)
        ends = [int(end) for end in np.flatnonzero(np.diff(classes, append=-1)) + 1] if len(classes) else []
        self._regions = list(zip([0, *ends], ends, strict=False))
        self._is_arranged = True

    def _move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        longest = max(self.known(one) for slot in sources if (one := self._at[slot]) is not None)
        length = min(self._length, ceil_to(longest, self._bucket))
        self._slots.move(sources.tolist(), targets.tolist(), length)
        moved = [self._at[slot] for slot in sources]
        gone = np.setdiff1d(sources, targets)
        for array in (self.tokens, self.log_probs, self.made_s, self._position, self._classes):
            array[targets] = array[sources]
        self._classes[gone] = FREE
        for slot in gone:
            self._at[slot] = None
        for slot, one in zip(targets.tolist(), moved, strict=True):
            assert one is not None, "only slots in use move"
            self._at[slot], one.slot = one, slot

    def groups(self) -> tuple[Group, ...]:
        """Return the rows of the next step, divided by the positions that they look at."""
        lengths = [
            min(self._length, ceil_to(int(self._position[begin:end].max()) + 1, self._bucket))
            for begin, end in self._regions
        ]
        regions = tuple((end, length) for (_, end), length in zip(self._regions, lengths, strict=True))
        if self._grouped[0] != regions:
            self._grouped = (regions, groups_of(regions, self._size))
        return self._grouped[1]
