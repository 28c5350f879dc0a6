"""Plain functions and objects of any framework, made into roles."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from offbeat.checkpoint import check_state
from offbeat.errors import ConfigError, TrainError
from offbeat.roles import (
    Evaluator,
    Learner,
    PerWorker,
    WorkerContext,
    check_methods,
    has_state,
    state_of,
)
from offbeat.runtime.adapting import check_collector
from offbeat.types import Batch, Metrics, StateTree


class PlainLearner:
    """Functions ``train(list of what collect returned)`` and ``weights()``."""

    def __init__(self, train: Callable[[list[Any]], Any], weights: Callable[[], Any]) -> None:
        self._train = train
        self._weights = weights

    def train(self, batch: Batch) -> Metrics:
        return named_metrics(self._train([segment.data for segment in batch.segments]), "learn", "loss")

    def weights(self) -> Any:
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
        parameters = inspect.signature(evaluate).parameters
        self._names_seed = "seed" in parameters
        self._takes_seed = _num_needed(parameters.values()) >= 2

    def evaluate(self, weights: Any, seed: int) -> Metrics:
        if self._names_seed:
            result = self._evaluate(weights, seed=seed)
        else:
            result = self._evaluate(weights, seed) if self._takes_seed else self._evaluate(weights)
        return named_metrics(result, "eval", "return_mean")


def _num_needed(parameters: Iterable[inspect.Parameter]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(1 for p in parameters if p.kind in kinds and p.default is p.empty)


def named_metrics(result: Any, family: str, default: str) -> Metrics:
    """Turn None, a number or a mapping into metrics, with ``family/`` before names that have none."""
    if result is None:
        return {}
    if not hasattr(result, "items"):
        return {f"{family}/{default}": float(result)}
    return {name if "/" in name else f"{family}/{name}": float(value) for name, value in result.items()}


def _given(adapt: Callable[[Any], Any], target: Any, context: WorkerContext) -> Any:
    """Adapt a function or object in the worker that it travelled to."""
    return adapt(target)


def _made(adapt: Callable[[Any], Any], make: Callable[[WorkerContext], Any], context: WorkerContext) -> Any:
    """Adapt what a `PerWorker` makes, by the same rule."""
    return adapt(make(context))


def as_collect(collect: Any) -> PerWorker[Any]:
    """Accept a function, an object with ``collect``, a `Collector`, or a `PerWorker` of any of them.

    What a `PerWorker` makes is checked and adapted by `offbeat.runtime.adapting.as_collector`.
    """
    if isinstance(collect, PerWorker):
        return collect
    check_collector(collect)
    return PerWorker(partial(_given, _own_copy, collect))


def as_learn(train: Any, weights: Callable[[], Any] | None) -> PerWorker[Learner]:
    """Accept functions ``train`` and ``weights``, an object with both, or a `PerWorker` of such an object."""
    if isinstance(train, PerWorker):
        return PerWorker(partial(_made, as_learner, train.make))
    function = getattr(train, "train", train)
    is_stateless = not any(hasattr(train, name) for name in ("state_dict", "load_state_dict"))
    if weights is not None and callable(function) and is_stateless:
        return PerWorker(partial(_given, partial(_plain_learner, weights), function))
    if weights is None and function is train and callable(train):
        raise ConfigError("Pipeline needs weights=: a function that returns what collectors act with")
    as_learner(train)  # refused here rather than where it is made
    return PerWorker(partial(_given, as_learner, train))


def as_learner(made: Any) -> Learner:
    """Return a learner: one already, or an object without state whose ``train`` gets what was collected."""
    check_methods(made, ("train", "weights"), "the learner")
    return made if has_state(made, "the learner") else PlainLearner(made.train, made.weights)


def _plain_learner(weights: Callable[[], Any], train: Callable[[list[Any]], Any]) -> Learner:
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
    """Accept None, a function, an object with ``evaluate``, or a `PerWorker` of either."""
    if evaluate is None:
        return None
    if isinstance(evaluate, PerWorker):
        return PerWorker(partial(_made, as_evaluator, evaluate.make))
    as_evaluator(evaluate)  # refused here rather than where it is made
    return PerWorker(partial(_given, as_evaluator, evaluate))


def as_evaluator(made: Any) -> Evaluator:
    """Return an evaluator around a function or an object with ``evaluate``."""
    if not callable(made):
        check_methods(made, ("evaluate",), "the evaluator")
    return PlainEvaluator(getattr(made, "evaluate", made))


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
