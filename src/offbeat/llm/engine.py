"""The engine: requests are admitted at any step, rows that are in use are computed, weights change between.

Here is decided what happens between two steps. `SlotTable` knows what each slot holds, `Prefill` feeds
prompts, and `step.py` computes.

A *slot* is memory: the cache of one response and what its next step needs. A *row* is a slot that is computed
in a step. A response that has ended its turn and may go on (`Request.hold`) keeps its slot and is no row.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import psutil
import torch
from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.llm.layout import MULTIPLE, ceil_to
from offbeat.llm.model import Decoder
from offbeat.llm.open_response import Open
from offbeat.llm.prefill import CHUNK, Prefill
from offbeat.llm.requests import Request, Response, check_threads, check_tokens
from offbeat.llm.sampling import uniforms
from offbeat.llm.slot_table import SlotTable
from offbeat.llm.step import (
    ACTIVE,
    MOST_STOPS,
    STOPS,
    TEMPERATURE,
    TOP_P,
    UNIFORMS,
    Slots,
    decode,
    emit,
)
from offbeat.types import End, Span

_DEFAULT_LENGTH = 2048
_MOST_SHAPES = 1 << 16
_ALL = 1 << 62
"""Most tokens that a top-k can ask for: all of any vocabulary."""


class Engine:
    """Generates with a `Decoder` of its own; see `submit`, `step` and `load`.

    Args:
        model: the network, with the weights of ``version``. They are copied.
        slots: responses with memory at a time; others wait.
        max_length: tokens of a sequence with its prompt; None: what the model was made for, at most 2048.
        bucket: attention looks at multiples of so many positions.
        on_swap: ``keep`` caches when weights change, or ``recompute`` them before the next token.
        threads: torch's threads while the engine computes.
        device: where it computes; None: where the model is.
        dtype: of weights and caches; None: the model's.
        compile: compile each shape of a step when it first comes (up to a few seconds each on a CPU).
        version: of the weights.
        clock: seconds, for time limits.

    Example::

        engine = Engine(model, slots=16)
        engine.submit(Request(key=0, prompt=tuple(tokenizer.encode("Once")), num_samples=4))
        while engine.is_busy:
            for response in engine.step():
                print(tokenizer.decode(response.tokens))
    """

    def __init__(
        self,
        model: Decoder,
        *,
        slots: int = 64,
        max_length: int | None = None,
        bucket: int = 64,
        on_swap: Literal["keep", "recompute"] = "keep",
        threads: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        compile: bool = False,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        shape = model.shape
        max_length = min(shape.max_positions, _DEFAULT_LENGTH) if max_length is None else max_length
        _check(slots, max_length, bucket, threads, on_swap, shape.max_positions)
        device = torch.device(device or model.norm.device)
        dtype = dtype or model.norm.dtype
        self.version = version
        self.max_length = max_length
        bucket = _least_bucket(bucket, shape.head_size * (shape.num_heads // shape.num_kv_heads))
        size, length = ceil_to(slots, MULTIPLE), ceil_to(max_length, bucket)
        self._bucket, self._threads, self._on_swap, self._clock = bucket, threads, on_swap, clock
        _check_memory(Slots.num_bytes(shape, size, length, dtype), slots, max_length, device)
        with torch.inference_mode():
            self._model = Decoder(shape, device=device, dtype=dtype)
            self._model.set_weights(model.weights())
            self._slots = Slots(shape, size, length, device, dtype)
            self._rotation = self._model.rotation(torch.arange(length, device=device))
        self._table = SlotTable(self._slots, slots, bucket)
        self._prefill = Prefill(self._model, self._slots, self._rotation, self._table, bucket)
        self._decode: Callable[..., Tensor] = decode
        if compile:
            self._decode = _compiled()
        self._is_compiled = compile
        self.num_reads = 0
        self.num_steps = 0
        self.num_row_steps = 0  # rows computed in all steps
        self._pending: tuple[int, Mapping[str, Tensor]] | None = None
        self._waiting: deque[Open] = deque()
        self._resuming: dict[Open, int] = {}  # with the first position to feed
        self._open: dict[tuple[int, int], Open] = {}
        self._finished: list[Response] = []
        self._next_deadline_s = math.inf
        self._num_filtered = 0

    # ------------------------------------------------------------ what there is

    @property
    def num_rows(self) -> int:
        """Responses that the next step computes, without those that are admitted before it."""
        return self._table.num_active

    @property
    def num_held(self) -> int:
        """Responses that keep their cache and are not computed."""
        return self._table.num_held

    @property
    def num_waiting(self) -> int:
        """Responses without memory yet."""
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        """Slots without a response."""
        return self._table.num_free

    @property
    def num_prefilled(self) -> int:
        """Tokens that were fed before the first token of a response, or again."""
        return self._prefill.num_tokens

    @property
    def is_busy(self) -> bool:
        """True while a step would do something."""
        if self._finished or self.num_rows or self._clock() >= self._next_deadline_s:
            return True
        version = self.version if self._pending is None else self._pending[0]
        return any(self._wanted(one) in (None, version) for one in self._paused())

    @property
    def needs(self) -> int | None:
        """The version that scripted responses wait for, the oldest one; None when none waits."""
        wanted = map(self._wanted, self._paused())
        return min((version for version in wanted if version is not None), default=None)

    def manifest(self) -> dict[str, Any]:
        """Return what bits depend on: settings and versions of software."""
        return {
            "threads": self._threads,
            "bucket": self._bucket,
            "chunk": CHUNK,
            "on_swap": self._on_swap,
            "device": str(self._slots.whole.device),
            "dtype": str(self._model.norm.dtype).removeprefix("torch."),
            "compile": self._is_compiled,
            "torch": torch.__version__,
        }

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Take a request; its responses are admitted in order, as slots come free."""
        request.check(self._model.shape.vocab_size, self.max_length, MOST_STOPS)
        if any(key == request.key for key, _ in self._open):
            raise ConfigError(f"request {request.key} is under way: give another one another key")
        stops = self._model.shape.eos_ids if request.stop_ids is None else request.stop_ids
        if len(stops) > MOST_STOPS:
            raise ConfigError(
                f"this model ends texts at {len(stops)} tokens, and a request may at {MOST_STOPS}: choose "
                "them with stop_ids"
            )
        deadline_s = self._clock() + request.time_limit_s
        self._next_deadline_s = min(self._next_deadline_s, deadline_s)
        begun = {one.sample: one for one in request.begun}
        for sample in request.wanted:
            script = request.scripts[sample] if request.scripts else None
            one = Open(request, sample, stops, deadline_s, script, begun.get(sample))
            self._open[one.name] = one
            self._waiting.append(one)

    def abort(self, key: int, sample: int | None = None, end: End = "cut") -> list[Response]:
        """End the responses to a request, or one of them; return them as far as they are."""
        named = [one for one in self._open.values() if one.request.key == key]
        return [self._close(one, end) for one in named if sample in (None, one.sample)]

    def extend(self, key: int, sample: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Give a held response more tokens, such as a tool's answer, and let it go on for so many."""
        one = self._held(key, sample)
        check_tokens("the extension", tokens, self._model.shape.vocab_size)
        if max_new_tokens < 1:
            raise ConfigError("max_new_tokens must be at least 1")
        begin, end = one.length, one.length + len(tokens)
        if end >= self.max_length:
            raise ConfigError(
                f"response {sample} of request {key} has {begin} tokens with its prompt; with {len(tokens)} "
                f"more there is no room below max_length {self.max_length}: give it fewer, or release it"
            )
        one.given.append((begin, end))
        self._table.tokens[one.slot, begin:end] = tokens
        self._table.log_probs[one.slot, begin:end] = 0.0
        self._table.made_s[one.slot, begin:end] = np.nan
        one.length, one.num_new = end, one.num_own(end) + max_new_tokens
        one.has_ended_turn = False
        # Without a cache of what came before, all of it is fed.
        self._resuming[one] = 0 if one.stamp is None else begin - 1

    def is_held(self, key: int, sample: int) -> bool:
        """Return True for a response that has ended its turn and keeps its cache."""
        one = self._open.get((key, sample))
        return one is not None and one.has_ended_turn

    def has_room(self, key: int, sample: int, num_tokens: int) -> bool:
        """Return True if a held response can be extended by so many tokens."""
        return self._held(key, sample).length + num_tokens < self.max_length

    def release(self, key: int, sample: int) -> None:
        """Forget a held response."""
        self._free(self._held(key, sample))

    def _held(self, key: int, sample: int) -> Open:
        one = self._open.get((key, sample))
        if one is None or not one.has_ended_turn:
            raise ConfigError(f"response {sample} of request {key} is not held: submit it with hold=True")
        return one

    def under_way(self) -> list[Response]:
        """Return all responses as far as they are; those of `Request.begun` continue from them."""
        return [self._response(one, "") for one in self._open.values()]

    def tokens_of(self, key: int, sample: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the tokens of one response so far, empty when there is none under way."""
        one = self._open.get((key, sample))
        return np.empty(0, np.int32) if one is None else self._response(one, "").tokens

    # ------------------------------------------------------------ weights

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Use these weights from the next step on; ConfigError for those of another network."""
        self._model.check_weights(weights)
        self._pending = (version, weights)

    def _swap(self) -> None:
        if self._pending is None:
            return
        (self.version, weights), self._pending = self._pending, None
        self._model.set_weights(weights)
        for one in self._table.responses:
            length = self._table.known(one)
            if one.script is not None:
                if one.is_row:
                    self._table.pause(one)
                self._try_script(one)
            elif one.is_row and self._on_swap == "recompute":
                self._table.pause(one)
                one.begin_span(length, self.version, is_rebuilt=True)
                self._resuming[one] = 0
            elif one.is_row:
                one.begin_span(length, self.version, is_rebuilt=False)

    # ------------------------------------------------------------ the step

    @torch.inference_mode()
    def step(self) -> list[Response]:
        """Swap weights, admit, feed prompts, and draw a token for each row; return what has ended."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        self._swap()
        self._end_late()
        self._feed([*self._admit(), *self._take_resuming()])
        self._table.arrange()
        if num_rows := self._table.num_rows:
            groups, is_filtered = self._table.groups(), self._num_filtered > 0
            result = self._decode(self._model, self._slots, self._rotation, groups, is_filtered=is_filtered)
            self._take(result, np.arange(num_rows))
            self.num_steps += 1
            self.num_row_steps += num_rows
        finished, self._finished = self._finished, []
        return finished

    def generate(self, requests: Iterable[Request]) -> list[Response]:
        """Answer these requests; return the responses in their order, samples in order.

        Responses to other requests that end meanwhile are returned by the next `step`.
        """
        found: dict[tuple[int, int], Response | None] = {}
        for request in requests:
            self.submit(request)
            found |= {(request.key, sample): None for sample in request.wanted}
        others, num_left = list[Response](), len(found)
        while num_left and self.is_busy:
            for one in self.step():
                if (one.key, one.sample) in found:
                    found[one.key, one.sample] = one
                    num_left -= 1
                else:
                    others.append(one)
        self._finished += others
        if num_left:
            raise ConfigError(
                f"{num_left} responses wait for weights of version {self.needs}, or for slots that held "
                "responses have: use submit and step, and load, extend or release meanwhile"
            )
        return [one for one in found.values() if one is not None]

    def _take(self, result: Tensor, slots: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Read one step's tokens, and see which responses have ended."""
        self.num_reads += 1
        read = result.cpu().numpy()[:, : len(slots)]
        for one in self._table.append(slots, read[0], read[2].view(np.float32), read[1]):
            if (end := self._end_of(one)) is not None:
                self._finish(one, end)
            else:
                self._try_script(one)

    def _end_of(self, one: Open) -> End | None:
        """Return why a response that is no row has ended; None for one that goes on."""
        own, last = one.num_own(one.length), int(self._table.tokens[one.slot, one.length - 1])
        is_drawn = own > 0 and not (one.given and one.given[-1][1] == one.length)
        if is_drawn and last in one.stops:
            return "eos" if last in self._model.shape.eos_ids else "stop"
        if one.script is not None:
            return one.script.end if one.scripted(own) is None else None
        return "length" if own >= one.num_new or one.length >= self.max_length else None

    def _finish(self, one: Open, end: End) -> None:
        """Hand out a response that has ended; keep its cache if it may go on after its turn."""
        if one.request.hold and end in ("eos", "stop") and one.length + 1 < self.max_length:
            one.has_ended_turn = True
            self._finished.append(self._response(one, end))
        else:
            self._finished.append(self._close(one, end))

    # ------------------------------------------------------------ scripts

    def _wanted(self, one: Open) -> int | None:
        """Return the version that a script asks for next."""
        found = one.scripted(one.num_own(one.length))
        return None if found is None else found[0].version

    def _try_script(self, one: Open) -> None:
        """Let a scripted response go on if its version is there."""
        found = one.scripted(one.num_own(one.length))
        if found is None or found[0].version != self.version or one.has_ended_turn or one in self._resuming:
            return
        span, left = found
        is_new = left == span.size
        if is_new and span.rebuilt:
            one.begin_span(one.length, self.version, is_rebuilt=True)
            self._resuming[one] = 0
            return
        if is_new:
            one.begin_span(one.length, self.version, is_rebuilt=False)
        # Not fed again: a token that is fed alone has other bits than one fed with others.
        self._start_rows([one])

    # ------------------------------------------------------------ admission

    def _paused(self) -> list[Open]:
        """Return responses that are no rows and can go on, at once or with the version that they ask for."""
        has_room = self.num_free > 0
        paused = [one for one in self._open.values() if not one.is_row and not one.has_ended_turn]
        return [one for one in paused if one.slot >= 0 or has_room]

    def _admit(self) -> list[tuple[Open, int]]:
        """Give slots to responses that wait, in order."""
        self._prefill.keep_only(self._next_request())
        num_free = self.num_free if self._waiting else 0
        admitted, left = list[Open](), deque[Open]()
        while self._waiting and len(admitted) < num_free:
            one = self._waiting.popleft()
            (admitted if self._wanted(one) in (None, self.version) else left).append(one)
        self._waiting.extendleft(reversed(left))
        self._table.put(admitted)
        for one in admitted:
            prompt = one.request.prompt
            self._table.tokens[one.slot, : len(prompt)] = prompt
            if one.begun is not None:
                self._table.tokens[one.slot, len(prompt) : one.length] = one.begun.tokens
                self._table.log_probs[one.slot, len(prompt) : one.length] = one.begun.log_probs
                made_s = one.begun.made_s
                self._table.made_s[one.slot, len(prompt) : one.length] = made_s if len(made_s) else np.nan
            one.begin_span(one.length, self.version, is_rebuilt=not one.is_fresh)
            self._num_filtered += _is_filtered(one.request)
        return self._unended([(one, 0) for one in admitted])

    def _next_request(self) -> Request | None:
        """Return the request of the response that is admitted next."""
        return self._waiting[0].request if self._waiting else None

    def _unended(self, jobs: Sequence[tuple[Open, int]]) -> list[tuple[Open, int]]:
        """Finish what has nothing to draw: what was begun and ended, records without further tokens."""
        left = []
        for one, start in jobs:
            if (end := self._end_of(one)) is None:
                left.append((one, start))
            else:
                self._finish(one, end)
        return left

    def _take_resuming(self) -> list[tuple[Open, int]]:
        """Return what is fed beside new prompts: extended responses, and those whose caches are made anew."""
        jobs = []
        for one, start in list(self._resuming.items()):
            found = one.scripted(one.num_own(one.length))
            if found is None:
                is_stale = self._on_swap == "recompute" and one.stamp != self.version
                is_rebuilt = start == 0 or is_stale
            elif found[0].version == self.version:
                is_rebuilt = found[0].rebuilt and found[1] == found[0].size
            else:
                continue
            if one.version != self.version or is_rebuilt:
                one.begin_span(one.length, self.version, is_rebuilt)
            del self._resuming[one]
            jobs.append((one, 0 if is_rebuilt else start))
        return self._unended(jobs)

    # ------------------------------------------------------------ prompts

    def _feed(self, jobs: Sequence[tuple[Open, int]]) -> None:
        """Feed what these responses have not fed from a position on, and draw the next token of each."""
        if jobs:
            hidden = self._prefill.feed(jobs, self.version, self._next_request())
            self._emit([one for one, _ in jobs], hidden)

    def _emit(self, ones: Sequence[Open], hidden: Mapping[Open, Tensor]) -> None:
        """Draw the next token of responses whose sequences were fed."""
        self._start_rows(ones)
        padded = [*ones, *[ones[0]] * (-len(ones) % MULTIPLE)]
        at = torch.tensor([one.slot for one in padded], device=self._slots.whole.device)
        stacked = torch.stack([hidden[one] for one in padded])
        result = emit(self._model, self._slots, at, stacked, is_filtered=self._num_filtered > 0)
        self._take(result, np.array([one.slot for one in ones]))

    def _start_rows(self, ones: Sequence[Open]) -> None:
        """Write the state of responses that are rows from now on; their next token is known."""
        whole = np.zeros((len(ones), STOPS + MOST_STOPS), np.int64)
        real = np.zeros((len(ones), self._slots.real.shape[1]))
        whole[:, STOPS:] = -1
        for row, one in enumerate(ones):
            request, own = one.request, one.num_own(one.length)
            left = one.num_new - own
            if (found := one.scripted(own)) is not None:
                left = min(left, found[1])
            last = min(one.length - 1 + left, self.max_length - 1)
            token = self._table.tokens[one.slot, one.length - 1]
            whole[row, :STOPS] = (token, one.length - 1, 1, last, min(request.top_k or _ALL, _ALL))
            whole[row, STOPS : STOPS + len(one.stops)] = one.stops
            real[row, TEMPERATURE], real[row, TOP_P] = request.temperature, request.top_p
            drawn = uniforms(request.seed, one.sample, last + 2)
            real[row, UNIFORMS : UNIFORMS + len(drawn)] = drawn
        at = torch.tensor([one.slot for one in ones], device=self._slots.whole.device)
        self._slots.whole[at] = torch.from_numpy(whole).to(at.device)
        self._slots.real[at] = torch.from_numpy(real).to(at.device)
        self._table.start(ones)

    # ------------------------------------------------------------ ends

    def _end_late(self) -> None:
        now_s = self._clock()
        if now_s < self._next_deadline_s:
            return
        late = [one for one in self._open.values() if now_s >= one.deadline_s and one.script is None]
        self._finished += [self._close(one, "timeout") for one in late]
        left = [one.deadline_s for one in self._open.values() if one.deadline_s > now_s]
        self._next_deadline_s = min(left, default=math.inf)

    def _close(self, one: Open, end: End) -> Response:
        response = self._response(one, end)
        self._free(one)
        return response

    def _free(self, one: Open) -> None:
        del self._open[one.name]
        if one.slot < 0:
            self._waiting.remove(one)
            return
        if one.is_row:
            with torch.inference_mode():
                self._slots.whole[one.slot, ACTIVE] = 0
        self._resuming.pop(one, None)
        self._num_filtered -= _is_filtered(one.request)
        self._table.take_out(one)

    def _response(self, one: Open, end: End) -> Response:
        begin = len(one.request.prompt)
        if one.slot < 0:
            length, begun = one.length, one.begun
            tokens = begun.tokens if begun is not None else np.empty(0, np.int32)
            log_probs = begun.log_probs if begun is not None else np.empty(0, np.float32)
            made_s = begun.made_s if begun is not None else np.empty(0)
        else:
            length = self._table.known(one)
            tokens = self._table.tokens[one.slot, begin:length].copy()
            log_probs = self._table.log_probs[one.slot, begin:length].copy()
            made_s = self._table.made_s[one.slot, begin:length].copy()
        is_own = np.ones(length - begin, np.bool_)
        for first, last in one.given:
            is_own[first - begin : last - begin] = False
        spans = list(one.spans)
        if size := one.num_own(length) - sum(span.size for span in spans):
            spans.append(Span(one.version, size, one.is_rebuilt))
        return Response(one.request.key, one.sample, tokens, log_probs, is_own, tuple(spans), end, made_s)


def _compiled() -> Callable[..., Tensor]:
    """Return `decode` compiled, once for each set of groups; torch stops after eight unless it is told."""
    compiled = torch.compile(decode, fullgraph=True, dynamic=False)
    limits = {"recompile_limit": _MOST_SHAPES, "accumulated_recompile_limit": _MOST_SHAPES}

    def run(*arguments: Any, is_filtered: bool) -> Tensor:
        with torch._dynamo.config.patch(limits):
            return compiled(*arguments, is_filtered=is_filtered)

    return run


def _is_filtered(request: Request) -> bool:
    return request.temperature > 0.0 and (request.top_k > 0 or request.top_p < 1.0)


def _least_bucket(bucket: int, per_position: int) -> int:
    """Round a bucket up to eights, and so that products are large enough for one kernel in every bucket.

    torch multiplies matrices of fewer than 400 multiplications by another kernel, which has other bits.
    """
    return ceil_to(max(bucket, -(-400 // per_position)), MULTIPLE)


def _check(slots: int, max_length: int, bucket: int, threads: int, on_swap: str, most: int) -> None:
    if slots < 1 or bucket < 1:
        raise ConfigError("slots and bucket of an engine must be at least 1")
    check_threads(threads)
    if not 2 <= max_length <= most:
        raise ConfigError(f"max_length is {max_length}; this model can do 2 to {most} positions")
    if on_swap not in ("keep", "recompute"):
        raise ConfigError(f"on_swap is {on_swap!r}: use 'keep' or 'recompute'")


def _check_memory(num_bytes: int, slots: int, max_length: int, device: torch.device) -> None:
    if device.type != "cpu":
        return
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise ConfigError(
            f"{slots} slots of {max_length} positions need {num_bytes / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB are free: lower slots or max_length"
        )
