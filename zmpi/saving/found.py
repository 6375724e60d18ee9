"""Finds checkpoints in a folder: the one marked by `latest`, and the others of the same run.

A run's id is made at its first save into the folder and stored in each manifest from then on (older
ones have none: theirs is derived from seed, model and data). A checkpoint's name repeats its
manifest's step and save. Of two with the same save number, the marked one is newer, then the one
with the higher step, then with the higher checksum.
"""

import hashlib
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zmpi.process.files import Damaged, read_file
from zmpi.saving.manifest import JSON, Manifest, manifest_digest

LATEST = "latest"
NAME = re.compile(r"step-(\d{8,})-save-(\d+)")
MARK = re.compile(rf"({NAME.pattern}) ([0-9a-f]{{64}})\n")


@dataclass(frozen=True)
class Found:
    """A folder named like a checkpoint."""

    path: Path
    step: int
    save: int
    digest: str  # of its manifest; "" if damaged
    run: str | None  # the id of its run; None if the manifest is damaged
    fault: str  # why it does not match its name; "" if it does

    @property
    def order(self):
        """The sort key of one run's checkpoints: the newest is last."""
        return self.save, self.step, self.digest


def identify(path):
    """The Found of a folder, or None if it is not named like a checkpoint."""
    name = NAME.fullmatch(path.name)
    if not name or not path.is_dir():
        return None
    step, save = int(name[1]), int(name[2])
    try:
        manifest = Manifest.read(path)
    except Damaged:
        return Found(path, step, save, "", None, "")
    except ValueError as error:
        return Found(path, step, save, "", None, str(error))
    return Found(
        path, step, save, manifest_digest(path) or "", run_of(manifest), _misnamed(manifest)
    )


def read_checkpoint(folder):
    """The Manifest of a checkpoint's folder; ValueError also if the folder was renamed."""
    manifest = Manifest.read(folder)
    fault = _misnamed(manifest)
    if fault:
        raise ValueError(f"{folder}: {fault}")
    return manifest


def _misnamed(manifest):
    """How a folder's name differs from its manifest, as a text; "" if it does not."""
    name = NAME.fullmatch(manifest.folder.name)
    step, save = (manifest.entries.get(key) for key in ("step", "save"))
    if not name or (step in (None, int(name[1])) and save in (None, int(name[2]))):
        return ""
    return f"renamed: its manifest says step {step}" + (f", save {save}" if save else "")


def save_of(name):
    """The save number in a checkpoint's name."""
    return int(NAME.fullmatch(name)[2])


def run_of(manifest):
    """The id of a manifest's run."""
    run = manifest.entries.get("run") or {}
    kept = [manifest.entries.get("seed"), manifest.entries.get("model")]
    kept += [run.get("data", {}).get(name) for name in ("tokens", "kind", "crc32")]
    derived = hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:32]
    return manifest.entries.get("run_id", derived)


def newest(path):
    """The newest complete checkpoint in a folder of them; a checkpoint's own folder is returned.

    Raises ValueError if there is none, or `latest` is damaged.
    """
    path, before = Path(path), None
    if (path / JSON).exists():
        return path
    if not (path / LATEST).exists():
        fault = "no complete checkpoint in it" if path.is_dir() else "no such folder"
        raise ValueError(f"{path}: {fault}")
    while True:  # a running job may mark a newer one and remove this one meanwhile
        content = read_file(path / LATEST, 1024)
        try:
            return _marked(path, content)
        except Damaged:
            if content == before:
                raise
            before = content


def _marked(path, content):
    mark, found = path / LATEST, MARK.fullmatch(content.decode(errors="replace"))
    way_out = "delete this file to resume from the newest complete checkpoint"
    if not found:
        raise Damaged(f"{mark}: damaged; {way_out}")
    if not (path / found[1]).is_dir():
        raise Damaged(f"{mark}: points to a missing checkpoint, {found[1]}; {way_out}")
    digest = manifest_digest(path / found[1])
    if digest not in (None, found[4]):  # a damaged manifest is reported when it is read
        raise Damaged(
            f"{mark}: damaged: its checksum differs from that of {found[1]}/{JSON}; {way_out}"
        )
    return path / found[1]


def with_newest(path, use):
    """Return use(folder) of the newest complete checkpoint.

    Retries with a newer one if a running job has saved it, and removed this one, meanwhile.
    """
    folder = newest(path)
    while True:
        try:
            with explained(folder):
                return use(folder)
        except ValueError:
            newer = moved_on(path, folder)
            if newer is None:
                raise
            folder = newer


def moved_on(path, folder):
    """The newest complete checkpoint if it is no longer `folder`, else None."""
    try:
        found = newest(path)
    except (ValueError, OSError):
        return None
    return None if found == folder else found


@contextmanager
def explained(folder):
    """Add to a damaged checkpoint's error how to resume from the previous one."""
    try:
        yield
    except Damaged as error:
        raise Damaged(f"{error}{_way_out(folder)}") from None


def _way_out(folder):
    name, mark = NAME.fullmatch(folder.name), folder.parent / LATEST
    if not name or not mark.exists():
        return ""
    others = [(int(m[2]), m[0]) for p in folder.parent.iterdir() if (m := NAME.fullmatch(p.name))]
    before = [other for other in others if other[0] < int(name[2])]
    if not before:
        return f" ({folder.parent} holds no other complete checkpoint)"
    return f"; to resume from {max(before)[1]}, delete {folder} and {mark}"
