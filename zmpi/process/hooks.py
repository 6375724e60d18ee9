"""The process's own hooks, taken for the guard: uncaught exceptions, sys.exit, the exit itself, signals, forks, streams.

Python runs a signal's handler on the main thread, between two of its instructions, so never while that thread stands
inside MPI. Therefore a thread reads the signals: from the wake-up descriptor, into which the C handler writes at once.
"""

import atexit
import os
import select
import signal
import sys
import threading

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Hooks:
    """What was hooked in, and what came through. One per process, never taken out except in a forked child."""

    def __init__(self):
        self.status = None  # that sys.exit was last called with; None: not called
        self._before = sys.excepthook, threading.excepthook, sys.exit
        self._ear = self._voice = None  # the two ends of the wake-up pipe

    def take_exceptions(self, uncaught, threads: bool) -> None:
        """uncaught(kind, error, trace) is called for what no one caught; on other threads than the main one if `threads`."""
        sys.excepthook = uncaught
        if threads:
            threading.excepthook = lambda args: uncaught(
                args.exc_type, args.exc_value, args.exc_traceback
            )

    def take_exits(self, leave) -> None:
        """leave() is called when the process exits, before MPI is finalized; `status` is known by then."""
        sys.exit = self._exit
        atexit.register(leave)
        os.register_at_fork(after_in_child=lambda: self._leave_child_alone(leave))

    def take_signals(self, numbers) -> None:
        """Let those of the signals that are at their default action be `heard`; a script's own handlers stay."""
        self._ear, self._voice = os.pipe()
        os.set_blocking(self._voice, False)
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    signal.signal(number, _by_the_thread)
            signal.set_wakeup_fd(self._voice, warn_on_full_buffer=False)

    def heard(self, seconds) -> list:
        """The signals that came; waits for one or for `wake`, at most so many seconds (None: for ever)."""
        ready, _, _ = select.select([self._ear], [], [], seconds)
        numbers = os.read(self._ear, 512) if ready else b""
        return [
            number for number in numbers if number and signal.getsignal(number) is _by_the_thread
        ]

    def wake(self) -> None:
        """End a wait in `heard`."""
        os.write(self._voice, b"\0")

    def report_as_before(self, kind, error, trace) -> None:
        """Hand an exception to the excepthook that was there first."""
        self._before[0](kind, error, trace)

    def _exit(self, status=None):
        """sys.exit that remembers: nothing tells an atexit handler the status."""
        self.status = status if isinstance(status, int) else int(status is not None)
        raise SystemExit(status)

    def _leave_child_alone(self, leave) -> None:
        """A forked child is no rank: its faults are its own."""
        atexit.unregister(leave)
        sys.excepthook, threading.excepthook, sys.exit = self._before
        if self._ear is not None:
            signal.set_wakeup_fd(-1)
        for number in END_SIGNALS:
            if signal.getsignal(number) is _by_the_thread:
                signal.signal(
                    number,
                    signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
                )


def say(text: str) -> None:
    """One write to stderr, then what the script itself had buffered; a closed terminal is no reason to go on."""
    for stream, last in ((sys.stderr, text), (sys.stdout, "")):
        try:
            stream.write(last)
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def _by_the_thread(number, frame) -> None:
    """The signal's Python handler: `heard` has read the number from the wake-up descriptor."""
