"""Generates groups of responses and rewards them: a wide collector around the engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from offbeat.algorithms.grpo.config import GRPOConfig
from offbeat.algorithms.grpo.dropping import why_dropped
from offbeat.algorithms.grpo.metrics import Load
from offbeat.llm.engine import Engine
from offbeat.llm.model import Decoder
from offbeat.llm.requests import Request, Response
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import Problem, Task
from offbeat.seeding import derive_seed
from offbeat.types import Array, Episodes, Piece, Progress, Segment, Span, StateTree, Ticket

_PIECE_S = 0.02


@dataclass(slots=True)
class _Group:
    """A ticket under way: its problem, and the responses that have ended, by sample."""

    ticket: Ticket
    problem: Problem
    prompt: tuple[int, ...]
    ended: dict[int, Response] = field(default_factory=dict)


def problem_of(task: Task, ticket: Ticket) -> Problem:
    """Return the training problem of a ticket: it depends on the ticket's seed alone."""
    count = task.num_problems("train")
    return task.problem("train", derive_seed(ticket.seed, "problem") % count)


class GroupCollector:
    """Turns each ticket into a group of responses to one problem, with a reward for each.

    A segment depends on its ticket and the versions that made it, not on what else is generated.
    """

    def __init__(self, config: GRPOConfig, task: Task, shape: Shape, *, slots: int) -> None:
        self._config, self._task = config, task
        self._max_new = config.max_new_tokens or task.max_new_tokens
        self.capacity = max(1, slots // config.group_size)
        engine = config.engine
        self._engine = Engine(
            Decoder(shape).initialize(0),
            slots=slots,
            max_length=min(shape.max_positions, task.max_prompt_tokens + self._max_new),
            bucket=engine.bucket,
            on_swap=engine.on_swap,
            version=-1,
        )
        self._load = Load(self._engine)
        self._version = -1
        self._groups: dict[int, _Group] = {}
        self._num_tokens = 0

    # ------------------------------------------------------------ the contract

    def accept(self, ticket: Ticket, begun: StateTree | None = None, script: Sequence[Piece] = ()) -> None:
        """Begin a group, continue what is begun, or repeat what a script says."""
        problem = problem_of(self._task, ticket)
        prompt = tuple(self._task.tokenizer.encode(problem.prompt))
        group = self._groups[ticket.number] = _Group(ticket, problem, prompt)
        open_ones = []
        for sample, tree in (begun or {}).items():
            one = _cut_back(ticket.number, int(sample), tree, self._version)
            if one.end:
                group.ended[one.sample] = one
            elif len(one.tokens):
                open_ones.append(one)
        size = self._config.group_size
        left = tuple(sample for sample in range(size) if sample not in group.ended)
        if left:
            self._engine.submit(
                Request(
                    ticket.number,
                    prompt,
                    num_samples=size,
                    max_new_tokens=min(self._max_new, problem.max_new_tokens or self._max_new),
                    temperature=self._config.temperature,
                    seed=ticket.seed,
                    samples=left,
                    begun=tuple(open_ones),
                    scripts=tuple(script),
                )
            )

    def load(self, version: int, weights: Mapping[str, Any]) -> None:
        """Generate with these weights from the next token on."""
        self._version = version
        self._engine.load(version, {name: torch.as_tensor(value) for name, value in weights.items()})

    def advance(self) -> Progress:
        """Generate for 20 ms, or until a group is whole."""
        began_s, num_tokens, segments = time.perf_counter(), 0, self._whole()
        while not segments and self._engine.is_busy:
            step_s = time.perf_counter()
            for one in self._engine.step():
                num_tokens += int(one.is_own.sum())
                self._groups[one.key].ended[one.sample] = one
            self._load.count(step_s)
            segments = self._whole()
            if time.perf_counter() - began_s > _PIECE_S:
                break
        idle = not segments and not self._engine.is_busy
        busy_s = 0.0 if idle else time.perf_counter() - began_s
        return Progress(segments, busy_s, {"tokens": num_tokens}, idle, self._engine.needs if idle else None)

    def cut(self, tickets: Sequence[int]) -> None:
        """End these tickets with the tokens that there are."""
        for number in tickets:
            for one in self._engine.abort(number):
                self._groups[number].ended[one.sample] = one

    def open_work(self) -> Mapping[int, StateTree]:
        """Return the responses of each ticket as far as they are."""
        work: dict[int, dict[str, StateTree]] = {}
        for one in self._engine.under_way():
            if len(one.tokens):
                work.setdefault(one.key, {})[str(one.sample)] = _tree(one)
        for number, group in self._groups.items():
            for sample, one in group.ended.items():
                work.setdefault(number, {})[str(sample)] = _tree(one)
        return work

    def state_dict(self) -> StateTree:
        """Return nothing: a segment depends on its ticket and the weights."""
        return {}

    def load_state_dict(self, state: StateTree) -> None:
        """Nothing to restore."""

    # ------------------------------------------------------------ segments

    def _whole(self) -> list[Segment]:
        size = self._config.group_size
        whole = [number for number, group in self._groups.items() if len(group.ended) == size]
        return [self._segment(self._groups.pop(number)) for number in whole]

    def _segment(self, group: _Group) -> Segment:
        responses = [group.ended[sample] for sample in sorted(group.ended)]
        rewards = [self._reward(group.problem, one) for one in responses]
        data: dict[str, Array] = {
            "prompt": np.array(group.prompt, np.int32),
            "sizes": np.array([len(one.tokens) for one in responses], np.int64),
            "tokens": np.concatenate([one.tokens for one in responses]),
            "log_probs": np.concatenate([one.log_probs for one in responses]),
            "is_own": np.concatenate([one.is_own for one in responses]),
            "rewards": np.array(rewards, np.float64),
            "made_s": np.concatenate([one.made_s for one in responses]),
            "load": self._load.take(),
        }
        versions = np.concatenate([one.versions for one in responses]).astype(np.int64)
        sizes = data["sizes"].tolist()
        return Segment(
            group.ticket,
            data,
            versions if len(versions) else np.array([self._version], np.int64),
            {"tokens": len(versions)},
            Episodes(tuple(rewards), tuple(sizes)),
            pieces=tuple(one.piece for one in responses),
            drop=why_dropped(data["rewards"], self._config),
        )

    def _reward(self, problem: Problem, response: Response) -> float:
        """Return the task's reward; a response that did not end by itself has none."""
        if response.end not in ("eos", "stop"):
            return 0.0
        return self._task.reward(problem, self._task.tokenizer.decode(response.tokens.tolist()))


def _tree(one: Response) -> StateTree:
    return {
        "tokens": one.tokens,
        "log_probs": one.log_probs,
        "is_own": one.is_own,
        "made_s": one.made_s,
        "spans": [list(span) for span in one.spans],
        "end": one.end,
    }


def _cut_back(key: int, sample: int, tree: Any, version: int) -> Response:
    """Return a response that was begun, without what versions above this one have made."""
    spans = [Span(int(made), int(size), bool(rebuilt)) for made, size, rebuilt in tree["spans"]]
    kept = [
        span for index, span in enumerate(spans) if all(one.version <= version for one in spans[: index + 1])
    ]
    is_own = np.asarray(tree["is_own"], np.bool_)
    num_own = sum(span.size for span in kept)
    is_whole = len(kept) == len(spans)
    length = len(is_own) if is_whole else int(np.searchsorted(is_own.cumsum(), num_own + 1))
    return Response(
        key,
        sample,
        np.asarray(tree["tokens"], np.int32)[:length],
        np.asarray(tree["log_probs"], np.float32)[:length],
        is_own[:length],
        tuple(kept),
        tree["end"] if is_whole else "",
        np.asarray(tree.get("made_s", np.full(len(is_own), np.nan)))[:length],
    )
