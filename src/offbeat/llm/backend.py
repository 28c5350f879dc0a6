"""Contract of engines that generate for a trainer: ours, the reference, servers such as vLLM. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from offbeat.llm.requests import Request, Response
from offbeat.types import End

if TYPE_CHECKING:
    from torch import Tensor

    from offbeat.llm.engine import Engine
    from offbeat.llm.reference import TransformersBackend


class Backend(Protocol):
    """Takes requests at any time, returns responses as they end, and weights while others are under way.

    One thread calls it. Only `step` computes, and no call waits for another machine's work to end.
    """

    @property
    def version(self) -> int:
        """The version of the weights that the last step drew with."""
        ...

    @property
    def is_busy(self) -> bool:
        """True while a step would do something."""
        ...

    @property
    def needs(self) -> int | None:
        """The version that scripted responses wait for; None when none does, or none is repeated here."""
        ...

    def submit(self, request: Request) -> None:
        """Take a request. ConfigError for one that cannot be answered here, and nothing is taken then."""
        ...

    def abort(self, key: int, sample: int | None = None, end: End = "cut") -> list[Response]:
        """End the responses to a request, or one of them; return them as far as they are."""
        ...

    def extend(self, key: int, sample: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Give a held response more tokens, such as a tool's answer, and let it go on for so many."""
        ...

    def release(self, key: int, sample: int) -> None:
        """Forget a held response."""
        ...

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Use these weights from the next step on. They are not changed by the caller until then."""
        ...

    def step(self) -> list[Response]:
        """Do one piece of work, and return the responses that have ended."""
        ...

    def under_way(self) -> list[Response]:
        """Return all responses as far as they are; those of `Request.begun` continue from them."""
        ...

    def manifest(self) -> dict[str, Any]:
        """Return what tokens depend on beside requests and weights: settings and versions of software."""
        ...


if TYPE_CHECKING:

    def _backends(engine: Engine, reference: TransformersBackend) -> tuple[Backend, Backend]:
        """For the type checker: both keep the contract."""
        return engine, reference
