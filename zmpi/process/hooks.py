"""The process hooks that the guard uses: uncaught exceptions, sys.exit, exits, signals, forks.

Python runs signal handlers on the main thread, between instructions, so never while that thread is
inside MPI. So a thread reads signals from the wake-up descriptor, which the C handler writes to.
"""

import atexit
import os
import select
import signal
import sys
import threading

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Hooks:
    """The installed hooks and what they saw. One per process; removed only in a forked child."""

    def __init__(self):
        self.status = None  # of the last sys.exit; None: not called
        self._before = sys.excepthook, threading.excepthook, sys.exit
        self._ear = self._voice = None  # the two ends of the wake-up pipe

    def take_exceptions(self, uncaught, threads: bool) -> None:
        """Call uncaught(kind, error, trace) for uncaught exceptions; `threads`: of any thread."""
        sys.excepthook = uncaught
        if threads:
            threading.excepthook = lambda args: uncaught(
                args.exc_type, args.exc_value, args.exc_traceback
            )

    def take_exits(self, leave) -> None:
        """Call leave() when the process exits, before MPI is finalized, once `status` is known."""
        sys.exit = self._exit
        atexit.register(leave)
        os.register_at_fork(after_in_child=lambda: self._leave_child_alone(leave))

    def take_signals(self, numbers) -> None:
        """Deliver these signals to `heard` if at their default action; a script's handlers stay."""
        self._ear, self._voice = os.pipe()
        os.set_blocking(self._voice, False)
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    signal.signal(number, _by_the_thread)
            signal.set_wakeup_fd(self._voice, warn_on_full_buffer=False)

    def heard(self, seconds) -> list:
        """The signals received; waits for one or for `wake`, at most `seconds` (None: forever)."""
        ready, _, _ = select.select([self._ear], [], [], seconds)
        numbers = os.read(self._ear, 512) if ready else b""
        return [
            number for number in numbers if number and signal.getsignal(number) is _by_the_thread
        ]

    def wake(self) -> None:
        """End a wait in `heard`."""
        os.write(self._voice, b"\0")

    def report_as_before(self, kind, error, trace) -> None:
        """Pass an exception to the previous excepthook."""
        self._before[0](kind, error, trace)

    def _exit(self, status=None):
        """sys.exit that records its status: an atexit handler has no other way to know it."""
        self.status = status if isinstance(status, int) else int(status is not None)
        raise SystemExit(status)

    def _leave_child_alone(self, leave) -> None:
        """A forked child is not a rank: its faults are its own."""
        atexit.unregister(leave)
        sys.excepthook, threading.excepthook, sys.exit = self._before
        if self._ear is not None:
            signal.set_wakeup_fd(-1)
        for number in END_SIGNALS:
            if signal.getsignal(number) is _by_the_thread:
                interrupt = number == signal.SIGINT
                signal.signal(number, signal.default_int_handler if interrupt else signal.SIG_DFL)


def say(text: str) -> None:
    """Write to stderr, then flush the script's own stdout; a closed terminal is ignored."""
    for stream, last in ((sys.stderr, text), (sys.stdout, "")):
        try:
            stream.write(last)
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def _by_the_thread(number, frame) -> None:
    """The signals' Python handler: empty, as `heard` reads the wake-up descriptor."""
