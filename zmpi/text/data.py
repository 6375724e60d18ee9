"""Text as token windows. Sequence i of step s is a function of (seed, s, i) only, i counted over the global batch.

Global micro-batch j holds the sequences j x b ... j x b + b - 1 (b: sequences per micro-batch); micro-batch m of rank r
is j = m x size + r. So any split of a global batch over ranks and micro-batches sees the same sequences in the same order.
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
EVALUATED = 128  # held-out sequences of one evaluation, at most
END = 1 << 20  # tokens at either end of a part whose bytes are in its checksum
SPREAD, SAMPLE = 64, 1 << 16  # and that many samples of so many tokens, evenly spread over all


@dataclass(frozen=True)
class Text:
    """Token vectors, or FileTokens (a rank reads only the windows it uses), cut into two parts."""

    train: np.ndarray
    held_out: np.ndarray  # the last tenth, or empty where it would be too short to hold a window
    context: int  # tokens of a sequence's input; its window is one longer

    @cached_property
    def fingerprint(self):
        """{"tokens", "kind", "crc32", "spread_crc32"}: tells one text from another, at the cost of reading at most 11 MiB.

        `crc32` is of the ends of both parts, `spread_crc32` of samples over all tokens (of every token where they are
        fewer than SPREAD x SAMPLE). In a larger text a change between the samples that keeps its length is not seen.
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
        """The windows that begin at `starts`, as int64 (len(starts), context + 1)."""
        window_BT = np.empty((len(starts), self.context + 1), np.int64)
        for row, start in zip(window_BT, starts, strict=True):
            row[:] = tokens[start : start + self.context + 1]
        return window_BT

    @property
    def evaluated(self):
        """Sequences of one evaluation, over all ranks: the first of the held-out text, without overlap."""
        return min(EVALUATED, max(0, len(self.held_out) - 1) // self.context)

    def starts(self, seed, step, sequences):
        """Where in `train` the given sequences of a step begin: drawn uniformly, each by itself."""
        choices = len(self.train) - self.context

        def draw(i):
            return int(
                np.random.Generator(np.random.Philox(key=seed, counter=[i, step, 0, 0])).integers(
                    choices
                )
            )

        return [draw(i) for i in sequences]


@dataclass(frozen=True)
class Batches:
    """One rank's share of the global batches of a Text."""

    text: Text
    rank: int
    size: int
    micro_batch: int  # sequences
    last_only: bool  # whether a sequence's one target is its window's last token (MLP), or every next token (GPT)

    def __post_init__(self):
        COUNT.of("micro_batch", self.micro_batch)

    @classmethod
    def on(cls, world, text, micro_batch, last_only):
        """The share of this rank of a World."""
        return cls(text, world.rank, world.size, micro_batch, last_only)

    def of_step(self, seed, step, accumulate):
        """This rank's micro-batches of a training step: [(inputs, targets), ...]."""
        found = []
        for m in range(accumulate):
            starts = self.text.starts(seed, step, self._sequences(m))
            found.append(self._split(self.text.windows(starts, self.text.train)))
        return found

    def held_out(self):
        """This rank's micro-batches of an evaluation: the same windows, end to end, at every split.

        Every rank brings as many; what is past the end is filled with windows whose targets (-1) are not counted.
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
        return window_BT[:, :-1], window_BT[:, -1].copy() if self.last_only else window_BT[
            :, 1:
        ].copy()


def load_text(source, context, vocab, rank=0, size=1):
    """The Text of `source`: "builtin", a text file (its bytes are the tokens), or a `.bin` file of uint16 tokens.

    Raises ValueError, in one line, for what cannot be trained on. The tokens of a `.bin` file are compared with `vocab`
    once, each rank looking through its share.
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
    """What a log and a checkpoint keep of a text: its fingerprint, and for "builtin" the Python that it comes with."""
    python = {"python": platform.python_version()} if source == "builtin" else {}
    return {**text.fingerprint, **python}


def _checksum(parts):
    """The CRC-32 of the bytes of some token vectors."""
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(np.ascontiguousarray(part), checksum)
    return checksum


def builtin_text():
    """The text of pydoc's topics, by key, as bytes: about 450 kB of English and code that every CPython carries.

    Patch versions of Python differ in it: its fingerprint says which one was trained on.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "--data: this Python lacks the built-in corpus (pydoc_data); name a text file"
        ) from None
    return "".join(topics[key] for key in sorted(topics)).encode()


class FileTokens:
    """A slice of a file's tokens. They are read when NumPy asks for an array of them, and slices of it are not.

    Read and not mapped: of a file that was cut short, or a disk that fails, this raises ValueError, and a map kills the
    process with SIGBUS.
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
                f"--data: {self._file.name}: now {size} bytes; it was cut short while it was read"
            )
        return out if dtype is None else out.astype(dtype, copy=False)


def _opened(path):
    """A file's tokens. Raises ValueError for what is no file, or of another format than its name says."""
    refuse_irregular("--data", path)
    dtype = np.dtype("<u2" if path.suffix == ".bin" else np.uint8)
    with named(f"--data: {path}"):
        file = open(path, "rb", buffering=0)  # noqa: SIM115  (open as long as its tokens are used)
        size, beginning = os.fstat(file.fileno()).st_size, file.read(LOOKED_AT)
    found = (not_uint16 if path.suffix == ".bin" else not_text)(beginning)
    if found:
        expected = "little-endian uint16 tokens" if path.suffix == ".bin" else "text"
        way = "unpack it, or convert it to UTF-8 text or to a .bin file"
        raise ValueError(
            f"--data: {path}: expected {expected}, got {found}; {way} (NumPy: tokens.astype('<u2').tofile)"
        )
    if size % dtype.itemsize:
        raise ValueError(f"--data: {path}: uint16 tokens need an even number of bytes, got {size}")
    return FileTokens(file, dtype, 0, size // dtype.itemsize)


def _highest(tokens, start, stop, length=1 << 22):
    """The highest of tokens[start:stop], of some of them at a time: a file is never in memory as a whole."""
    stop = min(stop, len(tokens))
    for first in range(start, stop, length):
        yield int(np.max(tokens[first : min(first + length, stop)]))
