"""How fast segments and weights travel between processes, against a memcpy measured in the same run.

Segments. Two worker processes hand segments of 1 MB and 10 MB to the process that trains. A memcpy takes
data from one private buffer to another place; so does a hand-over here: the worker writes its segment from
a private buffer straight into a shared slot (`collect_into`), which is the only copy, and the receiver has
the arrays when the runtime reports them. It touches every page, gives the slot back and asks for the
next segment. Measured is the process runtime by itself, both workers kept busy: wall time per segment, all
included, from asking a worker to having its arrays.

  Bar: bytes over that time >= 0.5 x memcpy bandwidth, at both sizes. The memcpy is one thread's np.copyto
  between buffers of the segment's size, walking over 64 MB as a stream of new segments does.

Reported beside it: the rate when the receiver also copies every segment out of its slot; the rate through
a whole `Pipeline` (coordinator and metrics too, learner in a thread, 8 segments a round, k = 2) and what
that takes per segment if nobody copies anything; the time from "complete in the worker" to "the learner
has it" in an idle pipeline; the memcpy between two buffers that stay in the cache.

Weights. 1 MB of weights (12 float32 arrays) is published until two worker processes have loaded it, with
the channel that the process runtime uses: two halves of shared memory, a message to wake each worker, and
an answer from each when its own copy is complete and checked.

  Bar: median <= 20 x one 1 MB memcpy between two buffers (which stay in the cache), taken in turn.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
from common import conclude, median, parser, say

from offbeat.config.models import AsyncTrainingConfig, RuntimeConfig
from offbeat.pacing.events import CollectorUp, Published, SegmentArrived
from offbeat.pipeline import Pipeline, Settings
from offbeat.roles import PerWorker, WorkerContext
from offbeat.runtime.processes import ProcessRuntime
from offbeat.runtime.shared import Address, WeightsWriter
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.runtime.worker import Weights
from offbeat.types import Array, ArraySpec, Batch, Metrics, Segment, StateTree, Ticket

MB = 1_000_000
NUM_WORKERS = 2
IN_FLIGHT = 4
SEGMENTS_PER_ROUND, DEGREE = 8, 2
BAR_SEGMENTS, BAR_WEIGHTS = 0.5, 20.0
STREAM_BYTES = 64 * MB
PAGE = 4096

Copies = Literal["none", "in", "in and out"]


# ---------------------------------------------------------------- memcpy


@dataclass(slots=True)
class Memcpy:
    """Copies between prefaulted buffers: one pair that stays in the cache, or a walk over many."""

    num_bytes: int
    num_buffers: int = 1
    _buffers: list[tuple[Array, Array]] = field(init=False)
    _next: int = 0

    def __post_init__(self) -> None:
        self._buffers = [
            (np.ones(self.num_bytes, np.uint8), np.ones(self.num_bytes, np.uint8))
            for _ in range(self.num_buffers)
        ]

    def time_one(self) -> float:
        """Seconds of one copy."""
        source, target = self._buffers[self._next % self.num_buffers]
        self._next += 1
        started_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - started_s

    def bandwidth(self, repeats: int) -> float:
        """Median bytes per second."""
        return self.num_bytes / median([self.time_one() for _ in range(repeats)])


# ---------------------------------------------------------------- segments


class Writer:
    """A collector whose work is to write its segment, from a private buffer into the slot."""

    def __init__(self, num_bytes: int, copies: Copies) -> None:
        self._source = np.ones(num_bytes, np.uint8)
        self._writes = copies != "none"

    def segment_spec(self) -> dict[str, ArraySpec]:
        """The payload, and when it was complete."""
        return {"payload": ArraySpec(self._source.shape, "uint8"), "ended_s": ArraySpec((1,), "float64")}

    def collect(self, ticket: Ticket, weights: Any) -> Segment:
        out = {name: spec.empty() for name, spec in self.segment_spec().items()}
        return self.collect_into(ticket, weights, out)

    def collect_into(self, ticket: Ticket, weights: Any, out: Mapping[str, Array]) -> Segment:
        if self._writes:
            np.copyto(out["payload"], self._source)
        out["ended_s"][0] = time.perf_counter()
        return Segment(ticket, out, np.array([ticket.version]), {"env_steps": 1})

    def state_dict(self) -> StateTree:
        return {}

    def load_state_dict(self, state: StateTree) -> None:
        pass


def make_writer(num_bytes: int, copies: Copies, context: WorkerContext) -> Writer:
    return Writer(num_bytes, copies)


@dataclass(slots=True)
class Reader:
    """A learner that takes each segment: touches every page of it, or copies it into a buffer of its own."""

    num_bytes: int
    copies: Copies
    began_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    _own: Array = field(init=False)
    _sum: int = 0

    def __post_init__(self) -> None:
        self._own = np.ones(self.num_bytes, np.uint8)

    def train(self, batch: Batch) -> Metrics:
        self.began_s.append(time.perf_counter())
        for segment in batch.segments:
            self.waited_s.append(self.began_s[-1] - float(segment.data["ended_s"][0]))
            self.take(segment)
        return {}

    def take(self, segment: Segment) -> None:
        if self.copies == "in and out":
            np.copyto(self._own, segment.data["payload"])
        elif self.copies == "in":
            self._sum += int(segment.data["payload"][::PAGE].sum())

    def weights(self) -> int:
        return 0

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: Any) -> None:
        pass


def hand_over(num_bytes: int, copies: Copies, count: int) -> float:
    """Bytes per second from the workers to this process through the runtime alone."""
    reader, runtime = Reader(num_bytes, copies), ProcessRuntime()
    spec = RunSpec(
        collect=PerWorker(partial(make_writer, num_bytes, copies)),
        learn=PerWorker(lambda context: reader),
        evaluate=None,
        settings=Settings(runtime=RuntimeConfig(num_workers=NUM_WORKERS)),
    )
    try:
        runtime.start(spec, dict.fromkeys(range(NUM_WORKERS), CollectorState()), None)
        runtime.publish(0)
        _until_ready(runtime)
        arrived_s = _pump(runtime, reader, count)
    finally:
        runtime.close()
    return num_bytes / _typical_s(arrived_s[count // 4 :], IN_FLIGHT * NUM_WORKERS)


def _until_ready(runtime: ProcessRuntime) -> None:
    expected, give_up_s = NUM_WORKERS + 1, time.perf_counter() + 60
    while expected > 0:
        expected -= sum(isinstance(found, CollectorUp | Published) for found in runtime.wait(0.25))
        if time.perf_counter() > give_up_s:
            raise SystemExit("the workers did not start within 60 s")


def _pump(runtime: ProcessRuntime, reader: Reader, count: int) -> list[float]:
    """Keep a few tickets waiting at each worker; return when each of ``count`` segments was taken."""
    number, taken_s, give_up_s = 0, list[float](), time.perf_counter() + 120
    for number in range(IN_FLIGHT * NUM_WORKERS):
        runtime.collect(Ticket(number, number % NUM_WORKERS, 0, 0, seed=0))
    while len(taken_s) < count:
        if time.perf_counter() > give_up_s:
            raise SystemExit(f"only {len(taken_s)} of {count} segments came within 120 s")
        for event in runtime.wait(0.25):
            if not isinstance(event, SegmentArrived):
                raise SystemExit(f"a worker is gone: {event}")
            ticket = event.segment.ticket
            reader.take(event.segment)
            taken_s.append(time.perf_counter())
            runtime.release([ticket.number])
            number += 1
            runtime.collect(Ticket(number, ticket.collector, 0, 0, seed=0))
    return taken_s


def _typical_s(times_s: Sequence[float], window: int) -> float:
    """Median time from one event to the next, over windows of several, since they come in bursts."""
    return median(np.diff(times_s[::window]).tolist()) / window


def through_pipeline(num_bytes: int, copies: Copies, rounds: int) -> float:
    """Bytes per second from the workers to the learner through a busy pipeline."""
    reader = _run(num_bytes, copies, rounds, SEGMENTS_PER_ROUND, DEGREE)
    round_s = _typical_s(reader.began_s[rounds // 4 :], DEGREE + 1)
    return num_bytes * SEGMENTS_PER_ROUND / round_s


def latency_s(num_bytes: int, rounds: int) -> float:
    """Median time from a segment's completion until the learner has it, one segment at a time."""
    return median(_run(num_bytes, "in", rounds, 1, 0).waited_s[rounds // 4 :])


def _run(num_bytes: int, copies: Copies, rounds: int, segments: int, degree: int) -> Reader:
    reader = Reader(num_bytes, copies)
    Pipeline(
        collect=PerWorker(partial(make_writer, num_bytes, copies)),
        train=reader,
        off_policy_degree=degree,
        runtime="processes",
        num_workers=NUM_WORKERS,
        segments_per_round=segments,
        settings=Settings(AsyncTrainingConfig(open_rounds=0)),
    ).run(rounds)
    return reader


def segments_part(num_bytes: int, count: int, repeats: int) -> dict[str, float]:
    """All figures of one size; every kind of run takes turns with the memcpy."""
    streaming, cached = Memcpy(num_bytes, STREAM_BYTES // num_bytes // 2), Memcpy(num_bytes)
    kinds: dict[str, Callable[[], float]] = {
        "runtime": lambda: hand_over(num_bytes, "in", count),
        "runtime, copied out": lambda: hand_over(num_bytes, "in and out", count),
        "pipeline": lambda: through_pipeline(num_bytes, "in", count // SEGMENTS_PER_ROUND),
        "pipeline, no copy": lambda: through_pipeline(num_bytes, "none", count // SEGMENTS_PER_ROUND),
    }
    rates: dict[str, list[float]] = {name: [] for name in ("memcpy", "memcpy in cache", *kinds)}
    for _ in range(repeats):
        for kind, measure in kinds.items():
            rates["memcpy"].append(streaming.bandwidth(100))
            rates["memcpy in cache"].append(cached.bandwidth(100))
            rates[kind].append(measure())
    found = {name: median(values) for name, values in rates.items()}
    return {
        "memcpy_mb_per_s": found["memcpy"] / MB,
        "memcpy_in_cache_mb_per_s": found["memcpy in cache"] / MB,
        "mb_per_s": found["runtime"] / MB,
        "of_memcpy": found["runtime"] / found["memcpy"],
        "copied_out_mb_per_s": found["runtime, copied out"] / MB,
        "copied_out_of_memcpy": found["runtime, copied out"] / found["memcpy"],
        "pipeline_mb_per_s": found["pipeline"] / MB,
        "pipeline_of_memcpy": found["pipeline"] / found["memcpy"],
        "pipeline_us_per_segment_without_copy": 1e6 * num_bytes / found["pipeline, no copy"],
        "latency_us": 1e6 * latency_s(num_bytes, 100),
    }


def report_segments(num_bytes: int, figures: Mapping[str, float]) -> None:
    cached, memcpy = figures["memcpy_in_cache_mb_per_s"], figures["memcpy_mb_per_s"]
    overhead_us = figures["pipeline_us_per_segment_without_copy"]
    rows = {
        "handed over": (figures["mb_per_s"], figures["of_memcpy"], ""),
        "and copied out": (figures["copied_out_mb_per_s"], figures["copied_out_of_memcpy"], ""),
        "through a pipeline": (
            figures["pipeline_mb_per_s"],
            figures["pipeline_of_memcpy"],
            f" ({overhead_us:.0f} us per segment without any copy)",
        ),
    }
    say(f"{num_bytes // MB:3d} MB  memcpy {memcpy:.0f} MB/s ({cached:.0f} in the cache)")
    for name, (rate, ratio, remark) in rows.items():
        say(f"        {name:20} {rate:6.0f} MB/s = {ratio:.2f} x memcpy{remark}")
    say(f"        {'latency':20} {figures['latency_us']:6.0f} us")


# ---------------------------------------------------------------- weights


def serve_weights(connection: Connection) -> None:
    """A worker: copy, check and load the weights it is told of; answer with how long that took."""
    weights = Weights(timeout_s=30.0)
    while (message := connection.recv()) is not None:
        version, address = message
        started_s = time.perf_counter()
        if address:
            weights.get(address, version)
        connection.send(time.perf_counter() - started_s)


@dataclass(slots=True)
class Audience:
    """Two workers that wait for weights."""

    connections: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)

    def __enter__(self) -> Audience:
        context = multiprocessing.get_context("spawn")
        for _ in range(NUM_WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve_weights, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        return self

    def __exit__(self, *error: object) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.send(None)
            process.join(10)

    def tell(self, version: int, address: Address | None) -> list[float]:
        """Wake all workers and wait for all answers; return the seconds each one worked."""
        for connection in self.connections:
            connection.send((version, address))
        return [self._answer(connection) for connection in self.connections]

    def _answer(self, connection: Connection) -> float:
        if not connection.poll(30.0):
            raise SystemExit("a worker did not load its weights within 30 s")
        return float(connection.recv())


def make_weights(num_bytes: int) -> dict[str, Array]:
    """Twelve arrays, large and small ones as a network has them."""
    shares = [0.22, 0.22, 0.22, 0.22, 0.04, 0.04, 0.01, 0.01, 0.005, 0.005, 0.005, 0.005]
    return {f"w{i}": np.ones(int(share * num_bytes / 4), np.float32) for i, share in enumerate(shares)}


def weights_part(publishes: int) -> dict[str, float]:
    """Publish again and again; memcpy, wake-up and publication take turns."""
    weights, memcpy, writer = make_weights(MB), Memcpy(MB), WeightsWriter()
    times: dict[str, list[float]] = {name: [] for name in ("memcpy", "wake", "publish", "load", "all")}
    with Audience() as audience:
        for version in range(publishes + 20):
            times["memcpy"].append(memcpy.time_one())
            times["wake"].append(_timed(lambda: audience.tell(0, None)))
            started_s = time.perf_counter()
            writer.publish(version, weights)
            times["publish"].append(time.perf_counter() - started_s)
            times["load"].append(max(audience.tell(version, writer.address)))
            times["all"].append(time.perf_counter() - started_s)
    writer.close()
    found = {name: median(values[20:]) for name, values in times.items()}
    figures = {f"{name}_us": 1e6 * value for name, value in found.items()}
    return {**figures, "of_memcpy": found["all"] / found["memcpy"]}


def _timed(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def report_weights(figures: Mapping[str, float]) -> None:
    say(
        f"\n1 MB of weights until {NUM_WORKERS} workers have them {figures['all_us']:.0f} us"
        f" = {figures['of_memcpy']:.1f} x memcpy ({figures['memcpy_us']:.0f} us)\n"
        f"        the learner is busy for {figures['publish_us']:.0f} us, a worker for"
        f" {figures['load_us']:.0f} us, waking both and hearing from them takes {figures['wake_us']:.0f} us"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=3, help="runs of each kind, interleaved (3)")
    made.add_argument("--publishes", type=int, default=400, help="publications of weights (400)")
    options = made.parse_args(arguments)
    if options.quick:
        options.repeats, options.publishes = 1, 50
    figures: dict[str, Any] = {}
    for num_bytes, count in ((MB, 1600), (10 * MB, 480)):
        found = segments_part(num_bytes, count // (4 if options.quick else 1), options.repeats)
        figures[f"segments_{num_bytes // MB}mb"] = found
        report_segments(num_bytes, found)
    say(f"bar: >= {BAR_SEGMENTS} x memcpy at both sizes")
    figures["weights_1mb"] = weights_part(options.publishes)
    report_weights(figures["weights_1mb"])
    say(f"bar: <= {BAR_WEIGHTS:g} x memcpy")
    fast = all(figures[name]["of_memcpy"] >= BAR_SEGMENTS for name in ("segments_1mb", "segments_10mb"))
    holds = fast and figures["weights_1mb"]["of_memcpy"] <= BAR_WEIGHTS
    return conclude(figures, holds, options)


if __name__ == "__main__":
    sys.exit(main())
