"""A trained language model for users: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from offbeat.llm.engine import Engine
from offbeat.llm.model import Decoder
from offbeat.llm.requests import Request
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import Task
from offbeat.llm.tasks.base import stop_ids_of
from offbeat.types import Array

_SLOTS = 8


class TextPolicy:
    """Answers prompts. Example: ``policy.answer("21+43=")``, or ``policy.act(ids)`` with token ids."""

    def __init__(self, task: Task, shape: Shape, weights: Mapping[str, Any], *, seed: int = 0) -> None:
        model = Decoder(shape)
        model.set_weights({name: torch.as_tensor(value) for name, value in weights.items()})
        self._task, self._engine = task, Engine(model, slots=_SLOTS)
        self._seed, self._num_asked = seed, 0

    def act(self, obs: Array, *, deterministic: bool = True) -> Array:
        """Return the response ``[M]`` to a prompt ``[N]`` as token ids: its first turn, without tools."""
        self._num_asked += 1
        request = Request(
            key=self._num_asked,
            prompt=tuple(int(token) for token in obs),
            max_new_tokens=self._task.max_new_tokens,
            temperature=0.0 if deterministic else 1.0,
            stop_ids=stop_ids_of(self._task),
            seed=self._seed + self._num_asked,
        )
        return np.asarray(self._engine.generate([request])[0].tokens)

    def answer(self, prompt: str, *, deterministic: bool = True) -> str:
        """Return the response to a prompt as text."""
        tokenizer = self._task.tokenizer
        ids = self.act(np.array(tokenizer.encode(prompt)), deterministic=deterministic)
        return tokenizer.decode(ids.tolist())

    def reset(self) -> None:
        """Nothing is kept between prompts."""
