"""Checkpoints on disk, without MPI: blocks, checksums, where elements are, surviving a crash."""

import subprocess
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmpi.core.layout import Layout
from zmpi.saving import blocks
from zmpi.saving.blocks import BlockReader, BlockWriter, Record
from zmpi.saving.manifest import DIGEST, JSON, Manifest, unit_entry


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "CHECKED_BYTES", 64)


def written(path, *arrays):
    writer = BlockWriter(path)
    for array in arrays:
        writer.write(array)
    return writer.finish()


# ---- blocks --------------------------------------------------------------------------------------


def test_any_range_reads_back(tmp_path, small_blocks):
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    record = written(tmp_path / "file", data[:3], data[3:3], data[3:500], data[500:])
    assert (record.bytes, len(record.sums), record.is_whole()) == (1000, 16, True)
    with BlockReader(tmp_path / "file", record) as reader:
        for start in range(0, 1000, 7):
            for length in (0, 1, 63, 64, 65, 300):
                out = np.zeros(min(length, 1000 - start), np.uint8)
                reader.read(start, out)
                assert (out == data[start : start + length]).all()


def test_a_range_needs_only_its_own_blocks(tmp_path, small_blocks):
    """A damaged block is found by whoever reads a byte of it, and by nobody else."""
    data = np.arange(200, dtype=np.uint8)
    record = written(tmp_path / "file", data)
    damaged = data.copy()
    damaged[64] ^= 1
    damaged.tofile(tmp_path / "file")
    with BlockReader(tmp_path / "file", record) as reader:
        reader.read(0, np.empty(64, np.uint8))
        reader.read(128, np.empty(72, np.uint8))
        with pytest.raises(
            ValueError, match="file: damaged: the block at byte 64 has a wrong checksum"
        ):
            reader.read(127, np.empty(2, np.uint8))


def test_every_flipped_bit_of_a_file_is_found(tmp_path, small_blocks):
    data = np.random.default_rng(1).integers(0, 256, 150, np.uint8)
    record = written(tmp_path / "file", data)
    for bit in range(150 * 8):
        damaged = data.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        damaged.tofile(tmp_path / "file")
        with (
            BlockReader(tmp_path / "file", record) as reader,
            pytest.raises(ValueError, match="damaged"),
        ):
            reader.check(0, len(record.sums))


def test_a_shorter_or_longer_or_missing_file_is_refused(tmp_path):
    data = np.arange(200, dtype=np.uint8)
    record = written(tmp_path / "file", data)
    for length in (0, 1, 199, 201):
        np.resize(data, length).tofile(tmp_path / "file")
        with pytest.raises(ValueError, match=f"file: damaged: expected 200 bytes, got {length}"):
            BlockReader(tmp_path / "file", record)
    (tmp_path / "file").unlink()
    with pytest.raises(ValueError, match="file: No such file"):
        BlockReader(tmp_path / "file", record)


def test_a_full_disk_is_told_with_the_file():
    writer = BlockWriter.__new__(BlockWriter)
    writer.path, writer._filled, writer._crc = "/dev/full", 0, 0
    with (
        open("/dev/full", "wb", buffering=0) as writer._file,
        pytest.raises(ValueError, match="/dev/full: No space left"),
    ):
        writer.write(np.zeros(5, np.float32))


# ---- the manifest --------------------------------------------------------------------------------


UNITS = {
    "outer": ("", {"wte.weight": (5, 3), "gain": (4,), "empty": (0, 2)}),
    "h.0": ("h.0.", {"w": (7, 2), "b": (1,)}),
}


def save(path, size):
    """A checkpoint by hand, from whole vectors: {(full name, vector): flat array}."""
    path.mkdir()
    layouts = [Layout(name, prefix, shapes, size) for name, (prefix, shapes) in UNITS.items()]
    rng, values = np.random.default_rng(size), {}
    wholes = {}
    for layout in layouts:
        for vector in ("master", "m"):
            whole = wholes[layout.name, vector] = np.zeros(layout.padded, np.float32)
            whole[: layout.elements] = rng.standard_normal(layout.elements)
            for name, view in layout.views(whole).items():
                values[layout.prefix + name, vector] = view.ravel()
    files = []
    for rank in range(size):
        parts = [
            wholes[layout.name, vector][layout.shard(rank)]
            for layout in layouts
            for vector in ("master", "m")
        ]
        files.append(written(path / f"rank-{rank}.bin", *parts).entry())
    entries = {
        "master": "float32",
        "vectors": ["master", "m"],
        "units": [unit_entry(layout) for layout in layouts],
    }
    Manifest(path, {**entries, "files": files, "step": 3}).write()
    return values


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_range_of_every_parameter_is_found_by_name(tmp_path_factory, size, data):
    path = tmp_path_factory.mktemp("checkpoint") / "step"
    values = save(path, size)
    manifest = Manifest.read(path)
    (name, vector), value = data.draw(
        st.sampled_from(sorted(values.items(), key=lambda item: item[0]))
    )
    start = data.draw(st.integers(0, len(value)))
    stop = data.draw(st.integers(start, len(value)))
    out = np.full(len(value), np.nan, np.float32)
    for piece in manifest.pieces(name, vector, start, stop):
        with manifest.open(piece.file) as reader:
            reader.read(piece.byte, out[piece.start : piece.stop])
    assert (
        (out[start:stop] == value[start:stop]).all()
        and np.isnan(out[:start]).all()
        and np.isnan(out[stop:]).all()
    )


def test_a_whole_parameter_reads_in_its_shape(tmp_path):
    values = save(tmp_path / "step", 3)
    manifest = Manifest.read(tmp_path / "step")
    readers = [manifest.open(file) for file in range(3)]
    for name, shape in manifest.shapes.items():
        array = manifest.read_parameter(name, readers)
        assert (
            array.shape == shape
            and (array.ravel() == values[name, "master"]).all()
            and array.size == prod(shape)
        )
    for reader in readers:
        reader.__exit__()


def test_the_ranks_shares_of_the_check_are_all_blocks(tmp_path, small_blocks):
    """With any number of checkers, a flip in any block is found by exactly one of them."""
    save(tmp_path / "step", 3)
    manifest = Manifest.read(tmp_path / "step")
    for file, record in enumerate(manifest.files):
        path = tmp_path / "step" / record.name
        good = path.read_bytes()
        for number in range(len(record.sums)):
            path.write_bytes(
                good[: 64 * number] + bytes([good[64 * number] ^ 4]) + good[64 * number + 1 :]
            )
            for shares in (1, 2, 3, 5, 40):
                assert sum(fails(manifest.check, share, shares) for share in range(shares)) == 1, (
                    file,
                    number,
                    shares,
                )
        path.write_bytes(good)
    assert not any(fails(manifest.check, share, 5) for share in range(5))


def fails(call, *arguments):
    try:
        call(*arguments)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("name", [JSON, DIGEST])
def test_every_flipped_bit_of_the_manifest_is_found(tmp_path, name):
    save(tmp_path / "step", 1)
    path = tmp_path / "step" / name
    good = path.read_bytes()
    for bit in range(0, len(good) * 8, 7):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=name):
            Manifest.read(tmp_path / "step")
    for length in (0, 1, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(ValueError, match=name):
            Manifest.read(tmp_path / "step")


def test_the_manifests_checksum_is_sha256sums(tmp_path):
    save(tmp_path / "step", 1)
    subprocess.run(
        ["sha256sum", "--check", "--strict", DIGEST],
        cwd=tmp_path / "step",
        check=True,
        stdout=subprocess.DEVNULL,
    )


def test_a_newer_format_is_refused(tmp_path):
    save(tmp_path / "step", 1)
    Manifest(tmp_path / "step", Manifest.read(tmp_path / "step").entries | {"format": 2}).write()
    with pytest.raises(ValueError, match="expected format 1 or older, got 2: update zmpi"):
        Manifest.read(tmp_path / "step")


def test_the_first_name_that_differs_is_told(tmp_path):
    save(tmp_path / "step", 2)
    manifest = Manifest.read(tmp_path / "step")
    shapes = dict(manifest.shapes)
    assert manifest.differs(shapes, "this model") is None
    assert "h.0.w: shape (7, 2) in the checkpoint, shape (8, 2) in this" in manifest.differs(
        shapes | {"h.0.w": (8, 2)}, "this"
    )
    assert "h.1.w: missing in the checkpoint" in manifest.differs(
        shapes | {"h.1.w": (8, 2)}, "this"
    )
    shapes.pop("gain")
    assert "gain: shape (4,) in the checkpoint, missing in this" in manifest.differs(shapes, "this")


def test_a_record_whose_parts_do_not_fit_is_refused():
    record = Record("file", 100, blocks.digest_of([5]), [5])
    assert record.is_whole()
    assert not Record("file", 100, record.digest, [4]).is_whole()
    assert not Record("file", 2**20 + 1, record.digest, [5]).is_whole()
