"""Recognises the format of a data file from its first bytes.

Training on another format as if it were text or uint16 tokens would lower the loss of a useless
model.
"""

import codecs
import os
import stat

import numpy as np

LOOKED_AT = 1 << 20  # bytes at the start of a file
EVIDENCE = 64  # bytes needed to judge: shorter files prove nothing
IRREGULAR = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
BEGINNINGS = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
    b"PK\x03\x04": "zip (.npz, .docx and PyTorch's files are zip too)",
    b"\x93NUMPY": "NumPy's .npy",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\x89HDF\r\n": "HDF5",
    b"SQLite format 3\0": "SQLite",
    b"MMIDIDX\0\0": "a Megatron index",
    b"%PDF-": "PDF",
    b"GGUF": "GGUF",
    b"version https://git-lfs": "a Git LFS pointer (`git lfs pull` fetches the file)",
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    (20240520).to_bytes(4, "little"): "llm.c's tokens, after a header of 1,024 bytes",
    (20240801).to_bytes(4, "little"): "llm.c's tokens, after a header of 1,024 bytes",
}


def refuse_irregular(flag, path):
    """Raise ValueError unless `path` is a regular file. Opens nothing: a pipe would block."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except FileNotFoundError:
        raise ValueError(f"{flag}: expected a file, got {path} (missing)") from None
    except OSError as error:
        raise ValueError(f"{flag}: {path}: {error.strerror}") from None
    if kind != stat.S_IFREG:
        found = IRREGULAR.get(kind, "not a regular file")
        raise ValueError(f"{flag}: expected a file, got {path} ({found})")


def not_text(beginning):
    """The format of a file that is not text, from its first bytes; None if it may be text.

    A NUL proves nothing: any bytes can be trained on. But NULs only in every second byte mean
    16-bit numbers or UTF-16.
    """
    halves = {"low": "16-bit numbers or UTF-16", "high": "big-endian 16-bit numbers or UTF-16"}
    return container(beginning) or _wide_numbers(beginning) or halves.get(_half(beginning))


def not_uint16(beginning):
    """The format of a file that is not little-endian uint16 tokens; None if it may be."""
    other = container(beginning) or _wide_numbers(beginning)
    if other or _half(beginning) != "high":
        return other or ("text" if _is_readable(beginning) else None)
    return "big-endian uint16"


def container(beginning):
    """The name of a known format that is neither text nor raw numbers, or None."""
    if beginning[257:262] == b"ustar":
        return "tar"
    if beginning[8:10] == b'{"' and beginning[5:8] == bytes(3):  # after the header's length
        return "safetensors"
    return next((name for start, name in BEGINNINGS.items() if beginning.startswith(start)), None)


def _wide_numbers(beginning):
    """The name of 32- or 64-bit numbers: high halves are 0 (0xffff if negative), low ones not."""
    halves = np.frombuffer(beginning[: len(beginning) // 8 * 8], "<u2").reshape(-1, 4)
    if halves.nbytes < EVIDENCE:
        return None
    empty = [bool(np.isin(column, (0, 0xFFFF)).all()) for column in halves.T]
    used = [bool(np.mean(column != 0) > 0.5) for column in halves.T]
    for name, low in {
        "32-bit numbers": [True, False, True, False],
        "big-endian 32-bit numbers": [False, True, False, True],
        "64-bit numbers": [True, False, False, False],
        "big-endian 64-bit numbers": [False, False, False, True],
    }.items():
        if used == low and empty == [not half for half in low]:
            return name
    return None


def _half(beginning):
    """Which byte of 16-bit numbers comes first, judging by the NULs: "low", "high", or None.

    High bytes are often 0, since frequent tokens and letters have low numbers; low bytes rarely.
    """
    first, second = (
        np.count_nonzero(np.frombuffer(beginning[i::2], np.uint8) == 0) for i in (0, 1)
    )
    enough = max(EVIDENCE // 4, len(beginning) // 100)  # 2 % of the bytes in that position
    if max(first, second) < enough or max(first, second) < 4 * min(first, second):
        return None
    return "high" if first > second else "low"


def _is_readable(beginning):
    """Whether all of it is UTF-8 without control characters."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(beginning)  # its end may be cut
    except UnicodeDecodeError:
        return False
    return len(beginning) >= EVIDENCE and all(c >= " " or c in "\t\n\r\f" for c in set(text))
