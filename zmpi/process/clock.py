"""A clock that counts only the time in which this process ran.

A whole job may be suspended: SIGSTOP to every process, `scontrol suspend`, `docker pause`. No rank
is late then, but the system's clock keeps running. So a thread that measures time reads its clock
often, and counts at most GAP seconds between two readings.
"""

import time

GAP = 0.5  # seconds: several pauses of a running thread, even on a busy machine


class RunningClock:
    """`seconds` that the thread calling `look` has run, until its last call; all may read them."""

    def __init__(self):
        self.seconds, self._last = 0.0, time.monotonic()

    def look(self) -> float:
        """Count the time since the last call; returns `seconds`."""
        now = time.monotonic()
        self.seconds, self._last = self.seconds + min(now - self._last, GAP), now
        return self.seconds


def running(seconds: float, pause: float):
    """Yield every `pause` seconds until this process has run for `seconds`."""
    clock = RunningClock()
    while clock.look() < seconds:
        yield
        time.sleep(pause)


def rest(seconds: float, pause: float = GAP / 5) -> None:
    """Sleep until this process has run for `seconds`."""
    for _ in running(seconds, pause):
        pass
