"""Calls of users' functions beside the engine: coroutines on one loop, plain functions in threads."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from offbeat.errors import TaskError
from offbeat.types import TIMEOUT

_MOST_HANGING = 64
"""So many threads may hang at once before the run ends."""
_GRACE_S = 1.0
"""A loop that is so late with a limit is blocked."""
_SUSPENDED_S = 5.0
"""After so long without a look this process may have been suspended, and the loop has to catch up first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a call: its value, or ``error`` and ``details``, which has the traceback."""

    key: Hashable
    value: Any = None
    error: str = ""
    details: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """Something that a coroutine under way asks for; `Calls.reply` answers it."""

    key: Hashable
    value: Any
    future: asyncio.Future[Any] = field(repr=False)


@dataclass(slots=True, eq=False)
class _Call:
    """A call under way. ``is_over``: it has ended, was given up or forgotten; what comes later is nothing.

    ``thread`` is the one that it holds, also after it was given up; ``is_in_loop``: a coroutine.
    """

    key: Hashable
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    limit_s: float
    deadline_s: float = float("inf")  # while it runs
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[Any] | None = None
    thread: threading.Thread | None = None
    is_in_loop: bool = False
    is_over: bool = False


class _Shared:
    """State that the loop, the threads and the collector share; it does not keep the collector alive."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.lock = threading.Lock()
        self.results: deque[Outcome | Question] = deque()
        self.jobs: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.loop: asyncio.AbstractEventLoop | None = None

    def post(self, result: Outcome | Question) -> None:
        """Hand over a result; the first one wakes the collector."""
        with self.lock:
            self.results.append(result)
            is_first = len(self.results) == 1
        if is_first:
            self.wake()

    def claim(self, call: _Call, thread: threading.Thread) -> bool:
        """Let a thread run a call, unless that is over."""
        with self.lock:
            call.thread = None if call.is_over else thread
            return not call.is_over

    def end(self, call: _Call, outcome: Outcome, *, holds_thread: bool = False) -> bool:
        """End a call, once; return False if it was over. ``holds_thread``: its thread has not come back."""
        with self.lock:
            if call.is_over:
                return False
            call.is_over = True
            if not holds_thread:
                call.thread = None
        self.post(outcome)
        return True

    def soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in the loop."""
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)


class Calls:
    """Calls functions with a limit of time each, without ever waiting: `take` returns what has ended.

    ``wake()`` is called from a thread when there is something to take. Plain functions run in ``threads``
    threads. One that exceeds its limit is given up: its thread goes on by itself and another takes its place,
    `TaskError` once 64 hang. Coroutines run on one loop, however many, and are cancelled at their limit.

    Example::

        calls = Calls(context.wake)
        calls.call("first", reward, problem, text, limit_s=10.0)
        for outcome in calls.take(): ...
    """

    def __init__(
        self,
        wake: Callable[[], None],
        *,
        threads: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = _Shared(wake)
        self._clock, self._num_threads = clock, threads
        self._threads: list[threading.Thread] = []
        self._open: dict[Hashable, _Call] = {}
        self._looked_s = clock()
        self._finalizers: list[Any] = []
        self._loop_thread: threading.Thread | None = None
        self._abandoned: set[threading.Thread] = set()

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""
        return len(self._open)

    def call(self, key: Hashable, function: Callable[..., Any], *arguments: Any, limit_s: float) -> None:
        """Begin a call under a key that no other one has at the moment."""
        call = self._open[key] = _Call(key, function, arguments, limit_s)
        self._to_loop(call, is_async=is_async(function))

    def forget(self, key: Hashable) -> None:
        """Give a call up; its outcome is not wanted any more."""
        if (call := self._open.pop(key, None)) is not None:
            with self._shared.lock:
                call.is_over = True
            self._shared.soon(_cancel, call)
            self._replace_thread(call)

    def take(self) -> list[Outcome | Question]:
        """Return the calls that have ended, and what calls under way ask for."""
        self._look_at_loop()
        taken = []
        while self._shared.results:
            result = self._shared.results.popleft()
            if result.key not in self._open:
                continue
            if isinstance(result, Outcome):
                self._replace_thread(self._open.pop(result.key))
            taken.append(result)
        return taken

    def reply(self, question: Question, value: Any) -> None:
        """Answer a question; its coroutine has its whole limit from here."""
        self._shared.soon(_resolve, question.future, value)

    async def ask(self, key: Hashable, value: Any) -> Any:
        """Ask the collector for something, from a coroutine that `call` began under this key."""
        loop, call = asyncio.get_running_loop(), self._open.get(key)
        if call is None:
            raise asyncio.CancelledError
        if call.timer is not None:
            call.timer.cancel()
        call.deadline_s = float("inf")  # no time of its own passes
        future = loop.create_future()
        self._shared.post(Question(key, value, future))
        try:
            return await future
        finally:
            self._arm(call, loop)

    def close(self) -> None:
        """End the threads; those that hang end with the process."""
        for finalizer in self._finalizers:
            finalizer()

    # ------------------------------------------------------------ the loop

    def _to_loop(self, call: _Call, is_async: bool) -> None:
        """Have the loop begin a coroutine, or a thread a function, whose limit the loop watches."""
        if self._shared.loop is None:
            self._start_loop()
        if is_async:
            call.is_in_loop = True
            self._shared.soon(self._begin, call)
            return
        self._start_threads()
        self._shared.jobs.put(call)

    def _start_loop(self) -> None:
        loop = self._shared.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_loop, args=(loop,), name="calls", daemon=True)
        self._loop_thread = thread
        thread.start()
        self._finalizers.append(weakref.finalize(self, _stop_loop, loop))

    def _begin(self, call: _Call) -> None:
        loop = asyncio.get_running_loop()
        if not call.is_over:
            self._arm(call, loop)
            call.task = loop.create_task(_await(self._shared, call, _called(call)))

    def _arm(self, call: _Call, loop: asyncio.AbstractEventLoop) -> None:
        call.deadline_s = self._clock() + call.limit_s
        call.timer = loop.call_later(call.limit_s, _expire, self._shared, call)

    def _look_at_loop(self) -> None:
        """Give up what is late; a coroutine that is blocks its loop, which is replaced with all it runs."""
        now_s = self._clock()
        passed_s = now_s - self._looked_s
        if passed_s < _GRACE_S:
            return
        self._looked_s = now_s
        if passed_s > _SUSPENDED_S:
            return
        running = [call for call in self._open.values() if not call.is_over]
        late = [call for call in running if now_s > call.deadline_s + _GRACE_S]
        for call in late:
            self._shared.end(call, Outcome(call.key, None, TIMEOUT, _late(call)), holds_thread=True)
        if blocking := next((call for call in late if call.is_in_loop), None):
            loop, thread = self._shared.loop, self._loop_thread
            self._start_loop()
            for call in running:
                if call.is_in_loop:
                    outcome = Outcome(call.key, None, TIMEOUT, "a coroutine blocks its loop")
                    self._shared.end(call, outcome)
            if loop is not None:
                _stop_loop(loop)  # when it comes back
            self._abandon(thread, blocking)

    # ------------------------------------------------------------ threads

    def _start_threads(self) -> None:
        while len(self._threads) < self._num_threads:
            work = (self._shared, self._clock)
            thread = threading.Thread(target=_work, args=work, name="call", daemon=True)
            self._threads.append(thread)
            thread.start()
            self._finalizers.append(weakref.finalize(self, self._shared.jobs.put, None))

    def _replace_thread(self, call: _Call) -> None:
        """Leave a thread that hangs alone."""
        if call.thread in self._threads:
            self._threads.remove(call.thread)
            self._abandon(call.thread, call)
            self._start_threads()

    def _abandon(self, thread: threading.Thread | None, call: _Call) -> None:
        """Count a thread that hangs; `TaskError` when there are too many."""
        self._abandoned = {one for one in [*self._abandoned, thread] if one and one.is_alive()}
        if (count := len(self._abandoned)) >= _MOST_HANGING:
            raise TaskError(
                f"{count} threads hang in {call.function!r:.200}: have it end by itself within its "
                "limit, or make it `async def` without calls that block, which can be cancelled"
            )


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for ``async def``, also as a method, an object with ``__call__`` or a partial."""
    while hasattr(function, "func"):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


async def _called(call: _Call) -> Any:
    return await call.function(*call.arguments)


async def _await(shared: _Shared, call: _Call, awaitable: Awaitable[Any]) -> None:
    try:
        value = await awaitable
        shared.end(call, Outcome(call.key, value))
    except asyncio.CancelledError:
        shared.end(call, Outcome(call.key, None, "cancelled", "the coroutine was cancelled"))
    except BaseException as error:
        shared.end(call, failed(call.key, error))
    finally:
        if call.timer is not None:
            call.timer.cancel()


def failed(key: Hashable, error: BaseException) -> Outcome:
    """Return the outcome of a call that raised."""
    details = "".join(traceback.format_exception(error)).rstrip()
    return Outcome(key, None, traceback.format_exception_only(error)[-1].strip()[:500], details)


def _late(call: _Call) -> str:
    return f"{call.function!r:.200} took longer than {call.limit_s:g} s"


def _expire(shared: _Shared, call: _Call) -> None:
    shared.end(call, Outcome(call.key, None, TIMEOUT, _late(call)), holds_thread=True)
    _cancel(call)


def _cancel(call: _Call) -> None:
    if call.timer is not None:
        call.timer.cancel()
    if call.task is not None:
        call.task.cancel()


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def _stop_loop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


def _work(shared: _Shared, clock: Callable[[], float]) -> None:
    """Run calls until there is nothing more, or the one at hand was given up."""
    here = threading.current_thread()
    while (call := shared.jobs.get()) is not None:
        if not shared.claim(call, here):
            continue
        call.deadline_s = clock() + call.limit_s
        shared.soon(_watch, shared, call)
        try:
            value = call.function(*call.arguments)
            outcome = Outcome(call.key, value)
        except BaseException as error:
            outcome = failed(call.key, error)
        if inspect.isawaitable(outcome.value):
            call.thread, call.is_in_loop = None, True
            shared.soon(_continue, shared, call, outcome.value)
            continue
        if not shared.end(call, outcome):
            return  # another thread is in its place
        shared.soon(_cancel, call)


def _watch(shared: _Shared, call: _Call) -> None:
    if not call.is_over:
        call.timer = asyncio.get_running_loop().call_later(call.limit_s, _expire, shared, call)


def _continue(shared: _Shared, call: _Call, awaitable: Awaitable[Any]) -> None:
    """Await what a plain function returned."""
    if call.is_over:
        if inspect.iscoroutine(awaitable):
            awaitable.close()
        return
    call.task = asyncio.get_running_loop().create_task(_await(shared, call, awaitable))
