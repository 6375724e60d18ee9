"""Checks every field of a checkpoint's manifest, alone and against the others.

It may be damaged or malicious. After `check_entries`, no offset points outside its file, no file is
outside the folder, and all sizes follow from the bytes on disk. A manifest never names code to run.
"""

from math import prod

from zmpi.numbers.precision import RECIPES
from zmpi.saving.rules import (
    FILE_NAME,
    NUMBER,
    SCALAR,
    TEXT,
    Rule,
    check,
    one_of,
    or_null,
    whole_number,
)

UNSIGNED = (1 << 32) - 1
SUMS = Rule(
    "an array of 32-bit numbers",
    lambda sums: (
        isinstance(sums, list) and all(type(one) is int and 0 <= one <= UNSIGNED for one in sums)
    ),
)
SCALARS = Rule(
    "an object of numbers, strings, true, false and null",
    lambda flags: isinstance(flags, dict) and all(map(SCALAR.holds, [*flags, *flags.values()])),
)
PARAMETER = {"name": TEXT, "shape": [whole_number()], "offset": whole_number()}
UNIT = {"name": TEXT, "prefix": TEXT, "elements": whole_number(), "padded": whole_number()}
UNIT |= {"shard_length": whole_number(), "parameters": [PARAMETER]}
MANIFEST = {
    "run_id?": TEXT,
    "save?": whole_number(1),
    "step?": whole_number(),
    "updates?": whole_number(),
    "seed?": whole_number(-(1 << 127), 1 << 127),
    "size?": whole_number(1),
    "stage?": SCALAR,
    "recipe?": one_of(*RECIPES),
    "master?": one_of("float32", "float64"),
    "vectors?": [TEXT],
    "scaler?": {"scale": NUMBER, "good_steps": whole_number(), "window": or_null(whole_number())},
    "optimizer?": {"name": TEXT},
    "model?": {"kind": TEXT},
    "units?": [UNIT],
    "files?": [{"name": FILE_NAME, "bytes": whole_number(), "digest": TEXT, "sums": SUMS}],
}
TRAINED = {
    "tokens": whole_number(),
    "kind": TEXT,
    "crc32": whole_number(0, UNSIGNED),
    "python?": TEXT,
}
TRAINED |= {"global_batch": whole_number(1, 1 << 31)}
CODE = Rule(
    "an object of names",
    lambda code: isinstance(code, dict) and all(map(TEXT.holds, [*code, *code.values()])),
)
RUN = {"flags": SCALARS, "data": TRAINED, "code?": CODE}  # in manifests written by zmpi.train
SIZES_OF_KIND = {  # of models built from a manifest
    "GPT": ("depth", "width", "heads", "context", "vocab"),
    "MLP": ("depth", "width", "context", "vocab"),
}


def check_entries(entries, path):
    """Raise ValueError, naming the manifest and the field, for the first invalid field."""
    check(entries, MANIFEST, path)
    if entries.get("run") is not None:
        check(entries["run"], RUN, f"{path}: run")
        check(entries["run"]["data"], SCALARS, f"{path}: run: data")
    if {"units", "files", "vectors", "master"} <= entries.keys():
        _check_sizes(entries, path)
    if "model" in entries:
        check(entries["model"], SCALARS, f"{path}: model")
        _check_model(entries, path)


def _check_sizes(entries, path):
    units, files, vectors = entries["units"], entries["files"], entries["vectors"]
    if vectors[:1] != ["master"] or len(set(vectors)) < len(vectors):
        raise ValueError(f"{path}: vectors: expected master and other names")
    if not files or len({file["name"] for file in files}) < len(files):
        raise ValueError(f"{path}: files: expected one or more, of different names")
    itemsize = {"float32": 4, "float64": 8}[entries["master"]]
    each = sum(unit["shard_length"] for unit in units) * len(vectors) * itemsize
    for file in files:
        if file["bytes"] != each:
            raise ValueError(f"{path}: files: expected {each} bytes in {file['name']}")
    names = set()
    for unit in units:
        name, padded = unit["name"], unit["padded"]
        if unit["shard_length"] * len(files) != padded or unit["elements"] > padded:
            raise ValueError(f"{path}: units: {name}: its sizes contradict each other")
        for parameter in unit["parameters"]:
            shape, offset = parameter["shape"], parameter["offset"]
            if len(shape) > 32 or offset + prod(shape) > padded:  # GPU alignment leaves gaps
                raise ValueError(f"{path}: units: {name}: {parameter['name']} is outside the unit")
            names.add(unit["prefix"] + parameter["name"])
    if len(names) < sum(len(unit["parameters"]) for unit in units):
        raise ValueError(f"{path}: units: a parameter is listed twice")


def _check_model(entries, path):
    """A model is built from its sizes: none may exceed the number of its parameters."""
    units = entries.get("units", [])
    elements = sum(unit["elements"] for unit in units)
    bounds = {
        name: whole_number(1, len(units) if name == "depth" else elements)
        for name in SIZES_OF_KIND.get(entries["model"]["kind"], ())
    }
    check(entries["model"], bounds, f"{path}: model")
