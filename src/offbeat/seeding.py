"""Seeds derived from (run seed, role, counters), so that no random state has to be saved or shared."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, role: str, *counters: int) -> int:
    """Return a 63-bit seed that depends on every argument and on nothing else.

    Example: ``derive_seed(1, "collect", 42)`` is the seed of ticket 42 in a run with seed 1.
    """
    text = f"{run_seed}/{role}/" + "/".join(map(str, counters))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def reseed(seed: int, rollbacks: int) -> int:
    """The seed of a ticket after a run went back this many times to collect other samples."""
    return seed if rollbacks == 0 else derive_seed(seed, "rollback", rollbacks)
