"""The configuration of a run: frozen pydantic models that refuse unknown keys and silent conversions.

Example: ``RunConfig(algorithm=PPOConfig(name="ppo"), env=EnvConfig(id="CartPole-v1"))``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

AUTO = -1
"""The ``off_policy_degree`` that hands the dial to the tuner."""


class Conflict(NamedTuple):
    """Values that are fine one by one and cannot run together.

    Example: ``Conflict(("env.num_envs", "runtime.num_workers"), "8 environments do not ...")``.
    """

    keys: tuple[str, ...]
    message: str


class Section(BaseModel):
    """Base of every part of a configuration, plugins' algorithm settings included.

    Values are taken as they are written: ``"8"`` or ``true`` is no number. Two spellings that YAML makes
    natural are accepted: ``1e6`` for a whole number and a list for a tuple.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    bare_key: ClassVar[str | None] = None
    """The field that true, false or null stands for when it is written in place of the whole section."""

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_value(cls, value: object) -> object:
        is_bare = cls.bare_key is not None and (value is None or isinstance(value, bool))
        return {cls.bare_key: value} if is_bare else value

    @field_validator("*", mode="before")
    @classmethod
    def _accept_yaml_spellings(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = (annotation, *get_args(annotation))
        if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
            return int(value)
        if isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds):
            return tuple(value)
        return value


class AlgorithmConfig(Section):
    """Base of every algorithm's own settings; the subclass is chosen by ``name``."""

    mode: ClassVar[Literal["stream", "replay"]] = "stream"
    """Segments are trained once, or kept in a replay that rounds sample from."""
    acts_anywhere: ClassVar[bool] = False
    """True when collectors' networks can compute on a GPU."""
    has_envs: ClassVar[bool] = True
    """False when ``env.id`` names a task without environments: ``env.num_envs`` says nothing then."""

    name: str = Field(
        description="Which algorithm trains: a built-in one or a plugin; `offbeat list` shows them."
    )
    segments_per_round: int | None = Field(
        default=None,
        ge=1,
        description="Segments that one round trains; null: one per worker (runtime.num_workers).",
    )

    def resolved(self, config: RunConfig) -> Self:
        """Fill in what depends on the rest of the run; works on any config whose fields are valid."""
        return self

    def problems(self, config: RunConfig) -> list[tuple[str, str]]:
        """List (key, message) of settings that cannot run with the rest of ``config``.

        A key without a dot is one of this section. Called on the resolved settings.
        """
        return []

    def samples_per_segment(self, config: RunConfig) -> int | None:
        """Environment steps in one segment: ``num_steps`` times a worker's environments; None if unknown."""
        num_steps = getattr(self, "num_steps", None)
        return num_steps * config.envs_per_worker if isinstance(num_steps, int) else None

    def samples_per_round(self, config: RunConfig) -> int | None:
        """Environment steps that are collected for a round; None if unknown."""
        samples = self.samples_per_segment(config)
        return None if samples is None else config.segments_per_round * samples

    def update(self, config: RunConfig) -> str | None:
        """Describe an update and the share of it that is new, for `offbeat check`; None: all of the round."""
        return None

    def needed_segments(self, config: RunConfig) -> int:
        """Segments without which no round can start: those of a round, or what fills a replay first."""
        return config.segments_per_round

    def new_segments(self, config: RunConfig) -> int:
        """Segments that are collected for each round.

        More than it trains where a ``replay_ratio``, in rounds per segment, says so.
        """
        ratio = getattr(self, "replay_ratio", None)
        by_ratio = math.ceil(1 / ratio - 1e-9) if isinstance(ratio, int | float) and ratio > 0 else 0
        return max(config.segments_per_round, by_ratio)


def _null_is_empty(value: object) -> object:
    return {} if value is None else value


def _only_plain_values(value: dict[str, Any]) -> dict[str, Any]:
    if not is_plain(value):
        raise ValueError("must hold plain values (numbers, text, lists, mappings) that a file can keep")
    return value


EnvKwargs = Annotated[dict[str, Any], BeforeValidator(_null_is_empty), AfterValidator(_only_plain_values)]
"""Arguments of an environment's constructor."""


class WrapperConfig(Section):
    """A Gymnasium wrapper and its arguments; in a file its name alone will do."""

    wrapper: str = Field(description="Class of the wrapper: `module:Class`, a gymnasium.Wrapper.")
    kwargs: EnvKwargs = Field(default={}, description="Arguments of the wrapper, after the environment.")


def _names_a_wrapper(item: object) -> bool:
    name = item.get("wrapper") if isinstance(item, dict) else getattr(item, "wrapper", None)
    return isinstance(name, str) and all(part.strip() for part in name.partition(":"))


def _wrappers(value: object) -> object:
    """Write wrappers that are given by name alone in full."""
    items = () if value is None else value
    listed = items if isinstance(items, list | tuple) else ("",)
    full = [{"wrapper": item} if isinstance(item, str) else item for item in listed]
    if not all(map(_names_a_wrapper, full)):
        raise ValueError(
            "must be a list of wrappers, each `module:Class` or {wrapper: module:Class, kwargs: {...}}"
        )
    return tuple(full)


class EnvConfig(Section):
    """The environments and how many."""

    id: str = Field(min_length=1, description="Environment to make: a Gymnasium id or one of offbeat's own.")
    num_envs: int = Field(
        default=8,
        ge=1,
        description="Environments over all workers together; must divide by runtime.num_workers.",
    )
    kwargs: EnvKwargs = Field(
        default={}, description="Arguments for the environment's constructor; null drops the inherited ones."
    )
    wrappers: Annotated[tuple[WrapperConfig, ...], BeforeValidator(_wrappers)] = Field(
        default=(),
        description="Gymnasium wrappers around each environment, the first one innermost: `module:Class`, or"
        " `{wrapper: module:Class, kwargs: {...}}`. With wrappers, environments are stepped one by one.",
    )
    vectorize: Literal["auto", "vector", "loop"] = Field(
        default="auto",
        description="How a worker steps its environments: `vector` uses the environment's own vectorised"
        " version, `loop` steps one after the other, `auto` takes `vector` where there is one.",
    )
    max_episode_steps: int | None = Field(
        default=None,
        ge=1,
        description="Truncate episodes after this many steps; null: the environment's own limit.",
    )


def is_plain(value: object) -> bool:
    """Say whether a YAML file can hold the value and give it back unchanged."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


class PresetConfig(Section):
    """The rule of another project for how far collectors run ahead, under that project's names.

    Keys of another preset than ``name`` are refused. What a preset sets of its neighbours is in ``implied``.
    """

    name: Literal["one_step_off", "verl_fully_async", "areal"] = Field(
        description="`one_step_off`: a round is collected whole by the version before (verl's one step off"
        " policy). `verl_fully_async`: a number of samples ahead, counted from the last synchronisation."
        " `areal`: a number of batches ahead. Their bounds are in docs/the-dial.md."
    )
    max_head_offpolicyness: int | None = Field(
        default=None, ge=0, description="areal: batches ahead; null: 2, as in AReaL's examples."
    )
    staleness_threshold: float | None = Field(
        default=None,
        ge=0,
        description="verl_fully_async: samples beyond those of one synchronisation, as a share of them;"
        " null: 0.1.",
    )
    trigger_parameter_sync_step: int | None = Field(
        default=None,
        ge=1,
        description="verl_fully_async: fetches of the learner between two publications; null: 4.",
    )
    require_batches: int | None = Field(
        default=None,
        ge=1,
        description="verl_fully_async: mini-batches of one fetch, which begins when all are there. A round is"
        " one mini-batch. null: 1.",
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _refuse_keys_of_others(self) -> Self:
        own = {"areal": ["max_head_offpolicyness"]}
        own["verl_fully_async"] = ["staleness_threshold", "trigger_parameter_sync_step", "require_batches"]
        for other, keys in own.items():
            for key in keys:
                if other != self.name and getattr(self, key) is not None:
                    raise ValueError(f"{key} belongs to the preset {other}, not to {self.name}: leave it out")
        return self

    @property
    def batches(self) -> int:
        """Rounds that begin together."""
        return self.require_batches or 1

    @property
    def rounds_ahead(self) -> float:
        """Rounds of segments that may be outstanding when weights are published."""
        if self.name == "one_step_off":
            return 1.0
        if self.name == "areal":
            return 1.0 + (2 if self.max_head_offpolicyness is None else self.max_head_offpolicyness)
        surplus = 0.1 if self.staleness_threshold is None else self.staleness_threshold
        return round(self.sync_interval * (1 + surplus), 9)

    @property
    def sync_interval(self) -> int:
        """Rounds between two publications."""
        if self.name != "verl_fully_async":
            return 1
        return self.batches * (self.trigger_parameter_sync_step or 4)

    @property
    def is_bounded(self) -> bool:
        """True when no segment is left over at a publication: then none can become older than k."""
        return self.name == "one_step_off" or self.rounds_ahead <= self.sync_interval

    @property
    def implied(self) -> dict[str, int]:
        """Return the values that the preset gives its neighbours in ``async_training``."""
        degree = 1 if self.name == "one_step_off" else math.ceil(self.rounds_ahead) - 1
        return {
            "off_policy_degree": degree,
            "open_rounds": 0,
            "weight_sync_interval": self.sync_interval,
        }


class AsyncTrainingConfig(Section):
    """The dial between synchronous and asynchronous training, and its neighbours."""

    off_policy_degree: int = Field(
        default=0,
        ge=AUTO,
        description="The dial k: no sample is trained more than k versions after the weights that made it."
        " 0: strictly on-policy; -1: tuned while running, between 0 and auto_max. With replay k bounds how"
        " many rounds collecting runs ahead, not the age of what is drawn.",
    )
    open_rounds: int = Field(
        default=3,
        ge=0,
        description="Rounds between two steps in which the dial opens at the start of training, from 0 (or"
        " weight_sync_interval - 1) up to off_policy_degree: otherwise the first k + 1 rounds all train on"
        " what the initial policy collected. 0: open at once. Replay opens at once; the tuner opens by"
        " itself. Default of this project, measured in benchmarks/dial.py.",
    )
    auto_max: int = Field(default=8, ge=0, description="Largest k, in versions, that the tuner may choose.")
    enable_async_eval: bool = Field(
        default=False,
        description="Evaluate a frozen snapshot beside training instead of pausing training for it.",
    )
    weight_sync_interval: int = Field(
        default=1,
        ge=1,
        description="Rounds between two publications of weights; at most off_policy_degree + 1, unless the"
        " algorithm replays.",
    )
    staleness_threshold: int = Field(
        default=0,
        ge=0,
        description="Samples older than this many versions count in pace/stale_samples_ratio.",
    )
    max_staleness_allowed: int | None = Field(
        default=None,
        ge=0,
        description="Hard cap in versions: a dial or auto_max above it is refused, at load and when turned"
        " live; null: no cap.",
    )
    max_queue_size: int | None = Field(
        default=None,
        ge=1,
        description="Cap on segments that are collected or collecting and not yet trained, at least the"
        " segments of a round, and with replay those that the first round waits for; null: what the dial"
        " allows.",
    )
    min_batch_count: int | None = Field(
        default=None,
        ge=1,
        description="Segments that must wait before a round begins, at most those of k + 1 rounds; where"
        " fewer can still come, it begins with those. With replay only the first round waits. null: the"
        " segments of a round.",
    )
    max_drops_per_round: int | None = Field(
        default=None,
        ge=0,
        description="Segments that collectors may drop for each round of segments that are kept; past it the"
        " run ends as failed, with their reasons. null: ten times the segments of a round.",
    )
    straggler_policy: Literal["wait", "cut"] = Field(
        default="wait",
        description="What happens to tickets that hold a round up although enough segments are there: `wait`"
        " for them, or `cut` them short. Collectors that hold one ticket finish it in any case.",
    )
    preset: PresetConfig | None = Field(
        default=None,
        description="A preset's name, or a mapping with its keys. It sets off_policy_degree, open_rounds and"
        " weight_sync_interval. null: the rule of the dial.",
    )
    batch_timeout: float = Field(
        default=300.0,
        gt=0,
        description="Longest wait of the learner for segments, in seconds; then the run ends and says whom"
        " it waited for.",
    )
    generation_timeout: float = Field(
        default=120.0,
        gt=0,
        description="Longest piece of work of a collector, in seconds: one segment, or one advance of a wide"
        " collector. A collector past it is killed and replaced.",
    )
    batch_generation_interval: float = Field(
        default=0.0, ge=0, description="Least time between two tickets, in seconds; 0: no brake."
    )
    max_sync_retries: int = Field(
        default=3, ge=0, description="Further tries after publishing weights failed."
    )
    sync_timeout: float = Field(
        default=30.0,
        gt=0,
        description="Longest time for one publication, and longest wait of a collector for it, in seconds."
        " A collector that waits longer is replaced; a learner that takes longer ends the run.",
    )
    sync_retry_delay: float = Field(
        default=0.1, ge=0, description="Pause before publishing again, in seconds."
    )
    enable_async_debug_log: bool = Field(
        default=False,
        description="Log each ticket's life (issued, arrived, trained) in logs/run.log.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_from_preset(cls, value: object) -> object:
        if not isinstance(value, dict) or value.get("preset") is None:
            return value
        try:
            return {**PresetConfig.model_validate(value["preset"]).implied, **value}
        except ValidationError:  # said of the preset itself
            return value

    def preset_problems(self) -> list[tuple[str, str]]:
        """List the keys that a preset contradicts, each with the fix."""
        preset = self.preset
        if preset is None:
            return []
        same = {**preset.implied, "min_batch_count": None, "straggler_policy": "wait"}
        found = [
            (key, f"the preset {preset.name} sets it to {shown}: leave it out, or leave the preset out")
            for key, value in same.items()
            if getattr(self, key) != value
            for shown in ["null" if value is None else value]
        ]
        if self.max_staleness_allowed is not None and not preset.is_bounded:
            text = f"the preset {preset.name} counts segments and bounds no age: leave one of them out"
            found.append(("max_staleness_allowed", text))
        return found

    @property
    def smallest_degree(self) -> int:
        """The least k this run may use: 0 when the tuner holds the dial."""
        return max(self.off_policy_degree, 0)

    @property
    def largest_degree(self) -> int:
        """The staleness bound of the run: k, or ``auto_max`` when the tuner holds the dial."""
        return self.auto_max if self.off_policy_degree == AUTO else self.off_policy_degree


RuntimeKind = Literal["inline", "threads", "processes", "ray"]
Resources = dict[str, float]
"""Names of Ray resources to amounts: ``{"CPU": 1, "big_memory": 0.5}``."""


class RayConfig(Section):
    """Machines of the Ray runtime, and the resources that each actor asks of them."""

    address: str | None = Field(
        default=None,
        min_length=1,
        description="Cluster to join: `auto` or `host:port`; null: a Ray of its own on this machine, ended"
        " with the run.",
    )
    collector_resources: Resources = Field(
        default={"CPU": 1.0},
        description="Ray resources of each collector. GPUs come from rollout.n_gpus_per_node.",
    )
    learner_resources: Resources = Field(
        default={"CPU": 1.0},
        description="Ray resources of each rank of the learner. GPUs come from trainer.n_gpus_per_node.",
    )
    evaluator_resources: Resources = Field(
        default={"CPU": 1.0}, description="Ray resources of the evaluator."
    )
    store_resources: Resources = Field(
        default={"CPU": 0.0}, description="Ray resources of the store of a replay run."
    )
    object_store_mb: int | None = Field(
        default=None,
        ge=80,
        description="Shared memory of a Ray of its own, in MB; null: what Ray chooses. Ignored in a cluster.",
    )

    @field_validator("collector_resources", "learner_resources", "evaluator_resources", "store_resources")
    @classmethod
    def _amounts(cls, value: Resources) -> Resources:
        if any(amount < 0 for amount in value.values()):
            raise ValueError("amounts must be 0 or more")
        if "GPU" in value:
            raise ValueError("GPUs are given by trainer.n_gpus_per_node and rollout.n_gpus_per_node")
        return value


class RuntimeConfig(Section):
    """Runtime and number of collectors, and limits of their starts, restarts and work."""

    kind: RuntimeKind = Field(
        default="processes",
        description="Where collectors live: `inline` takes turns in one thread, `threads` in threads of this"
        " process, `processes` in processes of their own, `ray` in Ray actors, the learner too.",
    )
    num_workers: int = Field(default=2, ge=1, description="Number of collectors.")
    torch_threads: int = Field(default=1, ge=1, description="Threads torch may use in the learner.")
    worker_torch_threads: int = Field(
        default=1,
        ge=1,
        description="Threads torch may use in each collector; more than 1 rarely pays for small networks.",
    )
    max_worker_restarts: int = Field(
        default=20,
        ge=0,
        description="Collectors replaced within restart_window_s before the run gives up.",
    )
    restart_window_s: float = Field(
        default=3600.0, gt=0, description="Seconds over which replaced collectors are counted."
    )
    restart_backoff_s: float = Field(
        default=0.5,
        ge=0,
        description="Pause before a collector that was lost again without a segment in between is replaced,"
        " in seconds; doubles each time, up to restart_backoff_max_s. The first replacement comes at once.",
    )
    restart_backoff_max_s: float = Field(
        default=30.0, ge=0, description="Longest pause before a collector is replaced, in seconds."
    )
    heartbeat_interval_s: float = Field(
        default=1.0, gt=0, description="Seconds between two signs of life of a worker process or Ray actor."
    )
    heartbeat_timeout_s: float | None = Field(
        default=8.0,
        gt=0,
        description="A worker without a sign of life for this long, in seconds, counts as dead and is"
        " replaced; null: only when its process ends or a ticket takes too long.",
    )
    ray: RayConfig = Field(default=RayConfig(), description="The Ray runtime.")
    start_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Longest start of a collector's process, in seconds; of each of a learner's ranks and of"
        " all actors on Ray, too. Threads may take longer.",
    )
    train_timeout_s: float = Field(
        default=3600.0, gt=0, description="Longest round of the learner, in seconds; then the run ends."
    )


class LearnerConfig(Section):
    """Processes of the learner."""

    num_ranks: int = Field(
        default=1,
        ge=1,
        description="Processes that train together, each on its share of every minibatch, with torch's"
        " distributed data parallelism.",
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto",
        description="How ranks exchange gradients; `auto` is `nccl` on GPUs and `gloo` on CPUs.",
    )
    timeout_s: float = Field(
        default=60.0, gt=0, description="Longest wait of one rank for the others, in seconds."
    )


class TrainerConfig(Section):
    """The machines and devices of the learner."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="cpu", description="Where the learner trains; `auto` is `cuda` where there is one."
    )
    n_gpus_per_node: int = Field(
        default=0,
        ge=0,
        description="GPUs of the learner on each of its nodes; 0: none, or on Ray one where device is cuda.",
    )
    nnodes: int = Field(
        default=1, ge=1, description="Nodes that the learner's ranks are spread over; more than 1 needs Ray."
    )


class RolloutConfig(Section):
    """The machines and devices of the collectors."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="cpu",
        description="Where the networks of collectors and evaluators compute; only those of algorithms that"
        " plan can do so elsewhere than on the CPU. `auto` is `cuda` where there is one.",
    )
    n_gpus_per_node: int = Field(
        default=0,
        ge=0,
        description="GPUs that Ray gives to the collectors of a node; without Ray they share all there are.",
    )
    nnodes: int = Field(
        default=1, ge=1, description="Nodes that the collectors are spread over; more than 1 needs Ray."
    )


class RunSection(Section):
    """The run itself: how long, from which seed, where its files go."""

    dir: str | None = Field(
        default=None, min_length=1, description="Directory of the run; null: `runs/<name>-<date>-<time>`."
    )
    rounds: int = Field(
        default=100,
        ge=1,
        description="Training rounds; each makes one new version of the weights. With total_timesteps and"
        " without this, as many as those steps take.",
    )
    total_timesteps: int | None = Field(
        default=None,
        ge=1,
        description="Environment steps of the whole run, counted as `offbeat check` counts them and rounded"
        " up to whole rounds; of this and rounds, in the same file or on the same command line, the one that"
        " ends first holds. Null: as many as rounds take.",
    )
    seed: int = Field(default=0, ge=0, description="Seed that every random choice of the run derives from.")
    name: str | None = Field(
        default=None, min_length=1, description="Name of the run; null: the name of its recipe or file."
    )
    stop_return: float | None = Field(
        default=None,
        description="Stop once the mean return of the last 100 training episodes reaches this; null: never.",
    )
    stop_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Longest wait for the round at hand and a last checkpoint after Ctrl-C, SIGTERM or"
        " SIGHUP, in seconds; null: runtime.train_timeout_s. A second signal ends the run at once.",
    )
    stop_eval_return: float | None = Field(
        default=None,
        description="Stop once an evaluation's mean return reaches this; null: never. Needs"
        " eval.interval_rounds.",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="Times a run goes on from its newest good checkpoint after its learner crashed.",
    )
    restart_delay_s: float = Field(
        default=1.0, ge=0, description="Pause before the first such restart, in seconds; doubles each time."
    )
    on_nan: Literal["halt", "rollback"] = Field(
        default="halt",
        description="What to do when the loss is NaN, infinite or explodes: end the run, or go back to the"
        " newest good checkpoint and collect other samples from there.",
    )
    explosion_factor: float | None = Field(
        default=None,
        gt=1,
        description="A loss or gradient norm this many times above the median of the last 20 rounds has"
        " exploded; null: only NaN and infinity count.",
    )


class EvalConfig(Section):
    """Evaluation of frozen weights."""

    interval_rounds: int | None = Field(
        default=None, ge=1, description="Rounds between two evaluations; null: none before the end."
    )
    episodes: int = Field(default=10, ge=1, description="Episodes of one evaluation.")
    num_envs: int = Field(default=10, ge=1, description="Environments that play them side by side.")
    deterministic: bool = Field(
        default=True, description="Take the most likely action instead of drawing one from the policy."
    )
    sampled_episodes: int | None = Field(
        default=None,
        ge=0,
        description="Episodes played again with actions drawn from the policy, where one that"
        " draws them in training is evaluated deterministically: both returns are reported, since they can"
        " differ greatly. Null: as many as episodes; 0: none.",
    )
    at_start: bool = Field(default=False, description="Evaluate version 0, before the first round.")
    at_end: bool = Field(default=True, description="Evaluate the last weights when the run ends.")
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Longest evaluation, in seconds; one past it is given up, and training goes on.",
    )
    env_kwargs: EnvKwargs = Field(
        default={},
        description="Arguments of the environment in evaluations and `offbeat play`, laid over env.kwargs:"
        " the true score, say, where training has a shaped reward. Null drops the inherited ones.",
    )

    @property
    def num_sampled(self) -> int:
        """Episodes to play with drawn actions beside those with the most likely ones."""
        wanted = self.episodes if self.sampled_episodes is None else self.sampled_episodes
        return wanted if self.deterministic else 0


class CheckpointConfig(Section):
    """Checkpoints, from which a run can be resumed."""

    enabled: bool = Field(default=True, description="Save checkpoints; without them a run cannot be resumed.")
    interval_rounds: int | None = Field(
        default=25, ge=1, description="Rounds between two checkpoints; null: not by rounds."
    )
    interval_s: float | None = Field(
        default=60.0,
        gt=0,
        description="Seconds between two checkpoints; null: not by time. Whichever is due first.",
    )
    keep: int = Field(
        default=2, ge=2, description="Newest checkpoints kept; at least 2, so that one may be torn."
    )
    keep_best: bool = Field(
        default=True, description="Also keep the checkpoint with the best evaluation return."
    )


class TensorBoardConfig(Section):
    """Metrics as TensorBoard files, and a server that shows them."""

    bare_key: ClassVar[str | None] = "enabled"

    enabled: bool | None = Field(
        default=None,
        description="Mirror metrics to TensorBoard; null: when tensorboard is installed. `tensorboard: false`"
        " is short for `tensorboard.enabled: false`, and so are true and null.",
    )
    serve: bool = Field(
        default=False,
        description="Start TensorBoard with the run, for browsers on this machine (127.0.0.1), and end it"
        " with the run; a notice tells its address.",
    )
    port: int | None = Field(
        default=None, ge=1, le=65535, description="Port of that server; null: one that is free."
    )


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class ObserveConfig(Section):
    """Display, logs and sinks of a run."""

    stats_interval_s: float = Field(
        default=30.0, gt=0, description="Seconds between two blocks of component statistics in logs/run.log."
    )
    tensorboard: TensorBoardConfig = Field(default=TensorBoardConfig(), description="TensorBoard.")
    use_wandb: bool = Field(
        default=False, description="Mirror metrics to Weights & Biases; needs the extra `offbeat[wandb]`."
    )
    wandb_project: str = Field(default="offbeat", min_length=1, description="Weights & Biases project.")
    console: Literal["auto", "rich", "plain", "none"] = Field(
        default="auto",
        description="Progress display: `auto` is `rich` on a terminal and `plain` lines elsewhere.",
    )
    log_interval_s: float = Field(default=2.0, gt=0, description="Seconds between two plain progress lines.")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = Field(
        default="info",
        description="Least serious lines that logs/run.log and logs/learner.log take; `info` has rounds and"
        " publications.",
    )


class RunConfig(Section):
    """Everything about one run. Only ``algorithm.name`` and ``env.id`` have no default."""

    algorithm: SerializeAsAny[AlgorithmConfig] = Field(description="What trains, with its settings.")
    env: EnvConfig = Field(description="The environments.")
    async_training: AsyncTrainingConfig = Field(
        default=AsyncTrainingConfig(), description="The dial and its neighbours."
    )
    runtime: RuntimeConfig = Field(default=RuntimeConfig(), description="Where collectors live.")
    learner: LearnerConfig = Field(default=LearnerConfig(), description="The learner's processes.")
    trainer: TrainerConfig = Field(default=TrainerConfig(), description="The learner's machines.")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="The collectors' machines.")
    run: RunSection = Field(default=RunSection(), description="Length, seed and place of the run.")
    eval: EvalConfig = Field(default=EvalConfig(), description="Evaluation.")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Checkpoints.")
    observe: ObserveConfig = Field(
        default=ObserveConfig(), description="Console, TensorBoard, Weights & Biases."
    )

    def resolved(self) -> Self:
        """The same run with everything filled in that its algorithm derives from the rest."""
        return self.model_copy(update={"algorithm": self.algorithm.resolved(self)})

    @property
    def segments_per_round(self) -> int:
        """Segments that one round trains."""
        return self.algorithm.segments_per_round or self.runtime.num_workers

    @property
    def envs_per_worker(self) -> int:
        """Environments that one collector steps."""
        return self.env.num_envs // self.runtime.num_workers

    @property
    def eval_env(self) -> EnvConfig:
        """The environment that weights are evaluated in: ``eval.env_kwargs`` over ``env.kwargs``."""
        return self.env.model_copy(update={"kwargs": {**self.env.kwargs, **self.eval.env_kwargs}})

    @property
    def first_segments(self) -> int:
        """Segments that the first round cannot do without: those of a round, or what fills a replay."""
        if self.algorithm.mode == "stream":
            return self.segments_per_round
        needed = self.algorithm.needed_segments(self)
        new = self.algorithm.new_segments(self)
        return max(needed, new, self.async_training.min_batch_count or 0)

    def steps_of(self, rounds: int) -> int | None:
        """Environment steps that so many rounds take, with those before the first one; None if unknown."""
        per_round = self.algorithm.samples_per_round(self)
        if not per_round:
            return None
        new = self.algorithm.new_segments(self)
        return per_round * (self.first_segments + (rounds - 1) * new) // self.segments_per_round

    def rounds_of(self, steps: int) -> int | None:
        """The rounds that it takes to collect so many environment steps, at least 1; None if unknown."""
        first, two = self.steps_of(1), self.steps_of(2)
        return None if first is None or two is None else 1 + max(0, -(-(steps - first) // (two - first)))

    @property
    def max_outstanding_segments(self) -> int:
        """Most segments that can be issued and untrained at once: those of the first round and of k more.

        ``max_queue_size`` bounds them too. A replay whose learner may run ahead of collectors can have more.
        """
        dial = self.async_training
        by_dial = self.first_segments + dial.largest_degree * self.algorithm.new_segments(self)
        return min(by_dial, dial.max_queue_size or by_dial)
