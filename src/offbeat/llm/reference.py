"""The reference: whole requests through transformers' ``generate``, for tests and for other architectures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.llm.files import read_shape, split
from offbeat.llm.model import Decoder
from offbeat.llm.requests import Request, Response, check_threads, check_tokens
from offbeat.llm.sampling import draw, uniforms
from offbeat.llm.shape import Shape, config_of, shape_of, tensor_sizes
from offbeat.llm.step import MOST_STOPS
from offbeat.types import End, Span

_DEFAULT_LENGTH = 2048
_ALL = 1 << 62  # tokens of a top-k: more than any vocabulary has


@dataclass(slots=True, eq=False)
class _Job:
    """One response: waiting, or held."""

    request: Request
    sample: int
    stops: tuple[int, ...]
    deadline_s: float
    num_new: int  # own tokens it may have
    tokens: list[int] = field(default_factory=list)  # after the prompt
    log_probs: list[float] = field(default_factory=list)
    is_own: list[bool] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    is_held: bool = False

    @property
    def sequence(self) -> list[int]:
        return [*self.request.prompt, *self.tokens]

    def kind(self) -> tuple[object, ...]:
        """Settings that the jobs of one call of ``generate`` share."""
        return len(self.sequence), self.stops, _is_filtered(self.request)

    def response(self, end: End) -> Response:
        return Response(
            self.request.key,
            self.sample,
            np.array(self.tokens, np.int32),
            np.array(self.log_probs, np.float32),
            np.array(self.is_own, np.bool_),
            tuple(self.spans),
            end,
        )


class TransformersBackend:
    """Answers requests by ``generate`` of transformers, a batch at a time; see `offbeat.llm.Backend`.

    One `step` is one batch to its end, so weights change between batches, never in flight, and a step takes
    as long as its longest response. Tokens are drawn as `Engine` draws them, from the same uniforms.

    Args:
        model: a `Decoder`, a folder in the layout of Hugging Face, or a causal language model of
            transformers, whose weights are then changed by `load`.
        batch_size: most responses of one call of ``generate``; those of one batch have equal lengths.
        max_length: tokens of a sequence with its prompt; None: what the model was made for, at most 2048.
        threads: torch's threads while it computes.
        version: of the weights.
        clock: seconds, for time limits.

    `load` takes our names of weights for the architectures of `Decoder`, and those of
    ``model.named_parameters()`` for all.
    """

    def __init__(
        self,
        model: Decoder | Path | str | Any,
        *,
        batch_size: int = 16,
        max_length: int | None = None,
        threads: int = 1,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if batch_size < 1:
            raise ConfigError("batch_size must be at least 1")
        check_threads(threads)
        package = _package()
        self._network, self._shape, self._eos_ids = _network(model, package)
        self._network.eval()
        # What the folder says about sampling (repetition penalties and others) is not asked for here.
        self._network.generation_config = package.GenerationConfig()
        config = self._network.config
        most = int(getattr(config, "max_position_embeddings", None) or _DEFAULT_LENGTH)
        self.max_length = min(most, _DEFAULT_LENGTH) if max_length is None else max_length
        if not 2 <= self.max_length <= most:
            raise ConfigError(f"max_length is {max_length}; this model can do 2 to {most} positions")
        self.version = version
        self._vocab_size = int(config.vocab_size)
        self._batch_size, self._threads, self._clock = batch_size, threads, clock
        self._package = package
        self._pending: tuple[int, dict[str, Tensor]] | None = None
        self._jobs: dict[tuple[int, int], _Job] = {}

    @property
    def is_busy(self) -> bool:
        """True while a step would do something."""
        return any(not job.is_held for job in self._jobs.values())

    @property
    def needs(self) -> int | None:
        """None: it repeats no records."""
        return None

    def manifest(self) -> dict[str, Any]:
        """Return what bits depend on: settings and versions of software."""
        weight = next(self._network.parameters())
        return {
            "threads": self._threads,
            "batch_size": self._batch_size,
            "device": str(weight.device),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "transformers": self._package.__version__,
        }

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Take a request; its responses are begun in order."""
        request.check(self._vocab_size, self.max_length, MOST_STOPS)
        if request.scripts:
            raise ConfigError("records are repeated by offbeat.llm.Engine only: submit it there")
        if any(key == request.key for key, _ in self._jobs):
            raise ConfigError(f"request {request.key} is under way: give another one another key")
        stops = self._eos_ids if request.stop_ids is None else request.stop_ids
        deadline_s = self._clock() + request.time_limit_s
        begun = {one.sample: one for one in request.begun}
        for sample in request.wanted:
            job = _Job(request, sample, stops[:MOST_STOPS], deadline_s, request.max_new_tokens)
            if (one := begun.get(sample)) is not None:
                job.tokens, job.log_probs = one.tokens.tolist(), one.log_probs.tolist()
                job.is_own, job.spans = one.is_own.tolist(), list(one.spans)
            self._jobs[request.key, sample] = job

    def abort(self, key: int, sample: int | None = None, end: End = "cut") -> list[Response]:
        """End the responses to a request, or one of them; return them as far as they are."""
        names = [name for name in self._jobs if name[0] == key and sample in (None, name[1])]
        return [self._jobs.pop(name).response(end) for name in names]

    def extend(self, key: int, sample: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Give a held response more tokens, such as a tool's answer, and let it go on for so many."""
        job = self._held(key, sample)
        check_tokens("the extension", tokens, self._vocab_size)
        if max_new_tokens < 1:
            raise ConfigError("max_new_tokens must be at least 1")
        if len(job.sequence) + len(tokens) >= self.max_length:
            raise ConfigError(
                f"response {sample} of request {key} has {len(job.sequence)} tokens with its prompt; with "
                f"{len(tokens)} more there is no room below max_length {self.max_length}: give it fewer, "
                "or release it"
            )
        job.tokens += [int(token) for token in tokens]
        job.log_probs += [0.0] * len(tokens)
        job.is_own += [False] * len(tokens)
        job.num_new, job.is_held = sum(job.is_own) + max_new_tokens, False

    def release(self, key: int, sample: int) -> None:
        """Forget a held response."""
        self._held(key, sample)
        del self._jobs[key, sample]

    def _held(self, key: int, sample: int) -> _Job:
        job = self._jobs.get((key, sample))
        if job is None or not job.is_held:
            raise ConfigError(f"response {sample} of request {key} is not held: submit it with hold=True")
        return job

    def under_way(self) -> list[Response]:
        """Return all responses as far as they are; those of `Request.begun` continue from them."""
        return [job.response("") for job in self._jobs.values()]

    # ------------------------------------------------------------ weights

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Use these weights from the next batch on; ConfigError for those of another network."""
        named = dict(weights)
        if self._shape is not None and named.keys() == tensor_sizes(self._shape).keys():
            named = split(self._shape, named)
        own = dict(self._network.named_parameters())
        wrong = sorted(own.keys() ^ named.keys())
        wrong += [name for name in own if name in named and own[name].shape != named[name].shape]
        if wrong:
            raise ConfigError(f"these weights are of another network: {', '.join(wrong[:4])} differ")
        self._pending = (version, named)

    def _swap(self) -> None:
        if self._pending is None:
            return
        (self.version, weights), self._pending = self._pending, None
        with torch.no_grad():
            for name, weight in self._network.named_parameters():
                weight.copy_(weights[name])

    # ------------------------------------------------------------ the step

    def step(self) -> list[Response]:
        """Swap weights, and generate for one batch until its responses have ended."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        self._swap()
        finished = [self._close(job, end) for job in self._running() if (end := self._end(job))]
        running = self._running()
        if running:
            kind = running[0].kind()
            batch = [job for job in running if job.kind() == kind][: self._batch_size]
            self._generate(batch)
            finished += [self._close(job, end) for job in batch if (end := self._end(job))]
        return finished

    def _running(self) -> list[_Job]:
        return [job for job in self._jobs.values() if not job.is_held]

    def _left(self, job: _Job) -> int:
        """Number of tokens that it may still have."""
        return min(job.num_new - sum(job.is_own), self.max_length - len(job.sequence))

    def _end(self, job: _Job) -> End:
        """Return why a response has ended, nothing for one that goes on."""
        if job.tokens and job.is_own[-1] and (last := job.tokens[-1]) in job.stops:
            return "eos" if last in self._eos_ids else "stop"
        if self._left(job) <= 0:
            return "length"
        return "timeout" if self._clock() >= job.deadline_s else ""

    def _close(self, job: _Job, end: End) -> Response:
        holds = job.request.hold and end in ("eos", "stop") and len(job.sequence) + 1 < self.max_length
        job.is_held = holds
        if not holds:
            del self._jobs[job.request.key, job.sample]
        return job.response(end)

    def _generate(self, batch: Sequence[_Job]) -> None:
        """Draw tokens for jobs of one kind until all have ended, or the first one's time is over."""
        fed = torch.tensor([job.sequence for job in batch], device=next(self._network.parameters()).device)
        drawn = _Draw(batch, fed.device, most=max(map(self._left, batch)))
        left_s = min(job.deadline_s for job in batch) - self._clock()
        config = self._package.GenerationConfig(
            max_new_tokens=max(map(self._left, batch)),
            do_sample=False,  # `_Draw` leaves one token
            eos_token_id=list(batch[0].stops) or None,
            pad_token_id=0,
            max_time=left_s if math.isfinite(left_s) else None,
        )
        with torch.inference_mode():
            found = self._network.generate(
                fed,
                attention_mask=torch.ones_like(fed),
                generation_config=config,
                logits_processor=self._package.LogitsProcessorList([drawn]),
            )
        log_probs = torch.stack(drawn.log_probs, 1).tolist()
        for job, tokens, its in zip(batch, found[:, fed.shape[1] :].tolist(), log_probs, strict=True):
            self._append(job, tokens, its)

    def _append(self, job: _Job, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        size = min(len(tokens), self._left(job))
        ends = [place + 1 for place, token in enumerate(tokens[:size]) if token in job.stops]
        size = min([size, *ends])
        # A batch begins with an empty cache, also for what was begun by another version.
        job.spans.append(Span(self.version, size, rebuilt=bool(job.tokens)))
        job.tokens += tokens[:size]
        job.log_probs += log_probs[:size]
        job.is_own += [True] * size


class _Draw:
    """A logits processor of transformers that draws each row's token, and leaves only that one."""

    def __init__(self, batch: Sequence[_Job], device: torch.device, most: int) -> None:
        length = len(batch[0].sequence) + most + 1
        drawn = np.stack([uniforms(job.request.seed, job.sample, length) for job in batch])
        self._uniforms = torch.from_numpy(drawn).to(device)
        asked = [job.request for job in batch]
        self._temperature = torch.tensor([one.temperature for one in asked], device=device)
        self._limits: tuple[Tensor | None, Tensor | None] = (None, None)
        if _is_filtered(asked[0]):
            top_k = torch.tensor([min(one.top_k or _ALL, _ALL) for one in asked], device=device)
            top_p = torch.tensor([one.top_p for one in asked], dtype=torch.float64, device=device)
            self._limits = (top_k, top_p)
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = self._uniforms[:, input_ids.shape[1]]
        token, log_prob = draw(scores.float(), self._temperature, uniform, *self._limits)
        self.log_probs.append(log_prob)
        return torch.full_like(scores, -math.inf).scatter_(1, token[:, None], 0.0)


def _is_filtered(request: Request) -> bool:
    return request.temperature > 0.0 and (request.top_k > 0 or request.top_p < 1.0)


def _package() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "TransformersBackend needs the package transformers: pip install transformers"
        ) from None
    return transformers


def _network(model: Any, package: Any) -> tuple[Any, Shape | None, tuple[int, ...]]:
    """Return the network of transformers, its shape if it is one of ours, and the ids that end a text."""
    if isinstance(model, Decoder):
        network = _twin(model, package)
        return network, model.shape, model.shape.eos_ids
    if isinstance(model, str | Path):
        return _read(Path(model), package)
    try:
        shape = shape_of(model.config.to_dict(), model.generation_config.to_dict())
    except ConfigError:
        shape = None
    return model, shape, _eos_ids(model)


def _twin(model: Decoder, package: Any) -> Any:
    """Return a network of transformers with the weights of ours."""
    values = config_of(model.shape, str(model.norm.dtype).removeprefix("torch."))
    config = package.AutoConfig.for_model(values.pop("model_type"), **values)
    network = package.AutoModelForCausalLM.from_config(config, dtype=model.norm.dtype)
    network.to(model.norm.device)
    weights = split(model.shape, model.weights())
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.copy_(weights[name])
    return network


def _read(folder: Path, package: Any) -> tuple[Any, Shape | None, tuple[int, ...]]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the one that holds config.json")
    try:
        network = package.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"transformers cannot read {folder}: {error!s:.300}") from None
    try:
        shape = read_shape(folder)
    except ConfigError:
        shape = None
    return network, shape, _eos_ids(network)


def _eos_ids(network: Any) -> tuple[int, ...]:
    found = network.generation_config.eos_token_id
    found = network.config.eos_token_id if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)
