"""Text as token windows. Sequence i of a step's global batch depends only on (seed, step, i).

Global micro-batch j holds sequences j x b ... j x b + b - 1 (b: sequences per micro-batch), and
micro-batch m of rank r is j = m x size + r. So every split of a global batch over ranks and
micro-batches sees the same sequences in the same order.
"""

import os
import platform
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from zmpi.numbers.domains import SIZE_BOUND, Domain
from zmpi.process.files import named
from zmpi.text.formats import LOOKED_AT, not_text, not_uint16, refuse_irregular

COUNT = Domain(1, below=SIZE_BOUND, whole=True)
EVALUATED = 128  # held-out sequences per evaluation, at most
END = 1 << 20  # tokens at each end of a part that enter its checksum
SPREAD, SAMPLE = 64, 1 << 16  # evenly spaced samples, and tokens in each, for the other checksum


@dataclass(frozen=True)
class Text:
    """Tokens in two parts: vectors, or FileTokens (a rank reads only the windows it uses)."""

    train: np.ndarray
    held_out: np.ndarray  # the last tenth; empty if either part would be too short for a window
    context: int  # tokens of a sequence's input; its window has one more

    @cached_property
    def fingerprint(self):
        """{"tokens", "kind", "crc32", "spread_crc32"}, which identify a text; reads at most 11 MiB.

        `crc32` covers the ends of both parts, `spread_crc32` samples of all tokens (every token if
        fewer than SPREAD x SAMPLE). In a larger text it misses changes between the samples.
        """
        ends = (self.train[:END], self.train[-END:], self.held_out[-END:])
        last = max(0, len(self.train) + len(self.held_out) - SAMPLE)
        starts = (last * i // (SPREAD - 1) for i in range(SPREAD))
        return {
            "tokens": len(self.train) + len(self.held_out),
            "kind": self.train.dtype.name,
            "crc32": _checksum(ends),
            "spread_crc32": _checksum(self._tokens(start, start + SAMPLE) for start in starts),
        }

    def _tokens(self, start, stop):
        """tokens[start:stop] of both parts as one."""
        cut = len(self.train)
        inner = self.train[start:stop], self.held_out[max(0, start - cut) : max(0, stop - cut)]
        return np.concatenate(inner)

    def windows(self, starts, tokens):
        """The windows starting at `starts`, as int64 (len(starts), context + 1)."""
        window_BT = np.empty((len(starts), self.context + 1), np.int64)
        for row, start in zip(window_BT, starts, strict=True):
            row[:] = tokens[start : start + self.context + 1]
        return window_BT

    @property
    def evaluated(self):
        """Sequences per evaluation, over all ranks: the first held-out ones, without overlap."""
        return min(EVALUATED, max(0, len(self.held_out) - 1) // self.context)

    def starts(self, seed, step, sequences):
        """Where in `train` these sequences of a step start: drawn uniformly and independently."""
        choices = len(self.train) - self.context

        def draw(i):
            random = np.random.Generator(np.random.Philox(key=seed, counter=[i, step, 0, 0]))
            return int(random.integers(choices))

        return [draw(i) for i in sequences]


@dataclass(frozen=True)
class Batches:
    """One rank's share of the global batches of a Text."""

    text: Text
    rank: int
    size: int
    micro_batch: int  # sequences
    last_only: bool  # the only target is the window's last token (MLP); else every next one (GPT)

    def __post_init__(self):
        COUNT.of("micro_batch", self.micro_batch)

    @classmethod
    def on(cls, world, text, micro_batch, last_only):
        """This rank's share in a World."""
        return cls(text, world.rank, world.size, micro_batch, last_only)

    def of_step(self, seed, step, accumulate):
        """This rank's micro-batches of a training step: [(inputs, targets), ...]."""
        found = []
        for m in range(accumulate):
            starts = self.text.starts(seed, step, self._sequences(m))
            found.append(self._split(self.text.windows(starts, self.text.train)))
        return found

    def held_out(self):
        """This rank's micro-batches of an evaluation: the same consecutive windows for any split.

        Every rank has the same number; windows past the end have targets -1, which do not count.
        """
        text, total = self.text, self.text.evaluated
        found = []
        for m in range(-(-total // (self.micro_batch * self.size))):
            sequences = self._sequences(m)
            starts = [i * text.context if i < total else 0 for i in sequences]
            inputs, targets = self._split(text.windows(starts, text.held_out))
            targets[[i >= total for i in sequences]] = -1
            found.append((inputs, targets))
        return found

    @property
    def held_out_tokens(self):
        """Counted targets of one evaluation, over all ranks."""
        return self.text.evaluated * (1 if self.last_only else self.text.context)

    def _sequences(self, m):
        j = m * self.size + self.rank
        return range(j * self.micro_batch, (j + 1) * self.micro_batch)

    def _split(self, window_BT):
        targets = window_BT[:, -1] if self.last_only else window_BT[:, 1:]
        return window_BT[:, :-1], targets.copy()


def load_text(source, context, vocab, rank=0, size=1):
    """The Text of `source`: "builtin", a text file (tokens are bytes) or a `.bin` of uint16 tokens.

    Raises a one-line ValueError if it cannot be trained on. The tokens of a `.bin` file are checked
    against `vocab` once, each rank checking its share.
    """
    name = "--data" if source == "builtin" else f"--data: {source}"
    context, vocab = COUNT.of("--context", context), COUNT.of("--vocab", vocab)
    tokens = (
        np.frombuffer(builtin_text(), np.uint8) if source == "builtin" else _opened(Path(source))
    )
    if len(tokens) <= context:
        raise ValueError(
            f"{name}: {len(tokens)} tokens; a window needs --context + 1 = {context + 1}:"
            f" use a longer text{f' or --context {len(tokens) - 1}' if len(tokens) > 1 else ''}"
        )
    if tokens.dtype == np.uint8 and vocab < 256:
        raise ValueError(f"--vocab: text is read as bytes and needs at least 256, got {vocab}")
    if tokens.dtype == np.uint16:
        share = -(-len(tokens) // size)
        highest = max(_highest(tokens, rank * share, (rank + 1) * share), default=0)
        if highest >= vocab:
            raise ValueError(
                f"{name}: token {highest} is not below --vocab {vocab}; use --vocab {highest + 1}"
            )
    cut = len(tokens) - len(tokens) // 10
    if min(cut, len(tokens) - cut) <= context:
        cut = len(tokens)
    return Text(tokens[:cut], tokens[cut:], context)


def described(text, source):
    """A text as logs and checkpoints record it: fingerprint and, if builtin, Python's version."""
    python = {"python": platform.python_version()} if source == "builtin" else {}
    return {**text.fingerprint, **python}


def _checksum(parts):
    """The CRC-32 of the bytes of token vectors."""
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(np.ascontiguousarray(part), checksum)
    return checksum


def builtin_text():
    """The text of pydoc's topics, sorted by key, as bytes: about 450 kB of English and code.

    Every CPython includes it, and patch versions differ: the fingerprint tells which one was used.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "--data: this Python lacks the built-in corpus (pydoc_data); choose a text file"
        ) from None
    return "".join(topics[key] for key in sorted(topics)).encode()


class FileTokens:
    """A slice of a file's tokens, read when NumPy asks for an array; slicing reads nothing.

    Not a memory map: if the file is truncated or the disk fails this raises ValueError, where a map
    would kill the process with SIGBUS.
    """

    def __init__(self, file, dtype, start, stop):
        self.dtype = dtype
        self._file, self._start, self._stop = file, start, stop  # in tokens

    def __len__(self):
        return self._stop - self._start

    def __getitem__(self, where):
        start, stop, _ = where.indices(len(self))
        first = self._start + start
        return FileTokens(self._file, self.dtype, first, first + max(0, stop - start))

    def __array__(self, dtype=None, copy=None):
        out = np.empty(len(self), self.dtype)
        rest, place = out.view(np.uint8), self._start * self.dtype.itemsize
        with named(f"--data: {self._file.name}"):
            while len(rest) and (count := os.preadv(self._file.fileno(), [rest], place)):
                rest, place = rest[count:], place + count
        if len(rest):
            size = os.fstat(self._file.fileno()).st_size
            raise ValueError(
                f"--data: {self._file.name}: truncated to {size} bytes while it was being read"
            )
        return out if dtype is None else out.astype(dtype, copy=False)


def _opened(path):
    """A file's tokens; ValueError if it is not a regular file, or not of the format of its name."""
    refuse_irregular("--data", path)
    dtype = np.dtype("<u2" if path.suffix == ".bin" else np.uint8)
    with named(f"--data: {path}"):
        file = open(path, "rb", buffering=0)  # noqa: SIM115  (stays open while its tokens are used)
        size, beginning = os.fstat(file.fileno()).st_size, file.read(LOOKED_AT)
    found = (not_uint16 if path.suffix == ".bin" else not_text)(beginning)
    if found:
        expected = "little-endian uint16 tokens" if path.suffix == ".bin" else "text"
        way = "unpack it, or convert it to UTF-8 text or to a .bin file"
        raise ValueError(
            f"--data: {path}: expected {expected}, got {found}; {way}"
            " (NumPy: tokens.astype('<u2').tofile)"
        )
    if size % dtype.itemsize:
        raise ValueError(f"--data: {path}: uint16 tokens need an even number of bytes, got {size}")
    return FileTokens(file, dtype, 0, size // dtype.itemsize)


def _highest(tokens, start, stop, length=1 << 22):
    """Yield the maximum of each block of tokens[start:stop]: a file is never wholly in memory."""
    stop = min(stop, len(tokens))
    for first in range(start, stop, length):
        yield int(np.max(tokens[first : min(first + length, stop)]))
