"""The files that a command writes for its user: a log, a trace, figures.

Each is opened before the work begins and held until the end, so that no work is lost:

    a link         is followed, even to a missing target, and stays a link
    an older file  is replaced if this command wrote it; any other file is refused, and untouched
    another job    using the same file is an error, found by a lock (`unlocked`: not supported here)
    stdout         (/dev/stdout, or the file it was redirected to) is written in place
    an error       leaves everything as it was
"""

import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from stat import S_ISREG

from zmpi.process.files import named

RECOGNISED_BYTES = 1 << 24  # bytes read from a file's start to recognise it


class Output:
    """A file written for the user, until close(); opened for appending, so that it can be rotated.

    `recognise(head)` tells from the first RECOGNISED_BYTES whether a file is the command's own;
    `kind` describes it ("a log of zmpi.train"). ValueError, with flag and path, for a file that
    cannot be written or must not be replaced.
    """

    def __init__(self, flag, path, recognise, kind):
        self.flag, self.path, self.unlocked = flag, path, False
        self._made = not os.path.exists(path)
        with self._named():
            self._file, self.regular = self._open_locked()
        try:
            if self.size() and not recognise(self._head()):
                raise ValueError(
                    f"{flag}: {path} exists and is not {kind}; choose another file, or remove it"
                )
        except ValueError:
            self.close()
            raise

    def size(self):
        """Bytes in the file; 0 for a pipe or a device."""
        return os.fstat(self._file).st_size if self.regular else 0

    def lines(self):
        """The file's lines, as bytes; none for a pipe or a device."""
        if self.regular:
            with self._named(), open(os.dup(self._file), "rb") as file:
                file.seek(0)
                yield from file

    def cut(self, length):
        """Truncate a file to `length` bytes; nothing happens to a pipe or a device."""
        if length < self.size():  # or an append-only file (chattr +a) would be refused
            with self._named():
                os.ftruncate(self._file, length)

    def write(self, data):
        """Append bytes, or an array's. On failure the file is cut back to its length before."""
        before, rest = self.size(), memoryview(data).cast("B")
        try:
            with self._named():
                while rest:
                    rest = rest[os.write(self._file, rest) :]
        except ValueError:
            with suppress(ValueError):
                self.cut(before)
            raise

    def replace(self, text):
        """Overwrite the whole file."""
        self.cut(0)
        self.write(text.encode())

    def close(self):
        """Release the file. If it was created here and is still empty, remove it."""
        if self._file is None:
            return
        if self._made and self.regular and not self.size():
            with suppress(OSError):
                os.unlink(os.path.realpath(self.path))
        os.close(self._file)
        self._file = None

    def _head(self):
        with self._named():
            return os.pread(self._file, RECOGNISED_BYTES, 0)

    def _open_locked(self):
        """(descriptor, whether it is a regular file)."""
        stream = _own_stream(self.path)
        if stream is not None:
            return os.dup(stream), False
        special = os.path.exists(self.path) and not os.path.isfile(self.path)
        access = os.O_WRONLY | os.O_NOCTTY if special else os.O_RDWR | os.O_CREAT
        while True:
            file = os.open(self.path, access | os.O_APPEND, 0o666)
            if not S_ISREG(os.fstat(file).st_mode):
                return file, False
            try:
                self._lock(file)
                if self._is_at_path(file):
                    return file, True  # otherwise a refused job just removed it
            except (OSError, ValueError):
                os.close(file)
                raise
            os.close(file)

    def _is_at_path(self, file):
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        return False

    def _lock(self, file):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.flag}: {self.path} is in use by another job") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            self.unlocked = True  # some NFS and Lustre: give each job its own file

    @contextmanager
    def _named(self):
        with named(f"{self.flag}: {self.path}"):
            yield


def _own_stream(path):
    """1 or 2 if the path is this process's own stdout or stderr, else None."""
    for number in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(number)):
                return number
    return None
