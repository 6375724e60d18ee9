"""Folders with a published GPT-2: other tools' files are read, other models refused by name."""

import gzip
import json
import os
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from models import GPT, plain_weights, units
from zmpi.core.layout import Layout
from zmpi.export import export_weights
from zmpi.saving import pretrained
from zmpi.saving.blocks import CHECKED_BYTES, BlockWriter, sampled_checksum
from zmpi.saving.manifest import Manifest, unit_entry

safetensors_numpy = pytest.importorskip("safetensors.numpy")
SIZES = {"layers": 2, "width": 6, "heads": 3, "context": 5, "vocab": 11}
MODEL = GPT(**SIZES)
SHAPES = {
    spec.prefix + name: shape
    for spec in units(MODEL).values()
    for name, shape in spec.shapes.items()
}


def weights(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def folder(tmp_path):
    """A folder as other tools write it, and its weights."""
    return made(tmp_path / "gpt2", weights())


def made(path, tensors, **config):
    path.mkdir(exist_ok=True)
    safetensors_numpy.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(pretrained.config_for(SIZES) | config))
    return path


def read(path, shapes=SHAPES):
    found = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    with pretrained.Weights(path, shapes) as source:
        for name, out in found.items():
            source.fill(name, out)
    return found


def same(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def test_what_is_written_is_read_by_the_package_and_by_us(tmp_path):
    expected = weights()
    pretrained.write(tmp_path / "gpt2", SIZES, SHAPES, expected.get)
    assert same(safetensors_numpy.load_file(tmp_path / "gpt2" / "model.safetensors"), expected)
    assert (
        same(read(tmp_path / "gpt2"), expected) and pretrained.sizes_in(tmp_path / "gpt2") == SIZES
    )
    assert sorted(path.name for path in (tmp_path / "gpt2").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_one_job_at_a_time_writes_a_folder(tmp_path):
    """Two wrote to one temporary file: the second's bytes were in the first's weights."""
    expected, refusals = weights(), []

    def with_another_job(name):
        if len(refusals) < 1:
            with pytest.raises(ValueError, match="in use by another job") as refusal:
                pretrained.write(tmp_path, SIZES, SHAPES, lambda name: -expected[name])
            refusals.append(refusal)
        return expected[name]

    pretrained.write(tmp_path, SIZES, SHAPES, with_another_job)
    assert refusals and same(read(tmp_path), expected)


def test_what_exists_is_spared_and_a_failure_leaves_nothing(tmp_path):
    (tmp_path / "config.json").symlink_to("missing")  # `exists` says no: it became a file
    with pytest.raises(ValueError, match=r"config\.json: already exists"):
        pretrained.write(tmp_path, SIZES, SHAPES, weights().get)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / "config.json").unlink()
    (tmp_path / ".model.safetensors").write_text("what a killed job left" * 999)

    def failing(name):
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        pretrained.write(tmp_path, SIZES, SHAPES, failing)
    assert not list(tmp_path.iterdir())


def test_other_tools_spellings_are_read(tmp_path):
    """transformers' prefix, older files' masks, a head like the embedding, 16-bit numbers."""
    expected = weights()
    prefixed = {f"transformer.{name}": value for name, value in expected.items()}
    assert same(
        read(made(tmp_path / "prefixed", prefixed | {"lm_head.weight": expected["wte.weight"]})),
        expected,
    )
    masks = {
        "h.0.attn.bias": np.ones((1, 1, 5, 5), np.float32),
        "h.1.attn.masked_bias": np.zeros(1, np.float32),
    }
    assert same(read(made(tmp_path / "masks", expected | masks)), expected)
    for kind in (np.float16, ml_dtypes.bfloat16):
        narrow = {name: value.astype(kind) for name, value in expected.items()}
        path = tmp_path / np.dtype(kind).name
        assert same(
            read(made(path, narrow)),
            {name: value.astype(np.float32) for name, value in narrow.items()},
        )


def test_large_tensors_are_read_some_rows_at_a_time(folder, monkeypatch):
    monkeypatch.setattr(pretrained, "READ_ELEMENTS", 10)
    assert same(read(folder), weights())


def test_what_is_no_such_model_is_refused_by_name(tmp_path, folder):
    def refused(told, path, shapes=SHAPES):
        with pytest.raises(ValueError, match=told):
            pretrained.sizes_in(path)
            read(path, shapes)

    good = weights()
    refused(
        r"h.1.ln_1.bias: expected shape \(6,\), got none",
        made(tmp_path / "a", {n: good[n] for n in good if n != "h.1.ln_1.bias"}),
    )
    refused(
        r"wte.weight: expected shape \(12, 6\), got \(11, 6\)",
        folder,
        SHAPES | {"wte.weight": (12, 6)},
    )
    refused(
        "extra: this GPT-2 has no such parameter",
        made(tmp_path / "b", good | {"extra": good["wpe.weight"]}),
    )
    refused(
        "lm_head.weight differs from wte",
        made(tmp_path / "c", good | {"lm_head.weight": good["wte.weight"] + 1}),
    )
    refused(
        "activation_function: expected gelu_new, got relu",
        made(tmp_path / "d", good, activation_function="relu"),
    )
    refused(
        "tie_word_embeddings: expected True, got False",
        made(tmp_path / "e", good, tie_word_embeddings=False),
    )
    refused("model_type: expected gpt2, got llama", made(tmp_path / "f", good, model_type="llama"))
    refused("n_inner: expected None, got 7", made(tmp_path / "g", good, n_inner=7))
    refused(
        "layer_norm_epsilon: expected 1e-05, got 1e-06",
        made(tmp_path / "h", good, layer_norm_epsilon=1e-6),
    )
    whole = made(tmp_path / "i", good | {"wpe.weight": np.ones(SHAPES["wpe.weight"], np.int64)})
    refused("wpe.weight: expected type F64, F32, F16, BF16; got I64", whole)
    for value in ("6", None, 6.0, [6]):
        refused(
            "config.json: not the configuration of a GPT-2",
            made(tmp_path / "j", good, n_embd=value),
        )
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-5])
    refused("model.safetensors: ", folder)
    (folder / "model.safetensors").unlink()
    refused(r"^--init-from: expected a file, got .*model.safetensors \(missing\)", folder)
    (folder / "config.json").write_text("{")
    refused("config.json: not the configuration of a GPT-2", folder)


def test_files_of_another_kind_are_refused_by_what_they_are(tmp_path, folder):
    """Pointers and archives in place of the files, weights in other files, pipes, and no folder."""

    def refused(told, path=folder):
        with pytest.raises(ValueError, match=told):
            pretrained.sizes_in(path)
            read(path)

    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"
    good = (folder / "model.safetensors").read_bytes()
    for content, told in {
        pointer: "expected safetensors, got a Git LFS pointer",
        gzip.compress(good): "expected safetensors, got gzip",
        b"PK\x03\x04" + good: "expected safetensors, got zip",
        good[:-5]: "model.safetensors: .*incomplete",
        b"": "model.safetensors: .*header",
    }.items():
        (folder / "model.safetensors").write_bytes(content)
        refused(told)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(r"^--init-from: expected a file, got .*model.safetensors \(a pipe\)")
    (folder / "model.safetensors").unlink()
    for other in ("pytorch_model.bin", "model.safetensors.index.json"):
        (folder / other).write_bytes(b"{}")
        refused(f"expected all weights in this file, got {other}; save it again with")
    for content, told in {pointer: "a Git LFS pointer", gzip.compress(b"{}"): "gzip"}.items():
        (folder / "config.json").write_bytes(content)
        refused(rf"config.json: not the configuration of a GPT-2 \({told}")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(r"^--init-from: expected a file, got .*config.json \(a pipe\)")
    refused(r"expected a folder with .*, got .*config.json \(a file\)", folder / "config.json")
    refused(r"expected a folder with .*, got .*gpt2-xl \(missing\)", tmp_path / "gpt2-xl")


def test_a_configuration_is_read_in_any_unicode(folder):
    text = (folder / "config.json").read_text()
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le"):
        (folder / "config.json").write_text(text, encoding=encoding)
        assert pretrained.sizes_in(folder) == SIZES
    (folder / "config.json").write_text(json.dumps(pretrained.config_for(SIZES | {"layers": 0})))
    with pytest.raises(ValueError, match=r"config.json: n_layer: expected at least 1, got 0"):
        pretrained.sizes_in(folder)


@pytest.mark.parametrize(("number", "kind"), [(np.nan, "<f4"), (np.inf, "<f2"), (1e39, "<f8")])
def test_weights_that_are_not_finite_are_named(tmp_path, number, kind):
    """Trained on, they would end the first step with a loss that is not finite."""
    tensors = weights()
    tensors["h.1.ln_1.bias"] = tensors["h.1.ln_1.bias"].astype(kind)
    tensors["h.1.ln_1.bias"][3] = number
    with pytest.raises(
        ValueError, match=r"h.1.ln_1.bias: expected finite float32 numbers, got \S+$"
    ):
        read(made(tmp_path / "gpt2", tensors))


def test_a_sampled_checksum_tells_files_apart(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "file"
    for length in (0, 1, 1000, 5 << 20):
        content = bytearray(rng.bytes(length))
        path.write_bytes(content)
        before = sampled_checksum(path)
        assert sampled_checksum(path) == before
        path.write_bytes(content + b"\0")
        assert sampled_checksum(path) != before
        for place in {0, length // 2, length - 1} if length else ():
            if length <= 1 << 22 or place in (0, length - 1):  # beyond, samples have gaps
                changed = bytearray(content)
                changed[place] ^= 1
                path.write_bytes(changed)
                assert sampled_checksum(path) != before


def test_an_export_takes_one_parameter_and_one_block(tmp_path):
    """And no more, for any number of files; the largest parameter is 2 MB, the model 4.5 MB."""
    model, size = GPT(layers=3, width=128, heads=4, context=8, vocab=4000), 5
    layouts = [Layout(name, spec.prefix, spec.shapes, size) for name, spec in units(model).items()]
    named, wholes = plain_weights(model, 0, np.float32), {}
    for layout in layouts:
        wholes[layout.name] = np.zeros(layout.padded, np.float32)
        for name, view in layout.views(wholes[layout.name]).items():
            view[...] = named[layout.name][name]
    (tmp_path / "step").mkdir()
    files = []
    for rank in range(size):
        writer = BlockWriter(tmp_path / "step" / f"rank-{rank}.bin")
        for layout in layouts:
            writer.write(wholes[layout.name][layout.shard(rank)])
        files.append(writer.finish().entry())
    described = {"kind": "GPT", "depth": 3, "width": 128, "heads": 4, "context": 8, "vocab": 4000}
    entries = {
        "master": "float32",
        "vectors": ["master"],
        "units": [unit_entry(layout) for layout in layouts],
        "model": described,
    }
    Manifest(tmp_path / "step", entries | {"files": files}).write()
    manifest = Manifest.read(tmp_path / "step")
    export_weights(manifest, tmp_path / "warm")  # imports the package
    tracemalloc.start()
    export_weights(manifest, tmp_path / "to")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 4000 * 128 + CHECKED_BYTES + (300 << 10)
    found = safetensors_numpy.load_file(tmp_path / "to" / "model.safetensors")
    expected = {
        layout.prefix + name: array
        for layout in layouts
        for name, array in named[layout.name].items()
    }
    assert same({name: found[name] for name in expected}, expected)
    assert sum(array.size for array in found.values()) == sum(
        layout.elements for layout in layouts
    ), "the tied one once"
