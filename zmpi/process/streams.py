"""stdout and stderr of a command: they may be closed, on a full disk, or read by someone who leaves early.

A run of hours does not end because nobody reads what it prints (`| head -1`, a terminal that is gone).
"""

import errno
import io
import os
import sys


class Stream(io.TextIOWrapper):
    """A text stream that goes to the null device from its first failure on. That is no error by itself: see check_printed."""

    failure = None  # the OSError, once there is one
    replaced = None  # the stream whose buffer this one took over

    @property
    def lost(self):
        """Whether what is written goes nowhere."""
        return self.failure is not None

    def write(self, text):
        """As TextIOWrapper's."""
        try:
            return super().write(text)
        except OSError as error:
            self._go_on_without(error)
            return len(text)

    def flush(self):
        """As TextIOWrapper's."""
        try:
            super().flush()
        except OSError as error:
            self._go_on_without(error)

    def _go_on_without(self, error):
        if self.lost:
            return
        self.failure = error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())  # what is still buffered goes there too
        os.close(null)


def check_printed():
    """Raise ValueError if a part of what was printed did not get where it should (a full disk). A reader may leave early."""
    sys.stdout.flush()
    failure = getattr(sys.stdout, "failure", None)  # a test's stream has none
    if failure and failure.errno != errno.EPIPE:
        raise ValueError(f"stdout: {failure.strerror}")


def forgiving_output():
    """Make stdout and stderr Streams. A closed one (`>&-`) becomes the null device.

    What the terminal's encoding lacks is shown as "?". Called before anything is opened: else the
    first file, or a socket of MPI's, would be number 1, and be printed to.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = sys.__stdout__ = _forgiving(sys.stdout, 1, "replace")
    sys.stderr = sys.__stderr__ = _forgiving(sys.stderr, 2, "backslashreplace")  # Python's own


def _forgiving(stream, number, errors):
    if stream is None:
        stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (for good)
    if type(stream) is not io.TextIOWrapper:  # a Stream already, or a test's
        return stream
    settings = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    stream.flush()
    forgiving = Stream(stream.buffer, stream.encoding, errors, **settings)
    forgiving.replaced = (
        stream  # a debugger or a log may still print to it; alone it would close the buffer
    )
    return forgiving
