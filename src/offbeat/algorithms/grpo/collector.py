"""Generates groups of responses and has them rewarded: a wide collector around an engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from offbeat.algorithms.grpo.config import GRPOConfig
from offbeat.algorithms.grpo.dropping import why_dropped
from offbeat.algorithms.grpo.metrics import Load
from offbeat.llm.conversation import Conversation, from_tree, to_tree
from offbeat.llm.dialogues import Dialogues
from offbeat.llm.engine import Engine
from offbeat.llm.model import Decoder
from offbeat.llm.rewards import Reward
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import Problem, Task
from offbeat.llm.tasks.base import most_tokens
from offbeat.seeding import derive_seed
from offbeat.types import Array, Episodes, Piece, Progress, Segment, StateTree, Ticket

_PIECE_S = 0.02


@dataclass(slots=True)
class _Group:
    """A ticket under way: its prompt, and the responses that are over, by sample."""

    ticket: Ticket
    prompt: tuple[int, ...]
    over: dict[int, Conversation] = field(default_factory=dict)


def problem_of(task: Task, ticket: Ticket) -> Problem:
    """Return the training problem of a ticket: it depends on the ticket's seed alone."""
    count = task.num_problems("train")
    return task.problem("train", derive_seed(ticket.seed, "problem") % count)


class GroupCollector:
    """Turns each ticket into a group of responses to one problem, with a reward for each.

    A segment depends on its ticket, the versions that made it and what its task answered, not on what else is
    generated. ``most`` is the number of tickets that the dial ever lets be outstanding.
    """

    def __init__(
        self,
        config: GRPOConfig,
        task: Task,
        shape: Shape,
        *,
        slots: int,
        most: int,
        wake: Callable[[], None] = lambda: None,
        reward: Reward | None = None,
    ) -> None:
        self._config, self._task = config, task
        self._slots, self._most = slots, most
        max_new_tokens = config.max_new_tokens or task.max_new_tokens
        engine = config.engine
        self._engine = Engine(
            Decoder(shape).initialize(0),
            slots=slots,
            max_length=min(shape.max_positions, task.max_prompt_tokens + most_tokens(task, max_new_tokens)),
            bucket=engine.bucket,
            on_swap=engine.on_swap,
            version=-1,
        )
        self._dialogues = Dialogues(
            self._engine,
            task,
            config.limits(max_new_tokens),
            wake,
            temperature=config.temperature,
            reward=reward,
        )
        self._load = Load(self._engine)
        self._version = -1
        self._groups: dict[int, _Group] = {}

    # ------------------------------------------------------------ the contract

    @property
    def capacity(self) -> int:
        """Tickets that slots are enough for, and those that hold none since they wait for rewards."""
        num_waiting = len(self._groups) - len(self._dialogues.generating())
        return min(self._most, max(1, self._slots // self._config.group_size) + num_waiting)

    def accept(self, ticket: Ticket, begun: StateTree | None = None, script: Sequence[Piece] = ()) -> None:
        """Begin a group, continue what is begun, or repeat what a script says."""
        problem = problem_of(self._task, ticket)
        prompt = tuple(self._task.tokenizer.encode(problem.prompt))
        self._groups[ticket.number] = _Group(ticket, prompt)
        known = [
            from_tree(ticket.number, int(sample), tree, self._version)
            for sample, tree in (begun or {}).items()
        ]
        self._dialogues.begin(
            ticket.number,
            problem,
            prompt,
            seed=ticket.seed,
            size=self._config.group_size,
            begun=[(one, answers) for one, answers in known if one.end or len(one.tokens)],
            scripts=script,
        )

    def load(self, version: int, weights: Mapping[str, Any]) -> None:
        """Generate with these weights from the next token on."""
        self._version = version
        self._engine.load(version, {name: torch.as_tensor(value) for name, value in weights.items()})

    def advance(self) -> Progress:
        """Generate for 20 ms, or until a group is whole."""
        began_s, num_before, dialogues = time.perf_counter(), self._dialogues.num_made, self._dialogues
        segments = self._step()
        while not segments and dialogues.is_busy and time.perf_counter() - began_s < _PIECE_S:
            segments = self._step()
        num_tokens = dialogues.num_made - num_before
        idle = not segments and not dialogues.is_busy
        busy_s = 0.0 if idle and not num_tokens else time.perf_counter() - began_s
        return Progress(segments, busy_s, {"tokens": num_tokens}, idle, dialogues.needs if idle else None)

    def cut(self, tickets: Sequence[int]) -> None:
        """End these tickets with the tokens that there are."""
        for number in tickets:
            self._dialogues.cut(number)

    def open_work(self) -> Mapping[int, StateTree]:
        """Return the responses of each ticket as far as they are, with what they were answered."""
        work: dict[int, dict[str, StateTree]] = {}
        for one, response in self._dialogues.begun():
            if one.end or len(response.tokens):
                work.setdefault(one.key, {})[str(one.sample)] = to_tree(response, one.answers, one.end)
        for number, group in self._groups.items():
            for sample, one in group.over.items():
                work.setdefault(number, {})[str(sample)] = to_tree(one.whole, one.answers, one.end)
        return work

    def state_dict(self) -> StateTree:
        """Return nothing: a segment depends on its ticket and the weights."""
        return {}

    def load_state_dict(self, state: StateTree) -> None:
        """Nothing to restore."""

    # ------------------------------------------------------------ segments

    def _step(self) -> list[Segment]:
        """Make a token in each row; return the groups that are whole."""
        began_s, num_steps = time.perf_counter(), self._engine.num_steps
        for one in self._dialogues.step():
            self._groups[one.key].over[one.sample] = one
        if self._engine.num_steps > num_steps:
            self._load.count(began_s)
        size = self._config.group_size
        whole = [number for number, group in self._groups.items() if len(group.over) == size]
        return [self._segment(self._groups.pop(number)) for number in whole]

    def _segment(self, group: _Group) -> Segment:
        ones = [group.over[sample] for sample in sorted(group.over)]
        responses, rewards = [one.whole for one in ones], [one.reward for one in ones]
        data: dict[str, Array] = {
            "prompt": np.array(group.prompt, np.int32),
            "sizes": np.array([len(one.tokens) for one in responses], np.int64),
            "tokens": np.concatenate([one.tokens for one in responses]),
            "log_probs": np.concatenate([one.log_probs for one in responses]),
            "is_own": np.concatenate([one.is_own for one in responses]),
            "rewards": np.array(rewards, np.float64),  # NaN for those that have none
            "made_s": np.concatenate([one.made_s for one in responses]),
            "load": self._load.take(),
        }
        versions = np.concatenate([one.versions for one in responses]).astype(np.int64)
        rewarded = [one for one in ones if math.isfinite(one.reward)]
        returns = tuple(one.reward for one in rewarded)
        return Segment(
            group.ticket,
            data,
            versions if len(versions) else np.array([self._version], np.int64),
            {"tokens": len(versions), **_waits(ones)},
            Episodes(returns, tuple(len(one.whole.tokens) for one in rewarded)),
            pieces=tuple(one.piece for one in ones),
            drop=why_dropped(data["rewards"], self._config),
        )


def _waits(ones: Sequence[Conversation]) -> dict[str, int]:
    """Return the time that responses waited, where they did."""
    waits = {
        "tool_ms": round(1000.0 * sum(one.tool_s for one in ones)),
        "reward_ms": round(1000.0 * sum(one.reward_s for one in ones)),
    }
    return {unit: ms for unit, ms in waits.items() if ms}
