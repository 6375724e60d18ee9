"""Folders with a GPT-2 as it is published: `config.json` and `model.safetensors`. No MPI in here.

The names and (in, out) shapes of models.GPT are those of the published file, so nothing is renamed or transposed. The
head is wte itself and is not in the file. Format: https://huggingface.co/docs/safetensors (8 bytes length, JSON, numbers).
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
# What models.GPT computes: a folder that says otherwise holds another model. Left out, each is so in a GPT-2.
GPT2_CONFIG = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
UNUSED = (".attn.bias", ".attn.masked_bias")  # masks that older files carry
HEAD_WEIGHT = "lm_head.weight"
ELSEWHERE = {  # where other tools put weights: what to do about it
    "model.safetensors.index.json": "save it again with max_shard_size='1000GB'",
    "pytorch_model.bin": "save it again with safe_serialization=True",
    "pytorch_model.bin.index.json": "save it again with safe_serialization=True",
}
NUMBER_TYPES = ("F64", "F32", "F16", "BF16")  # of safetensors
READ_ELEMENTS = 1 << 20  # elements that are read at a time, about
TOO_LARGE = 1 << 31
PUBLISHED_VOCAB, END_OF_TEXT = 50257, 50256


def sizes_in(folder):
    """{"layers", "width", "heads", "context", "vocab"} of a folder. Raises ValueError where it holds no such GPT-2."""
    path = _file(folder, CONFIG)
    text = read_file(path, JSON_BYTES)
    try:
        config = json.loads(text)  # UTF-8, -16 or -32, with or without its mark
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
    """Raise ValueError for sizes that the weights cannot hold: a model of them is not even begun."""
    weights = _file(path.parent, WEIGHTS)
    _open(weights)  # what is no safetensors is refused as that
    width, stored = sizes["width"], weights.stat().st_size
    least = 12 * sizes["layers"] * width**2 + (sizes["vocab"] + sizes["context"]) * width
    if stored < 2 * least:  # in 16 bits, and biases and norms beside it
        raise ValueError(
            f"{weights}: {stored:,} bytes; a GPT-2 of the sizes in {CONFIG} has at least {2 * least:,}"
        )


def config_for(sizes):
    """The configuration of a GPT-2 of these sizes, as transformers reads it. It trains without dropout."""
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
    """The tensors of a folder, for parameters of the given {full name: shape}; a context manager.

    Raises ValueError for a file that is missing or not whole, and for the first name that it lacks, has in another shape,
    or has beyond the model's.
    """

    def __init__(self, folder, shapes):
        self.path = _file(folder, WEIGHTS)
        self._file = _open(self.path)
        prefix = "transformer." if "transformer.wte.weight" in self._file.keys() else ""  # noqa: SIM118  (not a dict)
        self._names = {name: prefix + name for name in shapes}
        found = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        for name, shape in shapes.items():
            stored = self._names[name]
            if found.get(stored) != tuple(shape):
                raise ValueError(
                    f"{self.path}: {stored}: expected shape {tuple(shape)}, got {found.get(stored, 'none')}"
                )
            kind = self._file.get_slice(stored).get_dtype()
            if kind not in NUMBER_TYPES:
                raise ValueError(
                    f"{self.path}: {stored}: expected numbers of type {', '.join(NUMBER_TYPES)}; got {kind}"
                )
        spare = [
            name
            for name in found
            if name not in self._names.values() and not name.endswith((*UNUSED, HEAD_WEIGHT))
        ]
        if spare:
            raise ValueError(f"{self.path}: {spare[0]}: this GPT-2 has no such parameter")
        if HEAD_WEIGHT in found and not self._same(HEAD_WEIGHT, self._names["wte.weight"]):
            raise ValueError(
                f"{self.path}: {HEAD_WEIGHT} differs from wte.weight; the model's head is wte"
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file = None

    def fill(self, name, out):
        """Assign a parameter to `out`, in its type, some rows at a time. Raises ValueError for numbers that are not finite."""
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
        """(first row, rows) of a tensor, about ROWS elements at a time."""
        tensor = self._file.get_slice(stored)
        shape = tensor.get_shape()
        step = max(1, READ_ELEMENTS // max(1, prod(shape[1:])))
        for start in range(0, shape[0], step):
            yield start, tensor[start : min(start + step, shape[0])]

    def _same(self, one, other):
        pairs = zip(self._rows(one), self._rows(other), strict=False)
        return all(np.array_equal(a, b) for (_, a), (_, b) in pairs)


def write(folder, sizes, shapes, tensor):
    """Write a folder, which is made if it is missing: tensor(name) is called for one name of `shapes` after the other.

    Numbers are float32. Nothing takes its final name before all is written; raises ValueError where a file of either name
    exists (a link without a target too), or where another job writes there.
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
            _refuse_existing(contents)  # a job that held the temporary files may have made them
            for final, content in contents.items():
                temporary[final].cut(0)
                for part in content:
                    temporary[final].write(part)
            _open(temporary[folder / WEIGHTS].path)  # does another reader find it whole
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
    text += b" " * (-len(text) % 8)  # numbers start at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for name in shapes:
        yield np.ascontiguousarray(tensor(name), "<f4").data


def _file(folder, name):
    """The path of a folder's file. Raises ValueError where it is no file: before a pipe is opened, which would wait."""
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
    """A safetensors file, opened. Raises ValueError for one that is missing or not whole, or without the package."""
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
