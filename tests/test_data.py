"""The data: a step's windows, the same for every split, and what cannot be used (B11, B19)."""

import bz2
import gzip
import lzma
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmpi.cli.resume import same_text
from zmpi.text.data import (
    EVALUATED,
    SAMPLE,
    SPREAD,
    Batches,
    Text,
    builtin_text,
    described,
    load_text,
)

CONTEXT = 8


def text_of(tokens=1000, held_out=100, context=CONTEXT):
    """Every token is its own position, so that a window tells where it was taken."""
    return Text(np.arange(tokens), np.arange(held_out), context)


def sequences(text, size, micro_batch, accumulate, step, seed=0, last_only=False):
    """The global batch in order of i, from the ranks' micro-batches: [(inputs, targets), ...]."""
    ranks = [
        Batches(text, r, size, micro_batch, last_only).of_step(seed, step, accumulate)
        for r in range(size)
    ]
    micro_batches = [ranks[rank][m] for m in range(accumulate) for rank in range(size)]
    rows = [row for inputs, targets in micro_batches for row in zip(inputs, targets, strict=True)]
    return [(x.tolist(), np.asarray(y).tolist()) for x, y in rows]


splits = [(1, 1, 12), (2, 1, 6), (3, 1, 4), (4, 1, 3), (4, 3, 1), (6, 2, 1), (1, 12, 1), (2, 3, 2)]


@pytest.mark.parametrize(("size", "micro_batch", "accumulate"), splits)
@pytest.mark.parametrize("last_only", [False, True])
def test_any_split_of_a_global_batch_sees_the_same_sequences_in_the_same_order(
    size, micro_batch, accumulate, last_only
):
    for step in (1, 2):
        found = sequences(text_of(), size, micro_batch, accumulate, step, last_only=last_only)
        assert found == sequences(text_of(), 1, 12, 1, step, last_only=last_only)


def test_steps_sequences_and_seeds_differ():
    """B11: no step repeats another's batch."""
    batches = [
        sequences(text_of(100_000), 1, 8, 1, step, seed)
        for step in (1, 2, 3, 1001)
        for seed in (0, 1)
    ]
    windows = [tuple(x) for batch in batches for x, _ in batch]
    assert len(set(windows)) == len(windows)


def test_a_step_depends_on_its_number_alone():
    """So that a resumed run goes on with the batches that it would have seen."""
    batches = Batches(text_of(), 0, 1, 4, False)
    straight = [batches.of_step(0, step, 2) for step in range(1, 9)]
    again = [Batches(text_of(), 0, 1, 4, False).of_step(0, step, 2) for step in range(5, 9)]
    for one, other in zip(straight[4:], again, strict=True):
        for (x, y), (u, v) in zip(one, other, strict=True):
            np.testing.assert_array_equal(x, u)
            np.testing.assert_array_equal(y, v)


@given(st.integers(CONTEXT + 1, 200), st.integers(0, 10**6), st.integers(0, 5))
def test_targets_are_the_next_tokens(tokens, step, seed):
    for inputs, targets in sequences(text_of(tokens), 1, 3, 1, step, seed):
        assert inputs == list(range(inputs[0], inputs[0] + CONTEXT))
        assert targets == [token + 1 for token in inputs]
        assert inputs[0] >= 0 and targets[-1] < tokens


def test_the_mlps_target_is_the_token_after_its_window():
    for inputs, target in sequences(text_of(), 1, 5, 1, 1, last_only=True):
        assert target == inputs[-1] + 1


def test_every_window_can_be_drawn():
    text = text_of(CONTEXT + 3)
    assert {start for step in range(40) for start in text.starts(0, step, range(4))} == {0, 1, 2}


# ---- what is held out ----------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [0, CONTEXT, CONTEXT + 1, 100, 5000])
@pytest.mark.parametrize("last_only", [False, True])
def test_held_out_windows_are_the_same_at_every_split(held_out, last_only):
    text, found = text_of(held_out=held_out), []
    for size, micro_batch in ((1, 1), (1, 8), (2, 3), (3, 2), (4, 5)):
        ranks = [Batches(text, rank, size, micro_batch, last_only) for rank in range(size)]
        batches = [rank.held_out() for rank in ranks]
        assert len({len(batch) for batch in batches}) == 1  # every rank brings as many
        rows = [
            (x, y)
            for m in range(len(batches[0]))
            for batch in batches
            for x, y in zip(*batch[m], strict=True)
        ]
        counted = [(x.tolist(), np.asarray(y).tolist()) for x, y in rows if np.all(y >= 0)]
        assert all(np.all(y == -1) or np.all(y >= 0) for _, y in rows)
        assert sum(np.size(y) for _, y in counted) == ranks[0].held_out_tokens
        found.append(counted)
    assert found == [found[0]] * len(found)
    assert len(found[0]) == min(EVALUATED, max(0, held_out - 1) // CONTEXT)


def test_held_out_windows_lie_end_to_end():
    text = text_of(held_out=41)
    rows = [x[0] for inputs, _ in Batches(text, 0, 1, 5, False).held_out() for x in inputs]
    assert rows == [0, 8, 16, 24, 32]


# ---- where text comes from -----------------------------------------------------------------------


def test_the_builtin_corpus_is_the_topics_by_key():
    topics = pytest.importorskip("pydoc_data.topics").topics
    text = load_text("builtin", 64, 256)
    expected = "".join(topics[key] for key in sorted(topics)).encode()
    assert bytes(text.train) + bytes(text.held_out) == expected == builtin_text()
    assert len(text.held_out) == len(expected) // 10


def test_a_python_without_the_corpus_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"^--data: this Python lacks the built-in corpus"):
        load_text("builtin", 64, 256)


@pytest.mark.parametrize("length", [0, 10, 64])
@pytest.mark.parametrize("name", ["text.txt", "tokens.bin"])
def test_a_text_no_longer_than_the_context_is_an_error_with_both_lengths(tmp_path, length, name):
    path = tmp_path / name
    path.write_bytes(bytes(length) * (2 if name.endswith(".bin") else 1))
    with pytest.raises(
        ValueError, match=rf"{name}: {length} tokens; a window needs --context \+ 1 = 65"
    ):
        load_text(str(path), 64, 256)


def test_a_text_of_context_plus_1_is_exactly_one_window(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(65)))
    text = load_text(str(path), 64, 256)
    assert len(text.held_out) == 0
    for inputs, targets in sequences(text, 2, 3, 2, step=1):
        assert (inputs, targets) == (list(range(64)), list(range(1, 65)))


def test_the_last_tenth_is_held_out_where_both_parts_hold_a_window(tmp_path):
    path = tmp_path / "text.txt"
    for length, expected in ((99, 9), (89, 0), (1000, 100)):
        path.write_bytes(bytes(length))
        text = load_text(str(path), 8, 256)
        assert (len(text.train), len(text.held_out)) == (length - expected, expected)


def test_tokens_of_16_bits_are_read_from_a_bin_file(tmp_path):
    path = tmp_path / "tokens.bin"
    tokens = np.random.default_rng(0).integers(0, 50_257, 500).astype("<u2")
    tokens[3] = 50_256
    path.write_bytes(tokens.tobytes())
    text = load_text(str(path), 8, 50_257)
    np.testing.assert_array_equal(np.concatenate([text.train, text.held_out]), tokens)
    inputs, targets = Batches(text, 0, 1, 2, False).of_step(0, 1, 1)[0]
    assert inputs.dtype == targets.dtype == np.int64
    with pytest.raises(ValueError, match="token 50256 is not below --vocab 50256"):
        load_text(str(path), 8, 50_256)


def test_every_rank_looks_for_tokens_that_are_too_high_in_its_own_share(tmp_path):
    path = tmp_path / "tokens.bin"
    for place in (0, 250, 499):
        tokens = np.zeros(500, "<u2")
        tokens[place] = 300
        path.write_bytes(tokens.tobytes())
        complaints = 0
        for rank in range(3):
            try:
                load_text(str(path), 8, 300, rank, 3)
            except ValueError:
                complaints += 1
        assert complaints == 1


def test_what_is_no_text_is_an_error(tmp_path):
    (tmp_path / "odd.bin").write_bytes(bytes(101))
    (tmp_path / "text.txt").write_bytes(bytes(101))
    for source, vocab, message in (
        (tmp_path / "missing.txt", 256, r"--data: expected a file, got .*missing.txt \(missing\)"),
        (tmp_path, 256, r"--data: expected a file, got .* \(a directory\)"),
        (tmp_path / "odd.bin", 256, "odd.bin: uint16 tokens need an even number of bytes, got 101"),
        (
            tmp_path / "text.txt",
            255,
            "--vocab: text is read as bytes and needs at least 256, got 255",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            load_text(str(source), 8, vocab)


def test_a_file_is_read_where_windows_are(tmp_path, monkeypatch):
    """A rank reads its windows; at the start, the file's beginning. Never the whole file."""
    path, read, preadv = tmp_path / "text.txt", [], os.preadv

    def counted(file, buffers, place):
        read.append(sum(map(len, buffers)))
        return preadv(file, buffers, place)

    with open(path, "wb") as file:
        file.truncate(1 << 40)
    text = load_text(str(path), 8, 256)
    monkeypatch.setattr(os, "preadv", counted)
    Batches(text, 1, 2, 4, False).of_step(0, 1, 2)
    assert read == [9] * 8 and len(text.train) + len(text.held_out) == 1 << 40


def test_a_file_that_is_cut_short_while_it_is_read_is_named(tmp_path):
    """A mapped file would end the process with SIGBUS."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(100, 200)) * 2)
    text = load_text(str(path), 8, 256)
    os.truncate(path, 90)
    assert np.asarray(text.train[80:90]).tobytes() == bytes(range(180, 190))
    with pytest.raises(ValueError, match=r"text\.txt: truncated to 90 bytes while"):
        np.asarray(text.train[85:94])
    with pytest.raises(ValueError, match="truncated"):
        for step in range(50):
            Batches(text, 0, 1, 2, False).of_step(0, step, 1)


# ---- files of another format ---------------------------------------------------------------------

IDS = 10 + np.random.default_rng(0).zipf(1.3, 4000).clip(max=50_000)  # most are low, as BPE's
ENGLISH = b"A text that anyone could have written, in plain English.\n" * 20
GERMAN = "Größer: ein Wort, so wie man es schreibt – mit Umlauten.\n" * 20
NPY = b"\x93NUMPY\x01\x00v\x00{'descr': '<u2', 'fortran_order': False, 'shape': (4000,), }\n"
WRONG = [  # what, its bytes, whether it is also no .bin
    ("gzip", gzip.compress(ENGLISH), True),
    ("bzip2", bz2.compress(ENGLISH), True),
    ("xz", lzma.compress(ENGLISH), True),
    ("zstd", b"\x28\xb5\x2f\xfd" + bytes(100), True),
    ("zip", b"PK\x03\x04" + bytes(100), True),
    ("tar", bytes(257) + b"ustar\x00" + bytes(1000), True),
    ("NumPy", NPY + IDS.astype("<u2").tobytes(), True),
    ("Parquet", b"PAR1" + bytes(100), True),
    ("safetensors", b"\x40" + bytes(7) + b'{"wte":{}}' + bytes(100), True),
    ("a Git LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16, True),
    ("llm.c", np.array([20240520, 1, 4000], "<i4").tobytes() + bytes(1012), True),
    ("UTF-16", ENGLISH.decode().encode("utf-16"), True),
    ("16-bit numbers or UTF-16", ENGLISH.decode().encode("utf-16-le"), False),
    ("big-endian", ENGLISH.decode().encode("utf-16-be"), True),
    ("UTF-32", ENGLISH.decode().encode("utf-32"), True),
    ("32-bit", ENGLISH.decode().encode("utf-32-le"), True),
    ("32-bit", IDS.astype("<i4").tobytes(), True),
    ("32-bit", np.where(np.arange(4000) % 9, IDS, -100).astype("<i4").tobytes(), True),
    ("big-endian 32-bit", IDS.astype(">u4").tobytes(), True),
    ("64-bit", IDS.astype("<i8").tobytes(), True),
    ("big-endian 64-bit", IDS.astype(">i8").tobytes(), True),
    ("16-bit", IDS.astype("<u2").tobytes(), False),
    ("big-endian", IDS.astype(">u2").tobytes(), True),
]


@pytest.mark.parametrize("what", range(len(WRONG)), ids=[name for name, _, _ in WRONG])
def test_a_file_of_another_format_is_recognised(tmp_path, what):
    name, content, also_no_bin = WRONG[what]
    for path in [tmp_path / "text.txt", tmp_path / "tokens.bin"][: 1 + also_no_bin]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^--data: {path}: expected .*, got {name}.*NumPy"):
            load_text(str(path), 8, 65_536)


def test_text_in_a_bin_file_is_recognised(tmp_path):
    for content in (ENGLISH, GERMAN.encode(), GERMAN.encode()[:-1]):
        (tmp_path / "t.bin").write_bytes(content[: len(content) // 2 * 2])
        with pytest.raises(
            ValueError, match=r"t\.bin: expected little-endian uint16 tokens, got text"
        ):
            load_text(str(tmp_path / "t.bin"), 8, 65_536)


RIGHT = {  # names and bytes of what is taken as it is
    "a.txt": ENGLISH,
    "umlauts.txt": GERMAN.encode(),
    "latin-1.txt": GERMAN.replace("–", "-").encode("latin-1"),
    "bom.txt": GERMAN.encode("utf-8-sig"),
    "japanese.txt": "吾輩は猫である。名前はまだ無い。\n".encode() * 20,
    "records.txt": ENGLISH.replace(b"\n", b"\0\0"),
    "zeros.txt": bytes(500),
    "every byte.txt": bytes(range(256)) * 4,
    "random.txt": np.random.default_rng(1).bytes(4096),
    "ids.bin": IDS.astype("<u2").tobytes(),
    "uniform.bin": np.random.default_rng(1).integers(0, 65_536, 4000).astype("<u2").tobytes(),
    "characters.bin": (np.frombuffer(ENGLISH, np.uint8) % 65).astype("<u2").tobytes(),
    "two letters.bin": np.random.default_rng(1).integers(0, 2, 4000).astype("<u2").tobytes(),
    "one letter.bin": np.full(500, 300, "<u2").tobytes(),
    "zeros.bin": bytes(500),
}


@pytest.mark.parametrize("name", RIGHT)
def test_text_and_tokens_are_taken_for_what_they_are(tmp_path, name):
    (tmp_path / name).write_bytes(RIGHT[name])
    text = load_text(str(tmp_path / name), 8, 65_536)
    assert (
        b"".join(np.asarray(part).tobytes() for part in (text.train, text.held_out)) == RIGHT[name]
    )


def test_a_pipe_and_a_device_are_refused_before_they_are_opened(tmp_path):
    """Opened, a pipe would wait for its writer, on every rank."""
    os.mkfifo(tmp_path / "pipe")
    for source, kind in ((tmp_path / "pipe", "a pipe"), ("/dev/zero", "a device")):
        with pytest.raises(ValueError, match=rf"^--data: expected a file, got {source} \({kind}\)"):
            load_text(str(source), 8, 256)


# ---- which text it is ----------------------------------------------------------------------------


def test_a_text_is_told_from_another_wherever_they_differ():
    """Every token of the spread samples counts, and so does where the two parts meet."""
    rng = np.random.default_rng(0)
    for length in (CONTEXT + 1, 1000, SPREAD * SAMPLE):
        tokens = rng.integers(0, 256, length, np.uint8)
        for cut in (length, length - length // 10):
            text = Text(tokens[:cut], tokens[cut:], CONTEXT)
            assert text.fingerprint == Text(tokens[:cut].copy(), tokens[cut:], 9).fingerprint
            for place in {
                0,
                length // 2,
                cut - 1,
                length - 1,
                *rng.integers(0, length, 5).tolist(),
            }:
                other = tokens.copy()
                other[place] ^= 1
                found = Text(other[:cut], other[cut:], CONTEXT).fingerprint
                assert found["spread_crc32"] != text.fingerprint["spread_crc32"], (length, place)


def test_reading_the_fingerprint_of_a_large_text_stays_small():
    """Tokens are counted as they are sliced: 11 Mi at most, however many there are."""
    read = []

    class Counted(np.ndarray):
        def __getitem__(self, key):
            found = super().__getitem__(key)
            read.append(len(found))
            return found

    tokens = np.broadcast_to(np.uint8(7), 1 << 40).view(Counted)
    assert Text(tokens, tokens[:0], CONTEXT).fingerprint["tokens"] == 1 << 40
    assert 3 << 20 < sum(read) <= 11 << 20


def test_a_resume_with_the_builtin_text_of_another_python_says_what_to_do(tmp_path):
    (tmp_path / "old.txt").write_bytes(bytes(range(100)))
    (tmp_path / "new.txt").write_bytes(bytes(range(1, 101)))
    old, new = (load_text(str(tmp_path / f"{name}.txt"), 8, 256) for name in ("old", "new"))
    saved = {**described(old, "builtin"), "python": "3.99.1"}
    for entries, told in ((saved, r"Python 3\.99\.1"), (old.fingerprint, "another Python")):
        manifest = {"run": {"data": entries}}
        message = (
            f"--data: builtin is not the checkpoint's text: crc32 .* .the text in {told}; here: .*"
            f"use {told}, .*--data FILE"
        )
        with pytest.raises(ValueError, match=message):
            same_text(new, SimpleNamespace(data="builtin"), manifest)
        same_text(old, SimpleNamespace(data=str(tmp_path / "old.txt")), manifest)
    with pytest.raises(
        ValueError, match=r"new\.txt is not the checkpoint's text: crc32 \d+, was \d+$"
    ):
        same_text(new, SimpleNamespace(data="new.txt"), manifest)


def test_a_checkpoint_with_one_checksum_is_resumed():
    """Those of zmpi before the spread checksum."""
    text = text_of()
    manifest = {"run": {"data": {n: v for n, v in text.fingerprint.items() if n != "spread_crc32"}}}
    same_text(text, SimpleNamespace(data="text"), manifest)
