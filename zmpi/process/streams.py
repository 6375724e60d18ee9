"""A command's stdout and stderr, which may be closed, on a full disk, or piped to a short reader.

A long run must not end because nobody reads its output (`| head -1`, a closed terminal).
"""

import errno
import io
import os
import sys


class Stream(io.TextIOWrapper):
    """A text stream that switches to the null device at its first failure; see check_printed."""

    failure = None  # the first OSError
    replaced = None  # the stream whose buffer this one uses

    @property
    def lost(self):
        """Whether output is discarded."""
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
        os.dup2(null, self.fileno())  # the rest of the buffer goes there too
        os.close(null)


def check_printed():
    """Raise ValueError if output was lost (a full disk). A reader that stops early is no error."""
    sys.stdout.flush()
    failure = getattr(sys.stdout, "failure", None)  # a test's stream has none
    if failure and failure.errno != errno.EPIPE:
        raise ValueError(f"stdout: {failure.strerror}")


def forgiving_output():
    """Make stdout and stderr Streams; a closed one (`>&-`) becomes the null device.

    Characters that the terminal's encoding lacks are shown as "?". Call it before opening anything:
    otherwise a file or a socket of MPI could get descriptor 1, and receive the output.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: this one
    sys.stdout = sys.__stdout__ = _forgiving(sys.stdout, 1, "replace")
    sys.stderr = sys.__stderr__ = _forgiving(sys.stderr, 2, "backslashreplace")  # Python's own


def _forgiving(stream, number, errors):
    if stream is None:
        stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (never closed)
    if type(stream) is not io.TextIOWrapper:  # a Stream already, or a test's
        return stream
    settings = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    stream.flush()
    forgiving = Stream(stream.buffer, stream.encoding, errors, **settings)
    forgiving.replaced = stream  # kept alive: a debugger may use it, and its end closes the buffer
    return forgiving
