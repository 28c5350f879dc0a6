"""The specification of a run, from which a runtime makes its roles, here or in other processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from offbeat.errors import CheckpointError, OffbeatError
from offbeat.roles import Collector, Evaluator, Learner, PerWorker, WorkerContext
from offbeat.runtime.base import close_learner
from offbeat.seeding import derive_seed
from offbeat.types import StateTree

if TYPE_CHECKING:
    from offbeat.config.settings import Settings
    from offbeat.runtime.ranks import RankLauncher

RoleT = TypeVar("RoleT")


def _settings() -> Settings:
    """Return the defaults; imported here, since workers need no configuration and it takes 0.1 s."""
    from offbeat.config.settings import Settings

    return Settings()


@dataclass(frozen=True, slots=True)
class Assignment(Generic[RoleT]):
    """A role for one worker, the state it continues from, and its patience with weights."""

    role: PerWorker[RoleT]
    context: WorkerContext
    state: StateTree | None = None
    sync_timeout_s: float = 30.0
    sync_retries: int = 3
    sync_retry_delay_s: float = 0.1


@dataclass(frozen=True, slots=True)
class CollectorState:
    """The state a collector starts from; ``state`` None: a fresh one, seeded by its ``incarnation``."""

    incarnation: int = 0
    state: StateTree | None = None


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Roles, settings and seed of a run. ``log_dir`` None: workers write to the terminal.

    ``collect`` makes what `offbeat.runtime.adapting.as_collector` takes.
    Picklable: ranks of the learner and actors on other machines make their roles from it.
    """

    collect: PerWorker[Any]
    learn: PerWorker[Learner]
    evaluate: PerWorker[Evaluator] | None = None
    settings: Settings = field(default_factory=_settings)
    seed: int = 0
    log_dir: Path | None = None
    mode: Literal["stream", "replay"] = "stream"

    @property
    def directory(self) -> Path | None:
        """Run directory; None: nothing is written."""
        return None if self.log_dir is None else self.log_dir.parent

    @property
    def saves(self) -> bool:
        """True when the states of the roles go into checkpoints."""
        return self.log_dir is not None and self.settings.checkpoint.enabled

    @property
    def num_collectors(self) -> int:
        return self.settings.runtime.num_workers

    @property
    def start_timeout_s(self) -> float:
        """Limit for the start of a worker."""
        return self.settings.runtime.start_timeout_s

    @property
    def sync_timeout_s(self) -> float:
        """Limit for weights and segments on their way between processes."""
        return self.settings.async_training.sync_timeout

    def collector(self, index: int, state: CollectorState) -> Assignment[Any]:
        """Return the assignment of a collector's worker."""
        seed = derive_seed(self.seed, "lane", index, state.incarnation)
        context = WorkerContext(index, self.num_collectors, seed, state.incarnation)
        return self._assign(self.collect, context, state.state)

    def evaluator(self) -> Assignment[Evaluator]:
        """Return the assignment of the evaluator's worker."""
        assert self.evaluate is not None, "an evaluation was asked for, but there is no evaluator"
        context = WorkerContext(collector=0, num_collectors=1, seed=derive_seed(self.seed, "evaluator"))
        return self._assign(self.evaluate, context, None)

    def _assign(
        self, role: PerWorker[RoleT], context: WorkerContext, state: StateTree | None
    ) -> Assignment[RoleT]:
        dial = self.settings.async_training
        return Assignment(
            role, context, state, dial.sync_timeout, dial.max_sync_retries, dial.sync_retry_delay
        )

    def make_learner(
        self,
        state: StateTree | None = None,
        *,
        launcher: RankLauncher | None = None,
        host: str = "127.0.0.1",
    ) -> Learner:
        """Make the learner, in the process where it is to live, and load ``state``.

        A learner of several ranks is a `ManyRanks`, to be closed. Its other ranks are child processes, or
        what ``launcher`` starts elsewhere; ``host`` is then this machine's address, as those can reach it.
        """
        context = WorkerContext(0, 1, derive_seed(self.seed, "learner"))
        if self.settings.learner.num_ranks == 1:
            learner = self.learn.make(context)
        else:
            from offbeat.runtime.ranks import make_ranked

            learner = make_ranked(self, context, host, launcher)
        if state is not None:
            try:
                load_state(learner, state, "the learner")
            except BaseException:
                close_learner(learner)
                raise
        return learner


def thread_limits(num_threads: int) -> dict[str, str]:
    """Environment variables that limit the threads of numeric libraries."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: str(num_threads) for name in names}


def load_state(role: Learner | Collector, state: StateTree, name: str) -> None:
    """Load a saved state into a role; CheckpointError with its ``name`` when it has not the role's form."""
    try:
        role.load_state_dict(state)
    except OffbeatError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint does not fit {name} ({type(error).__name__}: {error}); use one that this "
            "run and this version of its code wrote"
        ) from error
