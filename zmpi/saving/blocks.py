"""Files in blocks of 1 MiB, each with a checksum, so that any range can be read and checked alone.

A block's sum is its CRC-32: the fastest in the standard library, it detects every burst of up to 32
bits and every two flipped bits in a block. A file's digest is the SHA-256 of its block sums, so
trusting a part of a file does not require reading all of it.
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
    """A file's entry in a manifest."""

    name: str
    bytes: int
    digest: str  # SHA-256 of the block sums, each as 4 bytes, little-endian
    sums: list  # CRC-32 of each block of CHECKED_BYTES bytes; the last may be shorter

    def entry(self):
        """The record as JSON stores it."""
        return asdict(self)

    def is_whole(self):
        """Whether sums, digest and length are consistent."""
        return self.digest == digest_of(self.sums) and len(self.sums) == -(
            -self.bytes // CHECKED_BYTES
        )


def digest_of(sums):
    """A file's digest from its block sums."""
    return hashlib.sha256(b"".join(number.to_bytes(4, "little") for number in sums)).hexdigest()


class BlockWriter:
    """A new file, written from arrays' own memory, without a copy; finish() flushes it to disk.

    Raises ValueError if the file exists or cannot be written (disk full, size limit).
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
        """Flush the file to disk; returns its Record."""
        if self._filled:
            self._end_block()
        with named(self.path):
            os.fsync(self._file.fileno())
        self.close()
        return Record(os.path.basename(self.path), self._bytes, digest_of(self._sums), self._sums)

    def close(self):
        """Close the file; without finish() it is incomplete."""
        self._file.close()

    def _end_block(self):
        self._sums.append(self._crc)
        self._crc = self._filled = 0


class Room:
    """Memory for one block, which readers of several files may share."""

    def __init__(self):
        self.block = np.empty(CHECKED_BYTES, np.uint8)
        self.holds = None  # (reader, block number)


class BlockReader:
    """Reads a Record's file in whole blocks, each checked, with one in memory at a time (`room`).

    Raises Damaged, naming the file, if it is missing or has a wrong length or block sum.
    """

    def __init__(self, path, record, room=None):
        self.path, self.record, self._room = path, record, room or Room()
        self._file = open_file(path, buffering=0)  # closed by __exit__
        found = os.fstat(self._file.fileno()).st_size
        if found != record.bytes:
            self._file.close()
            raise Damaged(f"{path}: damaged: expected {record.bytes} bytes, got {found}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()
        self._room = None  # the caller may keep this reader's name

    def check(self, first, last):
        """Check blocks first ... last - 1 against their sums."""
        for number in range(first, last):
            self._load(number)

    def read(self, start, out):
        """Fill the vector `out` with the bytes from `start`."""
        rest = out.view(np.uint8)
        while len(rest):
            number, offset = divmod(start, CHECKED_BYTES)
            found = self._load(number)[offset : offset + len(rest)]
            rest[: len(found)] = found
            rest, start = rest[len(found) :], start + len(found)

    def _load(self, number):
        """A view of a block, valid until the next is loaded."""
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
                where = f"the block at byte {number * CHECKED_BYTES}"
                raise Damaged(f"{self.path}: damaged: {where} has a wrong checksum")
            room.holds = self, number
        return block


def sampled_checksum(path, samples=64, length=1 << 16):
    """The CRC-32 of a file's length and evenly spaced samples: tells large files apart quickly."""
    with open_file(path) as file, named(path):
        size = os.fstat(file.fileno()).st_size
        checksum = zlib.crc32(str(size).encode())
        for i in range(samples):
            file.seek(max(0, size - length) * i // (samples - 1))
            checksum = zlib.crc32(file.read(length), checksum)
    return checksum
