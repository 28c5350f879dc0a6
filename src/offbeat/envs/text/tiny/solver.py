"""Exact solutions of tiny games: the fewest actions to the end from any state, and the discounted value.

Nothing that is held is in the way of anything, and a thing that is let go is never nearer than before, so
within an errand the shortest solution fetches the tool, opens, fetches the treasure and brings it. An errand
ends with everything in its place, so the whole is the sum of errands.
"""

from __future__ import annotations

from offbeat.envs.text.tiny.game import TinyGame
from offbeat.envs.text.tiny.world import World

HALL = 0


def score_times(game: TinyGame) -> tuple[int, ...]:
    """Return after how many actions the shortest solution scores each point that is still to be had.

    Example: ``(4, 15)``: the next point with the fourth action, the last one with the fifteenth.
    """
    done, room, held, opened = game.state
    times: list[int] = []
    for number in range(done, len(game.world.errands)):
        start = times[-1] if times else 0
        times += [start + count for count in _counts(game.world, number, room, held, opened)]
        room, held, opened = HALL, 0, 0
    return tuple(times)


def value(game: TinyGame, discount: float) -> float:
    """Return the largest discounted sum of scores from here; the reward of the next action counts in full.

    No way of playing scores any point earlier than the shortest solution does.
    """
    return sum(discount ** (count - 1) for count in score_times(game))


def _counts(world: World, number: int, room: int, held: int, opened: int) -> tuple[int, ...]:
    """Count actions until the errand's thing is open, unless it is, and until the treasure is brought."""
    errand = world.errands[number]
    closed = world.closed[errand.closed]
    if held >> errand.treasure & 1:
        return (world.distance[room][HALL] + 1,)
    bring = world.distance[closed.room][HALL] + 2
    if opened >> errand.closed & 1:
        return (world.distance[room][closed.room] + bring,)
    fetch, at = 0, room
    if not held >> closed.tool & 1:
        at = world.things[closed.tool].room
        fetch = world.distance[room][at] + 1
    to_open = fetch + world.distance[at][closed.room] + 1
    return to_open, to_open + bring


def next_action(game: TinyGame) -> str | None:
    """Return the next action of the shortest solution; None when all is done."""
    done, _, held, opened = game.state
    world = game.world
    if done == len(world.errands):
        return None
    errand = world.errands[done]
    closed = world.closed[errand.closed]
    treasure, tool = world.things[errand.treasure], world.things[closed.tool]
    if held >> errand.treasure & 1:
        return _at(game, HALL, f"give {treasure.name}")
    if opened >> errand.closed & 1:
        return _at(game, closed.room, f"take {treasure.name}")
    if held >> closed.tool & 1:
        return _at(game, closed.room, f"use {tool.name} on {closed.name}")
    return _at(game, tool.room, f"take {tool.name}")


def _at(game: TinyGame, room: int, action: str) -> str:
    """Return the action if this is the room for it, else the way there."""
    here = game.state[1]
    return action if here == room else f"go {game.world.rooms[game.world.ways[here][room]]}"
