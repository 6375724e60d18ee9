"""A folder of checkpoints: one job at a time, only complete saves count, the last few are kept.

    DIR/latest                      the newest complete checkpoint's name, its manifest's SHA-256
    DIR/step-00000010-save-3/       a complete checkpoint; saves are numbered per folder
    DIR/.saving-...  .removing-...  left by a killed job, removed by the next
    DIR/.flock                      locked by the running job; the lock ends with the process

A checkpoint is complete once its folder, flushed to disk, gets its final name; then `latest` moves.
A job killed in between leaves a complete but unmarked checkpoint, which the next job marks. Failure
to remove something ends no run: it is a line in `warnings`, and retried at the next save.
"""

import errno
import fcntl
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from zmpi.process.files import Damaged, named, sync_folder, write_text
from zmpi.saving.found import LATEST, NAME, identify, newest, save_of
from zmpi.saving.manifest import DIGEST, JSON, manifest_digest

SAVING, REMOVING, MARKING = ".saving-", ".removing-", ".latest"
LOCK = ".flock"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)  # Lustre, NFS


class Folder:
    """A job's hold on a folder of checkpoints (created if `make`); cleans up after a killed job.

    `warnings`: lines for the user; pop those you print. Raises ValueError if the folder cannot be
    created or written, another job holds it, or `latest` is damaged.
    """

    def __init__(self, path, keep, make=True):
        self.path, self.keep, self.warnings = Path(path), keep, []
        self._newest = self._run = None  # the marked checkpoint's folder, and its run's id
        self._known = {}  # {name: Found}, each read once
        self._warned = set()  # warnings already given
        self._check(make)
        with named(path):
            self.path.mkdir(exist_ok=True)
        self._lock = self._locked()
        try:
            if not sync_folder(self.path):
                self._warn(
                    path, "this file system cannot sync folders: a power loss may undo saves"
                )
            self._repair()
            if not make and not self.complete():
                raise ValueError(f"{path}: no complete checkpoint in it")
        except (ValueError, OSError):
            self._lock.close()
            raise

    def complete(self):
        """Folders of the run's complete checkpoints, in order of saving.

        Those of another run, or renamed, are skipped with a warning.
        """
        own = []
        for one in self._found():
            fault = one.fault
            if not fault and None not in (self._run, one.run) and one.run != self._run:
                fault = "it belongs to another run"
            if fault and one.path != self._newest:
                self._warn(one.path, f"skipped: {fault}")
            else:
                own.append(one.path)
        return own

    def begin(self, step):
        """A new temporary folder for a checkpoint of that step.

        First removes checkpoints beyond `keep` that a job killed in `commit` left. Opening does
        not: a job that cannot read the newest checkpoint may want the others.
        """
        self._tidy(SAVING, REMOVING)
        names = [path.name.removeprefix(SAVING).removeprefix(REMOVING) for path in self._entries()]
        save = 1 + max(map(save_of, filter(NAME.fullmatch, names)), default=0)
        temporary = self.path / f"{SAVING}step-{step:08d}-save-{save}"
        with named(temporary):
            temporary.mkdir()
        return temporary

    def place_of(self, temporary):
        """The manifest's {"run_id", "save"} (the save's number) for a temporary folder."""
        self._run = self._run or uuid.uuid4().hex
        return {"run_id": self._run, "save": save_of(temporary.name.removeprefix(SAVING))}

    def commit(self, temporary):
        """Make a flushed temporary folder the newest checkpoint; remove those beyond `keep`."""
        final = self.path / temporary.name.removeprefix(SAVING)
        with named(final):
            temporary.rename(final)
        try:
            sync_folder(self.path)
            self._mark(final)
        except ValueError:
            with suppress(OSError):
                final.rename(temporary)  # an unmarked failure does not count
            raise
        sync_folder(self.path)
        self._tidy(REMOVING)
        return final

    def discard(self, temporary):
        """Remove the temporary folder of a failed save."""
        shutil.rmtree(temporary, ignore_errors=True)

    def close(self):
        """Release the folder."""
        self._lock.close()

    # -- opening -----------------------------------------------------------------------------------

    def _check(self, make):
        path, parent = self.path, self.path.parent
        if (path / JSON).exists():
            raise ValueError(f"{path}: expected a folder of checkpoints, got one checkpoint")
        if not path.is_dir() and (path.exists() or not make):
            raise ValueError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")
        if not parent.exists():
            raise ValueError(
                f"--checkpoint: {path}: its parent folder must exist (mkdir -p {parent})"
            )
        if not make and not any(NAME.fullmatch(entry.name) for entry in self._entries()):
            raise ValueError(f"{path}: no complete checkpoint in it")

    def _locked(self):
        """The open lock file. EWOULDBLOCK: another job has it; warn if locks are unsupported."""
        with named(self.path):
            lock = open(self.path / LOCK, "ab", opener=_without_waiting)  # noqa: SIM115  (held)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                fault = f"this file system has no locks ({error.strerror})"
                self._warn(self.path, f"{fault}: make sure that no other job uses this folder")
                return lock
            lock.close()
            fault = f"flock: {error.strerror}"
            if error.errno == errno.EWOULDBLOCK:
                fault = f"in use by another job ({error.strerror})"
            raise ValueError(f"{self.path}: {fault}") from None
        return lock

    def _repair(self):
        """Remove what killed jobs left, and mark the newest complete checkpoint."""
        with named(self.path):
            (self.path / MARKING).unlink(missing_ok=True)
        self._newest = newest(self.path) if (self.path / LATEST).exists() else None
        self._run = self._run_among(self._found())
        complete = self.complete()
        if complete and complete[-1] != self._newest:
            self._mark(complete[-1])
            sync_folder(self.path)
        self._remove_leftovers(SAVING, REMOVING)

    # -- its contents ------------------------------------------------------------------------------

    def _entries(self):
        with named(self.path):
            return sorted(self.path.iterdir())

    def _found(self):
        """The Found of every checkpoint, the newest last; each manifest is read once."""
        found = []
        for path in self._entries():
            if NAME.fullmatch(path.name) and not self._was_being_removed(path):
                if path.name not in self._known:
                    self._known[path.name] = identify(path)
                found.append(self._known[path.name])
        return sorted(
            filter(None, found), key=lambda one: (one.save, one.path == self._newest, one.order)
        )

    def _was_being_removed(self, path):
        """Whether a folder is a half-removed checkpoint: no manifest, older than the marked one."""
        older = self._newest and save_of(path.name) < save_of(self._newest.name)
        return older and not any(os.path.exists(path / name) for name in (JSON, DIGEST))

    def _run_among(self, found):
        """The marked checkpoint's run. ValueError if none is marked, and there are several runs."""
        known = [one for one in found if one.run and not one.fault]
        if self._newest:
            last = save_of(self._newest.name)  # if it is damaged, ask the ones before it
            return next((one.run for one in reversed(known) if one.save <= last), None)
        if len({one.run for one in known}) > 1:
            other = next(one for one in known if one.run != known[-1].run)
            names = f"{other.path.name} and {known[-1].path.name}"
            raise ValueError(
                f"{self.path}: {names} belong to different runs, and {LATEST} is missing: "
                "move one run's checkpoints away"
            )
        return known[-1].run if known else None

    # -- changing it -------------------------------------------------------------------------------

    def _mark(self, final):
        """Move `latest`."""
        digest = manifest_digest(final)
        if digest is None:
            raise Damaged(f"{final / JSON}: damaged")
        mark = self.path / MARKING
        try:
            write_text(mark, f"{final.name} {digest}\n")
            with named(mark):
                mark.replace(self.path / LATEST)
        except ValueError:
            mark.unlink(missing_ok=True)
            raise
        self._newest = final

    def _tidy(self, *kinds):
        """Remove what is not kept. A failure here must not end the run."""
        try:
            self._remove_leftovers(*kinds)
            self._prune()
        except ValueError as error:
            self._warn(self.path, f"old checkpoints could not be removed: {error}")

    def _prune(self):
        """Remove checkpoints beyond `keep`, so that a half-removed one never looks complete."""
        for path in self.complete()[: -self.keep]:
            leaving = self.path / f"{REMOVING}{path.name}"
            try:
                path.rename(leaving)
            except OSError as error:
                leaving = path  # in place: EXDEV for a folder in a lower layer of overlayfs
                try:  # without a manifest it is not a checkpoint, even if removal then fails
                    (path / JSON).unlink(missing_ok=True)
                    (path / DIGEST).unlink(missing_ok=True)
                except OSError:
                    self._stays(path, error)
                    continue
            self._remove(leaving)

    def _remove_leftovers(self, *kinds):
        for path in self._entries():
            if path.name.startswith(kinds) or (
                NAME.fullmatch(path.name) and self._was_being_removed(path)
            ):
                self._remove(path)

    def _remove(self, path):
        """Remove a folder, or a link to one; if that fails, as much of it as possible."""
        try:
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                shutil.rmtree(path)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            if os.path.lexists(path):
                self._stays(path, error)

    def _stays(self, path, error):
        """Warn once per kind of error: it may recur at every save."""
        words = f"cannot be removed now: {error.strerror}"
        if words not in self._warned:
            self._warned.add(words)
            self._warn(path, f"{words} (retried at each save)")

    def _warn(self, path, words):
        """A line for the user, once."""
        if (path, words) not in self._warned:
            self._warned.add((path, words))
            self.warnings.append(f"{path}: {words}")


def _without_waiting(path, flags):
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
