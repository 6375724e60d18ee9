"""Files that are read whole, and what all files on disk need. What is read may be damaged, or come from anyone. No MPI here.

A file is opened only if it is a regular one (a pipe would wait for its writer, a device may never end), read only up to a
bound, and its JSON may neither nest without end nor hold numbers that are not finite.
"""

import errno
import json
import os
import stat
from contextlib import contextmanager

JSON_BYTES = 64 << 20  # of a manifest: 5 TB of state have 60 MB of block sums
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # of a folder's fsync: CIFS, FUSE
LOST = (errno.ENOENT, errno.EIO, errno.ESTALE)


class Damaged(ValueError):
    """A file is missing, or not what was written."""


@contextmanager
def named(path):
    """The operating system's errors become ValueErrors that name the file in one line."""
    try:
        yield
    except OSError as error:
        kind = Damaged if error.errno in LOST else ValueError
        raise kind(f"{path}: {error.strerror or error}") from None


def open_file(path, buffering=-1):
    """Open a regular file for reading. Raises ValueError for anything else."""
    with named(path):
        file = open(path, "rb", buffering, opener=_without_waiting)  # noqa: SIM115  (the caller's)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path}: not a regular file")
    return file


def read_file(path, most):
    """The bytes of a file. Raises ValueError for one of more than `most` bytes."""
    with open_file(path) as file, named(path):
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path}: expected at most {most:,} bytes, got {size:,}")
        return file.read(size)


def read_json(path, most=JSON_BYTES):
    """What a JSON file holds. Raises ValueError where it is too long, nested too deeply, or no JSON."""
    return parse_json(read_file(path, most), path)


def parse_json(content, path):
    """What JSON text (bytes) holds. Raises ValueError, which names the file, for text that is none."""
    try:
        return json.loads(content, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"{path}: JSON that is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


def sync_folder(path):
    """Make sure that a folder's entries (new files, renames) are on disk; False where the file system cannot do that."""
    with named(path):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return False
        finally:
            os.close(folder)
    return True


def write_text(path, text):
    """Write a small file and make sure that it is on disk."""
    with named(path), open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _without_waiting(path, flags):
    return os.open(path, flags | os.O_NONBLOCK)


def _refuse_constant(name):
    raise ValueError(f"{name} is not a number")
