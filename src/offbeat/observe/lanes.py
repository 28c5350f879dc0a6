"""When a collector is at work and when it idles."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Lane:
    """One collector, as seen from where tickets are issued and segments arrive. Times in seconds.

    It works on its tickets one after the other. An arrival may be noticed late, after the learner's turn;
    a segment that carries its own collection time then tells when the work really ended.
    """

    busy_s: float = 0.0
    samples: int = 0
    _tickets: dict[int, float] = field(default_factory=dict)  # number -> issued at
    _started_s: float = 0.0

    def issue(self, number: int, now_s: float) -> None:
        """Take a ticket; work on it starts now, or when those before it are done."""
        if not self._tickets:
            self._started_s = now_s
        self._tickets[number] = now_s

    def arrive(self, number: int, collect_s: float, window_start_s: float, now_s: float) -> float:
        """A ticket's segment is here; return how many seconds it took."""
        if self._tickets.pop(number, None) is None:
            return collect_s
        started_s = self._started_s
        ended_s = min(now_s, started_s + collect_s) if collect_s > 0 else now_s
        self.busy_s += max(0.0, ended_s - max(started_s, window_start_s))
        self._started_s = max(ended_s, next(iter(self._tickets.values()), ended_s))
        return collect_s if collect_s > 0 else ended_s - started_s

    def forget(self, number: int) -> None:
        """A ticket is issued again, maybe elsewhere."""
        self._tickets.pop(number, None)

    def lose(self, window_start_s: float, now_s: float) -> None:
        """The collector died: its tickets wait, and it idles until it is issued one again."""
        self.busy_s = self.busy_until(now_s, window_start_s)
        self._tickets.clear()

    def busy_until(self, now_s: float, window_start_s: float) -> float:
        """Seconds at work from the start of the window until now."""
        if not self._tickets:
            return self.busy_s
        return self.busy_s + max(0.0, now_s - max(self._started_s, window_start_s))
