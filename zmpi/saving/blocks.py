"""Files in blocks of 1 MiB, each with a checksum, so that any range can be read and checked alone. No MPI in here.

A block's sum is its CRC-32: the fastest of the standard library's, and it finds every burst of up to 32 bits and every
two flips in a block. A file's digest is SHA-256 over its block sums: a file is as good as its length, its sums and the
record that names them, so nobody has to read a file as a whole to trust a part of it.
"""

import hashlib
import os
import zlib
from dataclasses import asdict, dataclass

import numpy as np

from zmpi.process.files import Damaged, named, open_file

CHECKED_BYTES = 1 << 20  # bytes


@dataclass(frozen=True)
class Record:
    """What a manifest knows of one file."""

    name: str
    bytes: int
    digest: str  # SHA-256 of the block sums, each as 4 bytes, the lowest first
    sums: list  # CRC-32 of each block of CHECKED_BYTES bytes; the last one may be shorter

    def entry(self):
        """The record as JSON holds it."""
        return asdict(self)

    def is_whole(self):
        """Whether sums, digest and length fit together."""
        return self.digest == digest_of(self.sums) and len(self.sums) == -(
            -self.bytes // CHECKED_BYTES
        )


def digest_of(sums):
    """A file's digest, from its block sums."""
    return hashlib.sha256(b"".join(number.to_bytes(4, "little") for number in sums)).hexdigest()


class BlockWriter:
    """A new file, written from arrays as they lie in memory: nothing is copied. finish() puts it on disk.

    Raises ValueError where the file exists or cannot be written (disk full, size limit).
    """

    def __init__(self, path):
        self.path = path
        self._sums, self._crc, self._filled, self._bytes = [], 0, 0, 0
        with named(path):
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115  (closed by finish or close)

    def write(self, array):
        """Append a contiguous vector's bytes."""
        rest = array.view(np.uint8)
        while len(rest):
            with named(self.path):
                written = self._file.write(rest[: CHECKED_BYTES - self._filled])
            self._crc = zlib.crc32(rest[:written], self._crc)
            self._filled += written
            self._bytes += written
            if self._filled == CHECKED_BYTES:
                self._end_block()
            rest = rest[written:]

    def finish(self):
        """Make sure that the file is on disk; returns its Record."""
        if self._filled:
            self._end_block()
        with named(self.path):
            os.fsync(self._file.fileno())
        self.close()
        return Record(os.path.basename(self.path), self._bytes, digest_of(self._sums), self._sums)

    def close(self):
        """Close the file. What was not finished is no good."""
        self._file.close()

    def _end_block(self):
        self._sums.append(self._crc)
        self._crc = self._filled = 0


class Room:
    """Memory for one block. Readers of several files may share it."""

    def __init__(self):
        self.block, self.holds = (
            np.empty(CHECKED_BYTES, np.uint8),
            None,
        )  # holds: (whose, which block)


class BlockReader:
    """A file of a Record, read in whole blocks, each compared with its sum. One block is in memory at a time, in `room`.

    Raises Damaged for a missing file, another length than recorded, or a block whose sum is wrong: each names the file.
    """

    def __init__(self, path, record, room=None):
        self.path, self.record, self._room = path, record, room or Room()
        self._file = open_file(path, buffering=0)  # closed by __exit__
        found = os.fstat(self._file.fileno()).st_size
        if found != record.bytes:
            self._file.close()
            raise Damaged(f"{path}: {found} bytes, expected {record.bytes}: damaged")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()
        self._room = None  # the caller's name for this reader may outlive it

    def check(self, first, last):
        """Compare blocks first ... last - 1 with their sums."""
        for number in range(first, last):
            self._load(number)

    def read(self, start, out):
        """Fill the vector `out` with the bytes from `start` on."""
        rest = out.view(np.uint8)
        while len(rest):
            number, offset = divmod(start, CHECKED_BYTES)
            found = self._load(number)[offset : offset + len(rest)]
            rest[: len(found)] = found
            rest, start = rest[len(found) :], start + len(found)

    def _load(self, number):
        """A view of a block, as long as it is in memory."""
        length = min(CHECKED_BYTES, self.record.bytes - number * CHECKED_BYTES)
        block, room = self._room.block[:length], self._room
        if room.holds != (self, number):
            room.holds = None
            with named(self.path):
                done = 0
                while done < length and (
                    count := os.preadv(
                        self._file.fileno(), [block[done:]], number * CHECKED_BYTES + done
                    )
                ):
                    done += count
            if done < length or zlib.crc32(block) != self.record.sums[number]:
                raise Damaged(
                    f"{self.path}: the block at byte {number * CHECKED_BYTES} has another checksum: damaged"
                )
            room.holds = self, number
        return block


def sampled_checksum(path, samples=64, length=1 << 16):
    """The CRC-32 of a file's length and of samples, evenly spread: tells files apart without reading them as a whole."""
    with open_file(path) as file, named(path):
        size = os.fstat(file.fileno()).st_size
        checksum = zlib.crc32(str(size).encode())
        for i in range(samples):
            file.seek(max(0, size - length) * i // (samples - 1))
            checksum = zlib.crc32(file.read(length), checksum)
    return checksum
