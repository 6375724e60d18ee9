"""Time as the guard counts it: only that in which this process ran.

A job may be suspended as a whole: SIGSTOP to every process, `scontrol suspend`, `docker pause`. No rank is late then, but
the system's clock goes on. So a thread that counts time looks at its clock often, and of a longer gap between two looks
only the first GAP seconds count.
"""

import time

GAP = 0.5  # seconds, several pauses of a thread that runs, on a busy machine too


class RunningClock:
    """`seconds` in which the thread that looks at it ran, as of its last look; other threads may read them."""

    def __init__(self):
        self.seconds, self._last = 0.0, time.monotonic()

    def look(self) -> float:
        """Count the time since the last look; returns `seconds`."""
        now = time.monotonic()
        self.seconds, self._last = self.seconds + min(now - self._last, GAP), now
        return self.seconds


def running(seconds: float, pause: float):
    """Yield, `pause` seconds apart, until this process has run for `seconds`."""
    clock = RunningClock()
    while clock.look() < seconds:
        yield
        time.sleep(pause)


def rest(seconds: float, pause: float = GAP / 5) -> None:
    """Sleep until this process has run for `seconds`."""
    for _ in running(seconds, pause):
        pass
