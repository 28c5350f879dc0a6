"""Plain functions and objects of any framework, made into roles."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from offbeat.checkpoint import check_state
from offbeat.errors import ConfigError, TrainError
from offbeat.roles import Collector, Evaluator, Learner, PerWorker, WorkerContext, state_of
from offbeat.types import Batch, Metrics, StateTree


class PlainLearner:
    """Functions ``train(list of what collect returned)`` and ``weights()``."""

    def __init__(self, train: Callable[[list[Any]], Any], weights: Callable[[], Any]) -> None:
        self._train = train
        self._weights = weights

    def train(self, batch: Batch) -> Metrics:
        """Train on the data of the batch's segments."""
        return named_metrics(self._train([segment.data for segment in batch.segments]), "learn", "loss")

    def weights(self) -> Any:
        """What collectors get."""
        return self._weights()

    def state_dict(self) -> StateTree:
        """Functions have no state that offbeat could save."""
        return None

    def load_state_dict(self, state: StateTree) -> None:
        """Nothing to restore."""


class PlainEvaluator:
    """A function ``evaluate(weights)`` or ``evaluate(weights, seed)`` that returns a number or metrics."""

    def __init__(self, evaluate: Callable[..., Any]) -> None:
        self._evaluate = evaluate
        self._takes_seed = _num_parameters(evaluate) >= 2

    def evaluate(self, weights: Any, seed: int) -> Metrics:
        """Call the function."""
        result = self._evaluate(weights, seed) if self._takes_seed else self._evaluate(weights)
        return named_metrics(result, "eval", "return_mean")


def _num_parameters(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(1 for p in parameters if p.kind in kinds and p.default is p.empty)


def named_metrics(result: Any, family: str, default: str) -> Metrics:
    """Turn None, a number or a mapping into metrics, with ``family/`` before names that have none."""
    if result is None:
        return {}
    if not hasattr(result, "items"):
        return {f"{family}/{default}": float(result)}
    return {name if "/" in name else f"{family}/{name}": float(value) for name, value in result.items()}


def _adapt(adapter: Callable[[Any], Any], target: Any, context: WorkerContext) -> Any:
    """Make an adapter in the worker, around a function or object that travels there."""
    return adapter(target)


def as_collect(collect: Any) -> PerWorker[Any]:
    """Accept a function, an object with ``collect``, a `Collector`, or a `PerWorker` of any of them."""
    if isinstance(collect, PerWorker):
        return collect
    if not isinstance(collect, Collector) and not callable(getattr(collect, "collect", collect)):
        raise ConfigError(
            f"collect must be a function (ticket, weights), a role or PerWorker, not {collect!r}"
        )
    return PerWorker(partial(_adapt, _own_copy, collect))


def as_learn(train: Any, weights: Callable[[], Any] | None) -> PerWorker[Learner]:
    """Accept functions ``train`` and ``weights``, an object with both, or a `PerWorker`."""
    if isinstance(train, PerWorker):
        return train
    if isinstance(train, Learner):
        return PerWorker(partial(_adapt, _itself, train))
    weights = weights or getattr(train, "weights", None)
    train = getattr(train, "train", train)
    if weights is None or not callable(train):
        raise ConfigError("Pipeline needs weights=: a function that returns what collectors act with")
    return PerWorker(partial(_make_learner, train, weights))


def _make_learner(
    train: Callable[[list[Any]], Any], weights: Callable[[], Any], context: WorkerContext
) -> Learner:
    return PlainLearner(train, weights)


def with_tried_state(learn: PerWorker[Learner]) -> PerWorker[Learner]:
    """Return a role that makes the same learner and tries whether a checkpoint can hold its state."""
    return PerWorker(partial(_make_tried, learn))


def _make_tried(learn: PerWorker[Learner], context: WorkerContext) -> Learner:
    learner = learn.make(context)
    if context.ranks.rank == 0:
        try:
            state = state_of(learner)
        except Exception as error:
            raise TrainError(
                f"learner.state_dict() raised before round 1:\n{traceback.format_exc()}"
            ) from error
        check_state(state, "learner.state_dict()")
    return learner


def as_evaluate(evaluate: Any) -> PerWorker[Evaluator] | None:
    """Accept None, a function, an object with ``evaluate``, or a `PerWorker`."""
    if evaluate is None or isinstance(evaluate, PerWorker):
        return evaluate
    return PerWorker(partial(_adapt, PlainEvaluator, getattr(evaluate, "evaluate", evaluate)))


def _itself(target: Any) -> Any:
    return target


def _own_copy(target: Any) -> Any:
    """Copy a collector object for each worker, in every runtime; functions are shared as they are."""
    if inspect.isroutine(target):
        return target
    try:
        return copy.deepcopy(target)
    except Exception as error:
        raise ConfigError(
            f"{type(target).__name__} cannot be copied for each worker ({error}): "
            "give collect=PerWorker(make) with a function that makes one"
        ) from error
