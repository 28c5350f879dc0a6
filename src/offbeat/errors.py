"""The exceptions users see. Each message says what is wrong and what would put it right."""

from __future__ import annotations


class OffbeatError(Exception):
    """Base of everything offbeat raises on purpose."""


class ConfigError(OffbeatError):
    """A configuration that cannot run; the message names the key and the fix."""


class EnvError(OffbeatError):
    """An environment that does not keep its contract."""


class CollectError(OffbeatError):
    """A collector raised; the message carries its own traceback."""


class TaskError(OffbeatError):
    """Parts of a task, such as its rewards, failed too often: trying further is no use."""


class TrainError(OffbeatError):
    """The learner raised, or produced a non-finite loss."""


class LearnerLost(OffbeatError):
    """The learner's process is gone; the run can go on from its newest good checkpoint."""


class DivergedError(TrainError):
    """The loss is NaN or infinite, or it exploded; ``run.on_nan`` says what comes next."""


class EvalError(OffbeatError):
    """The evaluator raised; the message carries its own traceback."""


class StallError(OffbeatError):
    """Nothing moved before a deadline; the message says who waited for whom and since when."""


class RunStopped(OffbeatError):
    """A run that goes step by step was asked to end in the middle of a step; its with-block ends it."""


class CheckpointError(OffbeatError):
    """A checkpoint that is missing, torn or made by something else."""


class RunNotFound(CheckpointError):
    """A directory that holds no run: a mistake of the command line."""


class ReplayError(OffbeatError):
    """A recorded schedule that cannot be repeated."""


class PromiseBroken(OffbeatError):
    """One of the run's invariants (staleness bound, conservation) does not hold: always a bug of ours."""
