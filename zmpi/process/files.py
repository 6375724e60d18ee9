"""Reading files whole, and syncing them to disk. The content may be damaged, or come from anyone.

Only regular files are opened (a pipe would block, a device may never end) and read up to a bound.
JSON may not nest too deeply, nor hold numbers that are not finite.
"""

import errno
import json
import os
import stat
from contextlib import contextmanager

JSON_BYTES = 64 << 20  # enough for a manifest: 5 TB of state have 60 MB of block sums
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # fsync of a folder on CIFS, FUSE
LOST = (errno.ENOENT, errno.EIO, errno.ESTALE)


class Damaged(ValueError):
    """A file is missing, or not what was written."""


@contextmanager
def named(path):
    """Turn the operating system's errors into one-line ValueErrors that name the file."""
    try:
        yield
    except OSError as error:
        kind = Damaged if error.errno in LOST else ValueError
        raise kind(f"{path}: {error.strerror or error}") from None


def open_file(path, buffering=-1):
    """Open a regular file for reading; ValueError for anything else."""
    with named(path):
        file = open(path, "rb", buffering, opener=_without_waiting)  # noqa: SIM115  (the caller's)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path}: not a regular file")
    return file


def read_file(path, most):
    """The bytes of a file; ValueError if it has more than `most`."""
    with open_file(path) as file, named(path):
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path}: expected at most {most:,} bytes, got {size:,}")
        return file.read(size)


def parse_json(content, path):
    """The content of JSON text (bytes); ValueError, naming the file, if it is not JSON."""
    try:
        return json.loads(content, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"{path}: JSON nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


def sync_folder(path):
    """Flush a folder's entries (new files, renames) to disk; False if the file system cannot."""
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
    """Write a small file and flush it to disk."""
    with named(path), open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _without_waiting(path, flags):
    return os.open(path, flags | os.O_NONBLOCK)


def _refuse_constant(name):
    raise ValueError(f"{name} is not a number")
