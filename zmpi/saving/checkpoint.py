"""Checkpoints: each rank writes its own shards; any number of ranks, at any stage, can load them.

    save  all ranks  write their shards of masters and moments into a temporary folder
          rank 0     writes the manifest, the folder's final name, `latest`
    load  all ranks  check a share of all blocks; if one is damaged, nothing is loaded
          all ranks  read the ranges that make up their shards; whole vectors are then gathered

Ranks exchange only files' names and block sums: none holds more than its own state and one block.
"""

from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
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

# attributes that identify a model, if it has them
MODEL_ATTRIBUTES = ("depth", "width", "heads", "context", "vocab")


@dataclass(frozen=True)
class Saved:
    """The result of a save, the same on every rank except `seconds`."""

    path: Path
    bytes: int  # of all ranks' files
    seconds: float

    def __str__(self):
        megabytes = self.bytes / 1e6
        speed = f"{self.seconds:.2f} s ({megabytes / self.seconds:,.0f} MB/s)"
        return f"saved {self.path}: {megabytes:,.1f} MB in {speed}"


class Keeper:
    """All ranks' hold on a folder of checkpoints, until close() or the job's end. All collective.

    Rank 0 locks the folder, and creates it if `make`. The last `keep` checkpoints (at least 1) are
    kept. An error on any rank is one UsageError on all: another job in the folder, a full disk, a
    damaged `latest`.
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
        """Save the engine's state; returns Saved. `run`: what a command adds to the manifest.

        Only reads the state. A failed save leaves the folder's newest checkpoint untouched.
        """
        began, temporary = perf_counter(), None
        try:
            with self.world.agreed():
                temporary = self._folder.begin(zero.step) if self._folder else None
            temporary = self.world.share(temporary)[0]
            with self.world.agreed():
                record = _write_shards(zero, temporary / f"rank-{zero.comm.shard:04d}.bin")
            files = self.world.share((zero.comm.shard, record.entry()))
            files = [entry for _, entry in sorted(files, key=itemgetter(0))]  # in the shards' order
            with self.world.agreed():
                final = self._commit(zero, temporary, files, run) if self._folder else None
            self._warn()
        except UsageError:
            if self._folder and temporary:
                self._folder.discard(temporary)
            raise
        nbytes = sum(entry["bytes"] for entry in files)
        return Saved(self.world.share(final)[0], nbytes, perf_counter() - began)

    def close(self):
        """Release the folder."""
        if self._folder:
            self._folder.close()

    def _commit(self, zero, temporary, files, run):
        place = self._folder.place_of(temporary)
        Manifest(temporary, {**place, **_describe(zero), "files": files, "run": run}).write()
        return self._folder.commit(temporary)

    def _warn(self):
        """Print the folder's warnings, a line each."""
        guard = self.world.guard
        while self._folder and self._folder.warnings:
            line = one_line(self._folder.warnings.pop(0))
            say(f"{guard.line_start}{guard.program}: warning: {line}\n")


def save(zero, path, keep=3):
    """Save the engine's state into a folder of checkpoints; returns Saved. See Keeper."""
    with closing(Keeper(path, zero.world, keep)) as keeper:
        return keeper.save(zero)


def find(path, world):
    """The Manifest of a checkpoint, or of the newest complete one in a folder. Collective."""
    return _with_newest(path, world, lambda manifest: None)


def load(zero, path):
    """Load the whole state from a checkpoint, or the newest in a folder of them. Collective.

    It may come from any number of ranks, stage and precision. Raises UsageError on all ranks, with
    nothing loaded, for another model, other moments, or damage (naming the file). Returns the
    Manifest.
    """
    manifest = _with_newest(path, zero.world, partial(_load, zero))
    zero.step, zero.updates, zero.seed = (manifest[key] for key in ("step", "updates", "seed"))
    zero.last = None
    scaler = manifest["scaler"]
    if zero.scaler.window and scaler["window"] and manifest["recipe"] == zero.policy.recipe.name:
        zero.scaler.scale, zero.scaler.good_steps = scaler["scale"], scaler["good_steps"]
    return manifest


def load_weights(zero, path):
    """Load only the weights, to use a model without training it. Collective, checked like load."""

    def use(manifest):
        with zero.world.agreed():
            refuse_other_model(manifest, zero.model, zero.policy)
        read(zero, manifest, ("master",))

    return _with_newest(path, zero.world, use)


def read(zero, manifest, vectors):
    """Read these vectors of every unit's shards, after checking all blocks of the checkpoint."""
    with zero.world.agreed(), explained(manifest.folder):
        manifest.check(zero.world.rank, zero.world.size)
    with zero.world.agreed(), explained(manifest.folder):
        wanted = sorted(_ranges(zero, manifest, vectors), key=lambda found: found[:2])
        _read_ranges(manifest, wanted, zero.world.device)
    with zero.ledger.as_other():
        for unit in zero.units.values():
            unit.restore()


def refuse_other_model(manifest, model, policy):
    """Raise ValueError, with the first difference, for a checkpoint of another model."""
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
                f"{manifest.folder}: {name}: {saved.get(name)} in the checkpoint, "
                f"{mine.get(name)} in this model"
            )
    if manifest.dtype != policy.recipe.master:
        kinds = manifest.dtype, policy.recipe.master
        raise ValueError(
            f"{manifest.folder}: master: {kinds[0]} in the checkpoint, {kinds[1]} in this run"
        )


def _with_newest(path, world, use):
    """Call use(manifest) of the newest checkpoint; returns it. with_newest, collectively."""
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


# -- one rank's part -------------------------------------------------------------------------------


def _load(zero, manifest):
    with zero.world.agreed():
        refuse_other_model(manifest, zero.model, zero.policy)
        missing = [name for name in zero.optimizer.moments if name not in manifest["vectors"]]
        if missing or len(manifest["vectors"]) != 1 + len(zero.optimizer.moments):
            raise ValueError(
                f"{manifest.folder}: optimizer {manifest['optimizer']['name']} in the checkpoint, "
                f"{_name(zero.optimizer)} in this run"
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
    """Yield (file, byte, target) for every range of this rank's shards, without the padding."""
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
    """Read the ranges in file order, so that each block is read once."""
    for file in sorted({found[0] for found in wanted}):
        with manifest.open(file) as reader:
            for _, byte, target in (found for found in wanted if found[0] == file):
                device.read_into(target, partial(reader.read, byte))


def _describe(zero):
    """An engine's entries in the manifest."""
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
        kind = f"{kind} of your own"  # so that no command takes it for the built-in one
    return {
        "kind": kind,
        **{name: getattr(model, name) for name in MODEL_ATTRIBUTES if hasattr(model, name)},
    }


def _name(thing):
    return type(thing).__name__
