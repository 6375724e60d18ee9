"""Folders with a GPT-2 in its published format: `config.json` and `model.safetensors`.

models.GPT uses the published names and (in, out) shapes, so nothing is renamed or transposed. The
head is wte itself and is not stored. Format: https://huggingface.co/docs/safetensors (8 bytes of
length, JSON, numbers).
"""

import json
import os
from contextlib import ExitStack, closing
from math import prod
from operator import index
from pathlib import Path

import numpy as np

from zmpi.process.files import JSON_BYTES, named, read_file
from zmpi.process.output import Output
from zmpi.saving.rules import shown
from zmpi.text.formats import LOOKED_AT, container, refuse_irregular

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PUBLISHED_SIZES = {
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "context": "n_positions",
    "vocab": "vocab_size",
}
# What models.GPT computes: other values mean another model. A missing key has GPT-2's value.
GPT2_CONFIG = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
UNUSED = (".attn.bias", ".attn.masked_bias")  # masks in older files
HEAD_WEIGHT = "lm_head.weight"
ELSEWHERE = {  # other tools' files of weights: what to do about them
    "model.safetensors.index.json": "save it again with max_shard_size='1000GB'",
    "pytorch_model.bin": "save it again with safe_serialization=True",
    "pytorch_model.bin.index.json": "save it again with safe_serialization=True",
}
NUMBER_TYPES = ("F64", "F32", "F16", "BF16")  # of safetensors
READ_ELEMENTS = 1 << 20  # elements read at a time, roughly
TOO_LARGE = 1 << 31
PUBLISHED_VOCAB, END_OF_TEXT = 50257, 50256


def sizes_in(folder):
    """{"layers", "width", "heads", "context", "vocab"} of a folder; ValueError if not a GPT-2."""
    path = _file(folder, CONFIG)
    text = read_file(path, JSON_BYTES)
    try:
        config = json.loads(text)  # UTF-8, -16 or -32, with or without a byte order mark
        sizes = {ours: index(config[theirs]) for ours, theirs in PUBLISHED_SIZES.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        fault = container(text) or f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: not the configuration of a GPT-2 ({fault})") from None
    for name, value in sizes.items():
        if not 1 <= value < TOO_LARGE or config[PUBLISHED_SIZES[name]] is True:
            bound = "at least 1" if value < 1 else f"a whole number below {TOO_LARGE}"
            found = shown(config[PUBLISHED_SIZES[name]])
            raise ValueError(f"{path}: {PUBLISHED_SIZES[name]}: expected {bound}, got {found}")
    expected = {**GPT2_CONFIG, "model_type": ("gpt2",), "n_inner": (None, 4 * sizes["width"])}
    for name, values in expected.items():
        if config.get(name, values[0]) not in values:
            found = shown(config[name]).strip("'")
            raise ValueError(f"{path}: {name}: expected {values[0]}, got {found}")
    _refuse_more_than_stored(sizes, path)
    return sizes


def _refuse_more_than_stored(sizes, path):
    """Raise ValueError for sizes beyond what the weights file can hold, before making a model."""
    weights = _file(path.parent, WEIGHTS)
    _open(weights)  # a file that is not safetensors gets its own error
    width, stored = sizes["width"], weights.stat().st_size
    least = 12 * sizes["layers"] * width**2 + (sizes["vocab"] + sizes["context"]) * width
    if stored < 2 * least:  # in 16 bits, without biases and norms
        raise ValueError(
            f"{weights}: expected at least {2 * least:,} bytes for the sizes in {CONFIG}, "
            f"got {stored:,}"
        )


def config_for(sizes):
    """The configuration of a GPT-2 of these sizes, for transformers, without dropout."""
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    config |= {theirs: sizes[ours] for ours, theirs in PUBLISHED_SIZES.items()}
    config |= {
        "n_ctx": sizes["context"],
        "n_inner": None,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
    }
    config |= {name: values[0] for name, values in GPT2_CONFIG.items()}
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    ends = END_OF_TEXT if sizes["vocab"] == PUBLISHED_VOCAB else None
    return config | {"bos_token_id": ends, "eos_token_id": ends, "use_cache": True}


class Weights:
    """The tensors of a folder, for parameters of the given {full name: shape}. Use in a `with`.

    Raises ValueError for a missing or truncated file, and for the first tensor that is missing, of
    another shape, or not the model's.
    """

    def __init__(self, folder, shapes):
        self.path = _file(folder, WEIGHTS)
        self._file = _open(self.path)
        stored_names = list(self._file.keys())
        prefix = "transformer." if "transformer.wte.weight" in stored_names else ""
        self._names = {name: prefix + name for name in shapes}
        found = {name: tuple(self._file.get_slice(name).get_shape()) for name in stored_names}
        for name, shape in shapes.items():
            stored = self._names[name]
            if found.get(stored) != tuple(shape):
                got = found.get(stored, "none")
                raise ValueError(f"{self.path}: {stored}: expected shape {tuple(shape)}, got {got}")
            kind = self._file.get_slice(stored).get_dtype()
            if kind not in NUMBER_TYPES:
                kinds = ", ".join(NUMBER_TYPES)
                raise ValueError(f"{self.path}: {stored}: expected type {kinds}; got {kind}")
        for name in found:
            if name not in self._names.values() and not name.endswith((*UNUSED, HEAD_WEIGHT)):
                raise ValueError(f"{self.path}: {name}: this GPT-2 has no such parameter")
        if HEAD_WEIGHT in found and not self._same(HEAD_WEIGHT, self._names["wte.weight"]):
            raise ValueError(
                f"{self.path}: {HEAD_WEIGHT} differs from wte.weight, which is the head"
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file = None

    def fill(self, name, out):
        """Read a parameter into `out`, a few rows at a time; ValueError for numbers not finite."""
        for start, rows in self._rows(self._names[name]):
            assigned = out[start : start + len(rows)]
            with np.errstate(over="ignore"):  # float64 beyond float32
                assigned[...] = rows
            if not np.isfinite(assigned).all():
                raise ValueError(
                    f"{self.path}: {self._names[name]}: expected finite {out.dtype.name} numbers,"
                    f" got {rows[~np.isfinite(assigned)][0]}"
                )

    def _rows(self, stored):
        """Yield (first row, rows) of a tensor, about ROWS elements at a time."""
        tensor = self._file.get_slice(stored)
        shape = tensor.get_shape()
        step = max(1, READ_ELEMENTS // max(1, prod(shape[1:])))
        for start in range(0, shape[0], step):
            yield start, tensor[start : min(start + step, shape[0])]

    def _same(self, one, other):
        pairs = zip(self._rows(one), self._rows(other), strict=False)
        return all(np.array_equal(a, b) for (_, a), (_, b) in pairs)


def write(folder, sizes, shapes, tensor):
    """Write a folder (created if missing) in float32, calling tensor(name) for each of `shapes`.

    Files get their final names once all are written. Raises ValueError if either exists (a dangling
    link too), or another job writes there.
    """
    folder = Path(folder)
    contents = {folder / WEIGHTS: _tensors(shapes, tensor), folder / CONFIG: _config(sizes)}
    _refuse_existing(contents)
    with named(folder):
        folder.mkdir(exist_ok=True)
    temporary = {}
    with ExitStack() as held:
        try:
            for final in contents:
                hidden = folder / f".{final.name}"
                whatever_is_there = Output("--to", hidden, lambda head: True, "a temporary file")
                temporary[final] = held.enter_context(closing(whatever_is_there))
            _refuse_existing(contents)  # a job that held the temporary files may have written them
            for final, content in contents.items():
                temporary[final].cut(0)
                for part in content:
                    temporary[final].write(part)
            _open(temporary[folder / WEIGHTS].path)  # another reader must accept it
            for final, output in temporary.items():
                output.path.rename(final)
        finally:
            for output in temporary.values():
                output.path.unlink(missing_ok=True)


def _refuse_existing(paths):
    for path in paths:
        if os.path.lexists(path):
            raise ValueError(f"{path}: already exists; choose another folder")


def _config(sizes):
    yield (json.dumps(config_for(sizes), indent=2) + "\n").encode()


def _tensors(shapes, tensor):
    """The bytes of a safetensors file, in parts."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the numbers start at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for name in shapes:
        yield np.ascontiguousarray(tensor(name), "<f4").data


def _file(folder, name):
    """The path of a folder's file; ValueError if not a regular file (opening a pipe blocks)."""
    if not os.path.isdir(folder):
        found = "a file" if os.path.exists(folder) else "missing"
        raise ValueError(
            f"--init-from: expected a folder with {CONFIG} and {WEIGHTS}, got {folder} ({found})"
        )
    path = Path(folder) / name
    for other, way in ELSEWHERE.items() if name == WEIGHTS and not path.exists() else ():
        if (path.parent / other).exists():
            raise ValueError(f"{path}: expected all weights in this file, got {other}; {way}")
    refuse_irregular("--init-from", path)
    return path


def _open(path):
    """An open safetensors file; ValueError if it is missing or truncated, or the package is."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError(
            f"{path}: needs the package safetensors (pip install safetensors)"
        ) from None
    with named(path):
        try:
            return safe_open(path, framework="np")
        except SafetensorError as error:
            with open(path, "rb") as file:
                found = container(file.read(LOOKED_AT))
            cut = found in (None, "safetensors")
            fault = error if cut else f"expected safetensors, got {found}"
            raise ValueError(f"{path}: {fault}") from None
