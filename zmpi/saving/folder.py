"""A folder of checkpoints on disk: one job at a time, saves that count only when complete, the last few kept.

    DIR/latest                      the newest complete checkpoint's name, and the SHA-256 of its manifest
    DIR/step-00000010-save-3/       a complete checkpoint; saves are counted over the life of the folder
    DIR/.saving-...  .removing-...  what a killed job left: removed by the next one
    DIR/.flock                      locked by the job at work. Only the lock counts, and it dies with the process

A folder gets its final name when all in it is on disk; that is the moment from which the checkpoint is complete. Then
`latest` moves. A job killed in between leaves a complete checkpoint that is not marked: the next job marks it. No MPI in here.
"""

import fcntl
import re
import shutil
from pathlib import Path

from zmpi.saving.blocks import named, sync_folder, write_text
from zmpi.saving.manifest import JSON, digest_of

LATEST, SAVING, REMOVING, MARKING = "latest", ".saving-", ".removing-", ".latest"
NAME = re.compile(r"step-(\d{8,})-save-(\d+)")
MARK = re.compile(rf"({NAME.pattern}) ([0-9a-f]{{64}})\n")


def newest(path):
    """The newest complete checkpoint's folder, for a folder of checkpoints (or one of them, which is then meant itself).

    Raises ValueError where there is none, or where `latest` is damaged.
    """
    path = Path(path)
    if (path / JSON).exists():
        return path
    mark = path / LATEST
    if not mark.exists():
        fault = "no complete checkpoint in it" if path.is_dir() else "no such folder"
        raise ValueError(f"{path}: {fault}")
    with named(mark):
        found = MARK.fullmatch(mark.read_bytes().decode(errors="replace"))
    if not found or not (path / found[1]).is_dir():
        raise ValueError(
            f"{mark}: names no checkpoint that is there: damaged (without it the newest one is taken)"
        )
    digest = digest_of(path / found[1])
    if (
        digest is not None and digest != found[4]
    ):  # a manifest that is damaged itself is named when it is read
        raise ValueError(f"{mark}: another checksum than that of {found[1]}/{JSON}: damaged")
    return path / found[1]


class Folder:
    """A job's hold on a folder of checkpoints, which is made if `make` says so. Opening it cleans up after a killed job.

    Raises ValueError where it cannot be made or written, another job holds it, or `latest` is damaged.
    """

    def __init__(self, path, keep, make=True):
        self.path, self.keep = Path(path), keep
        if (self.path / JSON).exists():
            raise ValueError(f"{path}: is one checkpoint, not a folder of them")
        if not self.path.is_dir() and (self.path.exists() or not make):
            raise ValueError(
                f"{path}: {'not a folder' if self.path.exists() else 'no such folder'}"
            )
        if not make and not self.complete():
            raise ValueError(f"{path}: no complete checkpoint in it")
        with named(path):
            self.path.mkdir(exist_ok=True)
            self._lock = open(self.path / ".flock", "ab")  # noqa: SIM115  (held until close, or the process's end)
        try:
            with named(path):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ValueError as error:
            self._lock.close()
            raise ValueError(
                f"{path}: in use by another job ({str(error).rpartition(': ')[2]})"
            ) from None
        try:
            self._repair()
        except ValueError:
            self._lock.close()
            raise

    def complete(self):
        """Folders of the complete checkpoints, in the order in which they were saved."""
        found = {
            int(match[2]): path
            for path in self.path.iterdir()
            if (match := NAME.fullmatch(path.name))
        }
        return [found[save] for save in sorted(found)]

    def begin(self, step):
        """A new temporary folder for a checkpoint of that step.

        First removes what a job killed within `commit` left beyond `keep`: not on opening, as a job that cannot read the
        newest checkpoint may yet want the others.
        """
        self._prune()
        complete = self.complete()
        save = int(NAME.fullmatch(complete[-1].name)[2]) + 1 if complete else 1
        temporary = self.path / f"{SAVING}step-{step:08d}-save-{save}"
        with named(temporary):
            temporary.mkdir()
        return temporary

    def commit(self, temporary):
        """Make a temporary folder, in which all is on disk, the newest checkpoint; remove those beyond `keep`."""
        final = self.path / temporary.name.removeprefix(SAVING)
        with named(final):
            temporary.rename(final)
        sync_folder(self.path)
        try:
            self._mark(final)
        except ValueError:
            final.rename(temporary)  # it counts no more than one that was not written
            raise
        self._prune()
        return final

    def discard(self, temporary):
        """Remove the temporary folder of a save that failed."""
        shutil.rmtree(temporary, ignore_errors=True)

    def close(self):
        """Let other jobs use the folder."""
        self._lock.close()

    def _mark(self, final):
        """Move `latest`."""
        digest = digest_of(final)
        if digest is None:
            raise ValueError(f"{final / JSON}: damaged")
        mark = self.path / MARKING
        try:
            write_text(mark, f"{final.name} {digest}\n")
            with named(mark):
                mark.replace(self.path / LATEST)
        except ValueError:
            mark.unlink(missing_ok=True)
            raise
        sync_folder(self.path)

    def _prune(self):
        """Remove the checkpoints beyond `keep`. What a killed job leaves of one does not look like one."""
        for path in self.complete()[: -self.keep]:
            leaving = self.path / f"{REMOVING}{path.name}"
            with named(path):
                path.rename(leaving)
                shutil.rmtree(leaving)

    def _repair(self):
        """Remove what killed jobs left of checkpoints, and mark the newest one that is complete."""
        with named(self.path):
            for path in self.path.iterdir():
                if path.name.startswith((SAVING, REMOVING)):
                    shutil.rmtree(path)
            (self.path / MARKING).unlink(missing_ok=True)
        complete = self.complete()
        if complete and (not (self.path / LATEST).exists() or newest(self.path) != complete[-1]):
            self._mark(complete[-1])
