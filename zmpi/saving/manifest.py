"""A checkpoint's manifest: what was saved, and where every element of every parameter is.

A checkpoint is a folder with `manifest.json`, its SHA-256 in `manifest.sha256` (in sha256sum's
format) and one file per rank, which holds for each unit the rank's shard of the master and of each
moment, as raw numbers in the machine's byte order:

    unit outer:  master [shard_length]   m [shard_length]   v [shard_length]
    unit h.0:    master [shard_length]   ...

So element e of a unit's vector is in the file of rank e // shard_length, at every stage.

A manifest is data: it names no code to run, and no file outside its folder except the training
text. Reading one checks every field (schema.py).
"""

import hashlib
import json
import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from zmpi.process.files import JSON_BYTES, Damaged, parse_json, read_file, sync_folder, write_text
from zmpi.saving.blocks import BlockReader, Record, Room
from zmpi.saving.rules import TEXT, check, whole_number
from zmpi.saving.schema import check_entries

VERSION = 1  # of the format: raised when older readers would misread it, not for keys they may skip
JSON, DIGEST = "manifest.json", "manifest.sha256"


@dataclass(frozen=True)
class Piece:
    """Where elements start ... stop - 1 of a parameter (counted from its first) are."""

    file: int  # index in Manifest.files
    byte: int  # of element `start`
    start: int
    stop: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's manifest: `entries` is the JSON, `folder` has its files.

    Keys: format, byteorder, run_id and save (which save of which run; missing in older ones), step,
    updates, seed, size, stage, recipe, master (type), vectors (names), scaler, optimizer, model,
    units, files, and run (from zmpi.train: flags, data, and code: {flag: class} for the user's own
    files; null from Python).
    """

    folder: Path
    entries: dict

    @classmethod
    def read(cls, folder):
        """The manifest of a checkpoint; ValueError if missing, damaged or in a newer format."""
        path = Path(folder) / JSON
        text = read_file(path, JSON_BYTES)
        noted = read_file(path.with_name(DIGEST), 1024)
        if noted != _noted(text).encode():
            raise Damaged(
                f"{path}: damaged: its checksum differs from {DIGEST} (either may be wrong)"
            )
        entries = parse_json(text, path)
        check(entries, {"format": whole_number(1), "byteorder": TEXT}, path)
        if entries["format"] > VERSION:
            raise ValueError(
                f"{path}: expected format {VERSION} or older, got {entries['format']}: update zmpi"
            )
        if entries["byteorder"] != sys.byteorder:
            raise ValueError(
                f"{path}: saved on a {entries['byteorder']}-endian machine; "
                f"this one is {sys.byteorder}-endian"
            )
        check_entries(entries, path)
        return cls(Path(folder), entries)

    def write(self):
        """Write the manifest into its folder, and flush it to disk."""
        entries = {"format": VERSION, "byteorder": sys.byteorder, **self.entries}
        text = json.dumps(entries, allow_nan=False) + "\n"
        write_text(self.folder / JSON, text)
        write_text(self.folder / DIGEST, _noted(text.encode()))
        sync_folder(self.folder)

    def __getitem__(self, key):
        if key not in self.entries:
            raise ValueError(f"{self.folder / JSON}: {key} is missing")
        return self.entries[key]

    # -- its contents ------------------------------------------------------------------------------

    @cached_property
    def shapes(self):
        """{full name: shape} of all parameters, in order."""
        return {name: tuple(shape) for name, (_, _, _, shape) in self._places.items()}

    @property
    def dtype(self):
        """The number type of all vectors."""
        return np.dtype(self["master"])

    def pieces(self, name, vector, start, stop):
        """The Pieces of elements start ... stop - 1 of a parameter's "master", or of a moment."""
        unit, base, offset, _ = self._places[name]
        length, found = unit["shard_length"], []
        base += self["vectors"].index(vector) * length
        while start < stop:
            file, within = divmod(offset + start, length)
            upto = min(stop, start + length - within)
            found.append(Piece(file, (base + within) * self.dtype.itemsize, start, upto))
            start = upto
        return found

    def differs(self, shapes, where):
        """A line on the first parameter that differs from `shapes` (those of `where`), or None."""
        for name in [*self.shapes, *shapes]:
            saved, expected = self.shapes.get(name), shapes.get(name)
            if saved != expected:
                one, other = (
                    "missing" if shape is None else f"shape {shape}" for shape in (saved, expected)
                )
                return f"{self.folder}: {name}: {one} in the checkpoint, {other} in {where}"
        return None

    # -- its files ---------------------------------------------------------------------------------

    @cached_property
    def files(self):
        """The Records of the ranks' files; ValueError for an inconsistent one."""
        records = [Record(**entry) for entry in self["files"]]
        for record in records:
            if not record.is_whole():
                raise Damaged(f"{self.folder / record.name}: its record in {JSON} is damaged")
        return records

    def open(self, file, room=None):
        """A BlockReader of the file with that index."""
        return BlockReader(self.folder / self.files[file].name, self.files[file], room)

    def check(self, share, shares):
        """Check a contiguous `share` (0 ... shares - 1) of all files' blocks against their sums."""
        total = sum(len(record.sums) for record in self.files)
        first, last, before = share * total // shares, (share + 1) * total // shares, 0
        for file, record in enumerate(self.files):
            blocks = len(record.sums)
            begin, end = max(0, first - before), min(blocks, last - before)
            # share 0 also opens every file, which checks its length
            if begin < end or not blocks or share == 0:
                with self.open(file) as reader:
                    reader.check(begin, end)
            before += blocks

    @cached_property
    def _places(self):
        """{full name: (unit, where its master starts in each file, offset in the unit, shape)}."""
        places, base = {}, 0
        for unit in self["units"]:
            for parameter in unit["parameters"]:
                places[unit["prefix"] + parameter["name"]] = (
                    unit,
                    base,
                    parameter["offset"],
                    parameter["shape"],
                )
            base += unit["shard_length"] * len(self["vectors"])
        return places

    def read_elements(self, name, vector, start, stop, readers):
        """Elements start ... stop - 1 of a parameter's `vector`, as a new array.

        `readers`: a BlockReader per file, in order.
        """
        out = np.empty(stop - start, self.dtype)
        for piece in self.pieces(name, vector, start, stop):
            readers[piece.file].read(piece.byte, out[piece.start - start : piece.stop - start])
        return out

    def read_parameter(self, name, readers):
        """A parameter's whole master, in its shape, as a new array; `readers` as above."""
        shape = self.shapes[name]
        return self.read_elements(name, "master", 0, prod(shape), readers).reshape(shape)


class Readers:
    """BlockReaders of a checkpoint's files, by index, sharing one block of memory. Use in a `with`.

    Open files survive removal by a running job. Beyond `most`, the one opened first is closed, and
    reopened when needed.
    """

    def __init__(self, manifest, most):
        self._manifest, self._most, self._room, self._open = manifest, most, Room(), OrderedDict()
        try:
            for file in range(min(most, len(manifest.files))):
                self[file]
        except ValueError:
            self.__exit__()
            raise

    def __getitem__(self, file):
        if file not in self._open:
            if len(self._open) == self._most:
                self._open.popitem(last=False)[1].__exit__()
            self._open[file] = self._manifest.open(file, self._room)
        return self._open[file]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        while self._open:
            self._open.popitem()[1].__exit__()


def unit_entry(layout):
    """A unit's entry in the manifest, from its layout."""
    parameters = [
        {"name": name, "shape": shape, "offset": layout.offsets[name]}
        for name, shape in layout.shapes.items()
    ]
    sizes = {
        "elements": layout.elements,
        "padded": layout.padded,
        "shard_length": layout.shard_length,
    }
    return {"name": layout.name, "prefix": layout.prefix, **sizes, "parameters": parameters}


def manifest_digest(folder):
    """The SHA-256 of a checkpoint's manifest; None if its digest file does not match."""
    try:
        text = read_file(Path(folder) / JSON, JSON_BYTES)
        noted = read_file(Path(folder) / DIGEST, 1024)
    except ValueError:
        return None
    return hashlib.sha256(text).hexdigest() if noted == _noted(text).encode() else None


def _noted(text):
    return f"{hashlib.sha256(text).hexdigest()}  {JSON}\n"
