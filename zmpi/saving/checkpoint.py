"""Checkpoints: every rank writes its own shards, and any number of ranks, at any stage, reads what it needs of them.

    save    all      each rank's shards of masters and moments into a temporary folder, from where they lie
            rank 0   the manifest, the folder's final name, `latest`
    load    all      each rank checks its share of all blocks; if one is damaged, nothing is loaded
            all      each rank reads the ranges that make its shards; what is kept whole is then gathered

Only files pass between ranks, and the block sums: no rank ever holds more than its own state and one block.
"""

from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import models
from models.layer import units
from zmpi.numbers.domains import Domain
from zmpi.process.agree import same_on_all_ranks
from zmpi.process.errors import UsageError, one_line
from zmpi.process.hooks import say
from zmpi.saving.blocks import BlockWriter
from zmpi.saving.folder import Folder
from zmpi.saving.found import explained, moved_on, newest, read_checkpoint
from zmpi.saving.manifest import Manifest, unit_entry

# attributes that say what a model is, where it has them
MODEL_ATTRIBUTES = ("depth", "width", "heads", "context", "vocab")


@dataclass(frozen=True)
class Saved:
    """What a save came to, the same on every rank but for `seconds`."""

    path: Path
    bytes: int  # of all ranks' files
    seconds: float

    def __str__(self):
        megabytes = self.bytes / 1e6
        return f"saved {self.path}: {megabytes:,.1f} MB in {self.seconds:.2f} s ({megabytes / self.seconds:,.0f} MB/s)"


class Keeper:
    """All ranks' hold on a folder of checkpoints, from opening to close() or the job's end. Every call is collective.

    Rank 0 owns the folder, which it makes if `make` says so, and locks. `keep` checkpoints remain, at least 1. What goes
    wrong on any rank is one UsageError on all of them: another job in the folder, disk full, a damaged `latest`.
    """

    def __init__(self, path, world, keep=3, make=True):
        same_on_all_ranks(world, {"--keep": keep})
        self.world, self._folder = world, None
        with world.agreed():
            keep = Domain(1, whole=True).of("--keep", keep)
            if world.rank == 0:
                self._folder = Folder(path, keep, make)
        self._warn()

    def newest(self):
        """The newest complete checkpoint's folder, or None."""
        complete = self._folder.complete() if self._folder else []
        return self.world.share(complete[-1] if complete else None)[0]

    def save(self, zero, run=None):
        """Save the engine's state; returns Saved. `run` is what a command adds to the manifest.

        The state is only read. A save that fails leaves the folder's newest checkpoint as it was.
        """
        began, temporary = perf_counter(), None
        try:
            with self.world.agreed():
                temporary = self._folder.begin(zero.step) if self._folder else None
            temporary = self.world.share(temporary)[0]
            with self.world.agreed():
                record = _write_shards(zero, temporary / f"rank-{zero.comm.shard:04d}.bin")
            files = self.world.share(record.entry())
            with self.world.agreed():
                final = self._commit(zero, temporary, files, run) if self._folder else None
            self._warn()
        except UsageError:
            if self._folder and temporary:
                self._folder.discard(temporary)
            raise
        return Saved(
            self.world.share(final)[0],
            sum(entry["bytes"] for entry in files),
            perf_counter() - began,
        )

    def close(self):
        """Let other jobs use the folder."""
        if self._folder:
            self._folder.close()

    def _commit(self, zero, temporary, files, run):
        place = self._folder.place_of(temporary)
        Manifest(temporary, {**place, **_describe(zero), "files": files, "run": run}).write()
        return self._folder.commit(temporary)

    def _warn(self):
        """Print what the folder has to say, a line each."""
        guard = self.world.guard
        while self._folder and self._folder.warnings:
            line = one_line(self._folder.warnings.pop(0))
            say(f"{guard.line_start}{guard.program}: warning: {line}\n")


def save(zero, path, keep=3):
    """Save the engine's state into a folder of checkpoints; returns Saved. See Keeper."""
    with closing(Keeper(path, zero.world, keep)) as keeper:
        return keeper.save(zero)


def find(path, world):
    """The Manifest of the newest complete checkpoint in a folder of them, or of one that is named itself; collective."""
    return _with_newest(path, world, lambda manifest: None)


def load(zero, path):
    """Take the whole state from the newest checkpoint in `path` (or from one that is named itself); collective.

    Whatever the number of ranks, the stage and the precision were. Raises UsageError on all ranks, with nothing loaded,
    for another model, another optimizer's moments, or damage, which is named with its file. Returns the Manifest.
    """
    manifest = _with_newest(path, zero.world, partial(_load, zero))
    zero.step, zero.updates, zero.seed, zero.last = (
        manifest["step"],
        manifest["updates"],
        manifest["seed"],
        None,
    )
    scaler = manifest["scaler"]
    if zero.scaler.window and scaler["window"] and manifest["recipe"] == zero.policy.recipe.name:
        zero.scaler.scale, zero.scaler.good_steps = scaler["scale"], scaler["good_steps"]
    return manifest


def load_weights(zero, path):
    """Take the weights alone, for a model that is used and not trained on; collective, and checked as load does."""

    def use(manifest):
        with zero.world.agreed():
            refuse_other_model(manifest, zero.model, zero.policy)
        read(zero, manifest, ("master",))

    return _with_newest(path, zero.world, use)


def read(zero, manifest, vectors):
    """Assign the named vectors of every unit's shards, once all blocks of the checkpoint have been found good."""
    with zero.world.agreed(), explained(manifest.folder):
        manifest.check(zero.world.rank, zero.world.size)
    with zero.world.agreed(), explained(manifest.folder):
        wanted = sorted(_ranges(zero, manifest, vectors), key=lambda found: found[:2])
        _read_ranges(manifest, wanted, zero.world.device)
    with zero.ledger.as_other():
        for unit in zero.units.values():
            unit.restore()


def refuse_other_model(manifest, model, policy):
    """Raise ValueError for a checkpoint of another model, by the first name that differs. Nothing is allocated yet."""
    shapes = {
        spec.prefix + name: tuple(shape)
        for spec in units(model).values()
        for name, shape in spec.shapes.items()
    }
    fault = manifest.differs(shapes, "this model")
    if fault:
        raise ValueError(fault)
    saved, mine = manifest["model"], _model(model)
    for name in [*saved, *mine]:
        if saved.get(name) != mine.get(name):
            raise ValueError(
                f"{manifest.folder}: {name}: {saved.get(name)} in the checkpoint, {mine.get(name)} in this model"
            )
    if manifest.dtype != policy.recipe.master:
        kinds = manifest.dtype, policy.recipe.master
        raise ValueError(
            f"{manifest.folder}: master: {kinds[0]} in the checkpoint, {kinds[1]} in this run"
        )


def _with_newest(path, world, use):
    """use(manifest) of the newest complete checkpoint; returns the manifest. Collective, see found.with_newest."""
    with world.agreed():
        folder = newest(path) if world.rank == 0 else None
    while True:
        folder = world.share(folder)[0]
        try:
            with world.agreed(), explained(folder):
                manifest = read_checkpoint(folder)
            same_on_all_ranks(world, {f"{folder}: manifest": manifest.entries})
            use(manifest)
            return manifest
        except UsageError:
            newer = moved_on(path, folder) if world.rank == 0 else None
            newer = world.share(newer)[0]
            if newer is None:
                raise
            folder = newer


# -- one rank's part ----------------------------------------------------------------------------------------------------


def _load(zero, manifest):
    with zero.world.agreed():
        refuse_other_model(manifest, zero.model, zero.policy)
        missing = [name for name in zero.optimizer.moments if name not in manifest["vectors"]]
        if missing or len(manifest["vectors"]) != 1 + len(zero.optimizer.moments):
            found = manifest["optimizer"]["name"]
            raise ValueError(
                f"{manifest.folder}: optimizer {found} in the checkpoint, {_name(zero.optimizer)} in this run"
            )
    read(zero, manifest, ("master", *zero.optimizer.moments))


def _write_shards(zero, path):
    """This rank's file; returns its Record."""
    with closing(BlockWriter(path)) as writer:
        for unit in zero.units.values():
            for shard in unit.shards().values():
                writer.write(zero.world.device.get(shard))
        return writer.finish()


def _ranges(zero, manifest, vectors):
    """(file, byte, where it goes) of every range that makes this rank's shards. The padding is left as it is."""
    for unit in zero.units.values():
        shards, layout = unit.shards(), unit.layout
        for name, start, stop in layout.spans(unit.part):
            # counted from the parameter's first element
            first = unit.part.start + start - layout.offsets[name]
            for vector in vectors:
                target = shards[vector][start:stop]
                for piece in manifest.pieces(
                    layout.prefix + name, vector, first, first + stop - start
                ):
                    yield piece.file, piece.byte, target[piece.start - first : piece.stop - first]


def _read_ranges(manifest, wanted, device):
    """Read the ranges in the order in which they lie: so each block is read once."""
    for file in sorted({found[0] for found in wanted}):
        with manifest.open(file) as reader:
            for _, byte, target in (found for found in wanted if found[0] == file):
                device.read_into(target, partial(reader.read, byte))


def _describe(zero):
    """What the manifest says of an engine."""
    return {
        "step": zero.step,
        "updates": zero.updates,
        "seed": int(zero.seed),  # it may be NumPy's
        "size": zero.world.size,
        "stage": zero.stage.number,
        "recipe": zero.policy.recipe.name,
        "master": zero.policy.recipe.master.name,
        "vectors": ["master", *zero.optimizer.moments],
        "scaler": {
            "scale": zero.scaler.scale,
            "good_steps": zero.scaler.good_steps,
            "window": zero.scaler.window,
        },
        "optimizer": {"name": _name(zero.optimizer), **asdict(zero.optimizer)},
        "model": _model(zero.model),
        "units": [unit_entry(unit.layout) for unit in zero.units.values()],
    }


def _model(model):
    kind = _name(model)
    if type(model).__module__.partition(".")[0] != "models" and hasattr(models, kind):
        kind = f"{kind} of your own"  # which no command takes for the one of that name
    return {
        "kind": kind,
        **{name: getattr(model, name) for name in MODEL_ATTRIBUTES if hasattr(model, name)},
    }


def _name(thing):
    return type(thing).__name__
