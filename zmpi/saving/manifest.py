"""A checkpoint's manifest: what was saved, and where each element of each parameter lies. No MPI in here.

A checkpoint is a folder: `manifest.json`, its SHA-256 in `manifest.sha256` (as sha256sum writes it), and one file per
rank. That file holds, unit by unit, the rank's shard of the master and then of each moment, as raw little-endian numbers:

    unit outer:  master [shard_length]   m [shard_length]   v [shard_length]
    unit h.0:    master [shard_length]   ...

So element e of a unit's vector lies in the file of rank e // shard_length, whatever the stage was.

A manifest is data: it never names code to run, or a file outside its folder but the text that was trained on. Whoever
reads one gets every field checked (schema.py).
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

VERSION = 1  # of the format: it rises when older readers would go wrong; a key that they may ignore does not raise it
JSON, DIGEST = "manifest.json", "manifest.sha256"


@dataclass(frozen=True)
class Piece:
    """Where elements start ... stop - 1 of a parameter (counted from its first) lie."""

    file: int  # index in Manifest.files
    byte: int  # of element `start`
    start: int
    stop: int


@dataclass(frozen=True)
class Manifest:
    """`entries` is the JSON, `folder` where its files lie.

    Its keys: format, byteorder, run_id and save (which save of which run; missing in older ones), step, updates, seed,
    size, stage, recipe, master (type), vectors (names), scaler, optimizer, model, units, files, and run (of the command:
    flags, data, and code: {flag: class} of what the user's own files were for; null from Python).
    """

    folder: Path
    entries: dict

    @classmethod
    def read(cls, folder):
        """The manifest of a checkpoint's folder. Raises ValueError where it is missing, damaged or of a newer format."""
        path = Path(folder) / JSON
        text = read_file(path, JSON_BYTES)
        noted = read_file(path.with_name(DIGEST), 1024)
        if noted != _noted(text).encode():
            raise Damaged(
                f"{path}: another checksum than in {DIGEST} beside it: one of the two is damaged"
            )
        entries = parse_json(text, path)
        check(entries, {"format": whole_number(1), "byteorder": TEXT}, path)
        if entries["format"] > VERSION:
            raise ValueError(
                f"{path}: format {entries['format']} is newer than this zmpi reads ({VERSION})"
            )
        if entries["byteorder"] != sys.byteorder:
            raise ValueError(
                f"{path}: saved on a {entries['byteorder']}-endian machine, this one is {sys.byteorder}-endian"
            )
        check_entries(entries, path)
        return cls(Path(folder), entries)

    def write(self):
        """Put the manifest on disk, beside the files that it names."""
        text = (
            json.dumps(
                {"format": VERSION, "byteorder": sys.byteorder, **self.entries}, allow_nan=False
            )
            + "\n"
        )
        write_text(self.folder / JSON, text)
        write_text(self.folder / DIGEST, _noted(text.encode()))
        sync_folder(self.folder)

    def __getitem__(self, key):
        if key not in self.entries:
            raise ValueError(f"{self.folder / JSON}: {key} is missing")
        return self.entries[key]

    # -- what is in it --------------------------------------------------------------------------------------------

    @cached_property
    def shapes(self):
        """{full name: shape} of all parameters, in order."""
        return {name: tuple(shape) for name, (_, _, _, shape) in self._places.items()}

    @property
    def dtype(self):
        """The type of all vectors."""
        return np.dtype(self["master"])

    def pieces(self, name, vector, start, stop):
        """Where elements start ... stop - 1 of a parameter's `vector` ("master", or a moment's name) lie, as Pieces."""
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
        """The first parameter that is not in both, or has two shapes, as a line; None: the same. `where`: whose shapes."""
        for name in [*self.shapes, *shapes]:
            saved, expected = self.shapes.get(name), shapes.get(name)
            if saved != expected:
                told = [
                    "missing" if shape is None else f"shape {shape}" for shape in (saved, expected)
                ]
                return f"{self.folder}: {name}: {told[0]} in the checkpoint, {told[1]} in {where}"
        return None

    # -- its files ------------------------------------------------------------------------------------------------

    @cached_property
    def files(self):
        """The Records of the ranks' files. Raises ValueError for one whose own parts do not fit together."""
        records = [Record(**entry) for entry in self["files"]]
        for record in records:
            if not record.is_whole():
                raise Damaged(f"{self.folder / record.name}: its record in {JSON} is damaged")
        return records

    def open(self, file, room=None):
        """A BlockReader of the file with that index."""
        return BlockReader(self.folder / self.files[file].name, self.files[file], room)

    def check(self, share, shares):
        """Compare a contiguous `share` (0 ... shares - 1) of all files' blocks with their sums; every share: all of them."""
        total = sum(len(record.sums) for record in self.files)
        first, last, before = share * total // shares, (share + 1) * total // shares, 0
        for file, record in enumerate(self.files):
            blocks = len(record.sums)
            begin, end = max(0, first - before), min(blocks, last - before)
            if (
                begin < end or not blocks or share == 0
            ):  # the first also opens each file, for its length
                with self.open(file) as reader:
                    reader.check(begin, end)
            before += blocks

    @cached_property
    def _places(self):
        """{full name: (unit, element of its master in each file, offset in the unit's vector, shape)}."""
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
        """Elements start ... stop - 1 of a parameter's `vector`, new memory.

        `readers` are BlockReaders of all files, in order.
        """
        out = np.empty(stop - start, self.dtype)
        for piece in self.pieces(name, vector, start, stop):
            readers[piece.file].read(piece.byte, out[piece.start - start : piece.stop - start])
        return out

    def read_parameter(self, name, readers):
        """The master of a whole parameter in its shape, new memory; `readers` as above."""
        shape = self.shapes[name]
        return self.read_elements(name, "master", 0, prod(shape), readers).reshape(shape)


class Readers:
    """BlockReaders of all files of a checkpoint, by index; one block of memory for all. A context manager.

    They stay open, so that a job at work cannot take the files away; beyond `most` the one that was opened first is
    closed, and opened again where it is needed.
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
    """A unit as the manifest lists it, from its layout."""
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
    """SHA-256 of a checkpoint's manifest, if that is what is noted beside it; else None."""
    try:
        text = read_file(Path(folder) / JSON, JSON_BYTES)
        noted = read_file(Path(folder) / DIGEST, 1024)
    except ValueError:
        return None
    return hashlib.sha256(text).hexdigest() if noted == _noted(text).encode() else None


def _noted(text):
    return f"{hashlib.sha256(text).hexdigest()}  {JSON}\n"
