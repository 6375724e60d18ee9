"""The settings of a run that starts from a checkpoint, or from a folder of published weights.

A flag not given takes the saved value; one that is given must agree with it, unless it is in FREE,
which only changes how the same training runs. Evaluations, logs and checkpoints are each run's own.
The user's own code (MAY_BE_OWN) is never saved, so that no checkpoint names code to run: give it
again.
"""

import platform
from dataclasses import asdict
from pathlib import Path

import numpy as np

from zmpi.process.agree import same_on_all_ranks
from zmpi.process.errors import UsageError
from zmpi.saving import pretrained
from zmpi.saving.blocks import sampled_checksum
from zmpi.saving.manifest import JSON
from zmpi.saving.schema import SIZES_OF_KIND
from zmpi.text.data import described

FREE = (
    "stage",
    "group",
    "steps",
    "micro_batch",
    "accumulate",
    "precision",
    "reduction",
    "prefetch",
    "recompute",
    "comm",
)
MODEL = ("model", "layers", "width", "heads", "context", "vocab")
OPTIMIZER = (
    "optimizer",
    "lr",
    "warmup",
    "schedule",
    "decay_steps",
    "clip",
    "weight_decay",
    "beta1",
    "beta2",
    "eps",
    "momentum",
)
SEARCHED = 10_000  # numbers tried to find a divisor of a batch
SCALING = ("loss_scale", "loss_scale_window")  # also free, at the same precision
SAVED = ("data", "seed", *MODEL, *OPTIMIZER, *SCALING, *FREE)
MAY_BE_OWN = ("model", "optimizer", "comm")  # may be FILE:CLASS, the user's own class


def describe_run(args, zero, text):
    """The manifest's entry for a command's run: resolved flags, the data and the position in it."""
    flags = {name: getattr(args, name) for name in SAVED} | {"stage": zero.stage.number}
    if not class_of(args.model):
        flags["heads"] = getattr(zero.model, "heads", None)
    flags |= {name: value for name, value in asdict(zero.optimizer).items() if name in flags}
    flags["decay_steps"] = flags["decay_steps"] or None  # of an optimizer without a decay
    if args.data != "builtin":
        flags["data"] = str(Path(args.data).resolve())
    code = {name: class_of(flags.pop(name)) for name in MAY_BE_OWN if class_of(flags[name])}
    batch = args.micro_batch * args.accumulate * zero.world.size
    position = {
        "global_batch": batch,
        "next_step": zero.step + 1,
        "sequences_seen": zero.step * batch,
    }
    return {"flags": flags, "code": code, "data": {**described(text, args.data), **position}}


def class_of(value):
    """The CLASS of FILE:CLASS; "" for any other setting."""
    return value.rpartition(":")[2] if isinstance(value, str) and ":" in value else ""


def saved_flags(manifest, parser):
    """{flag: value} to continue a run with; ValueError for values the command line would refuse.

    Without the user's own classes: older checkpoints name their files, which must not be run.
    """
    path = manifest.folder / JSON
    if manifest["run"] is None:
        raise ValueError(
            f"{manifest.folder}: saved by a script, not by zmpi.train; load it with zero.load"
        )
    flags = manifest["run"]["flags"]
    kept = [name for name in flags if not (name in MAY_BE_OWN and class_of(flags[name]))]
    words = []
    for name in kept:
        flag, value = f"--{name.replace('_', '-')}", flags[name]
        if name not in SAVED:
            raise ValueError(f"{path}: {flag} is not a flag that a run can be resumed with")
        if value is not None and value is not False:
            words.append(flag if value is True else f"{flag}={value}")
    try:
        parsed = vars(parser.parse_args(words))
    except UsageError as error:
        raise ValueError(f"{path}: {error}") from None
    unset = [name for name in (*MODEL, *OPTIMIZER, "comm") if flags.get(name, 0) is None]
    saved = {name: None if name in unset else parsed[name] for name in kept}
    for name in SIZES_OF_KIND.get(manifest["model"]["kind"], ()):
        flag, size = "layers" if name == "depth" else name, manifest["model"][name]
        if saved.get(flag) != size:
            raise ValueError(f"{path}: --{flag}: {saved.get(flag)} contradicts the model's {size}")
    return saved


def take_settings(args, given, manifest, saved, size):
    """Complete `args` from the saved flags; ValueError if they contradict.

    `given`: the flags of the command line; `size`: the number of ranks.
    """
    if given.get("precision", saved["precision"]) != saved["precision"]:
        saved = {name: value for name, value in saved.items() if name not in SCALING}
    _need_code(given, manifest)
    _take(args, given, saved, (*FREE, *SCALING, "data"), manifest.folder)
    _fit_batch(args, given, manifest["run"]["data"]["global_batch"], size)
    if args.steps < manifest["step"]:
        raise ValueError(
            f"--steps: expected at least the {manifest['step']} steps already done, got"
            f" {args.steps} in total ({manifest.folder})"
        )


def _need_code(given, manifest):
    """Raise ValueError if the run used the user's own class, and it is not given again."""
    run = manifest["run"]
    older = {name: class_of(run["flags"].get(name)) for name in MAY_BE_OWN}
    for name, kind in {**older, **run.get("code", {})}.items():
        if kind and name not in given:
            otherwise = ", or --comm zmpi for zmpi's own" if name == "comm" else ""
            again = f"give --{name} FILE:{kind} again{otherwise}"
            raise ValueError(
                f"--{name}: the run used your class {kind}, and a checkpoint names no code to run:"
                f" {again}"
            )
        if kind and name not in FREE and class_of(given[name]) != kind:
            raise ValueError(f"--{name}: {given[name]} contradicts {kind} ({manifest.folder})")


def same_text(text, args, manifest):
    """Raise ValueError if the text is not the one that the checkpoint was trained on."""
    saved = manifest["run"]["data"]
    for name, value in text.fingerprint.items():
        if saved.get(name, value) != value:  # older checkpoints have one checksum
            found = f"{name} {value}, was {saved[name]}"
            raise ValueError(
                f"--data: {args.data} is not the checkpoint's text: {found}"
                f"{_other_python(args.data, saved)}"
            )


def _other_python(source, saved):
    """What to do if the built-in text is another one."""
    if source != "builtin":
        return ""
    its = f"Python {saved['python']}" if "python" in saved else "another Python"
    here = platform.python_version()
    return (
        f" (the text in {its}; here: Python {here}); use {its},"
        " or write its zmpi.text.data.builtin_text() to a file and use --data FILE"
    )


def take_sizes(args, given):
    """Complete `args` from the folder of --init-from; ValueError if they contradict."""
    saved = {"model": "transformer", **pretrained.sizes_in(args.init_from)}
    _take(args, given, saved, (), Path(args.init_from) / pretrained.CONFIG)


def init_from(zero, folder):
    """Load a folder's weights unit by unit: no rank ever holds the whole model. Collective."""
    layouts = [unit.layout for unit in zero.units.values()]
    shapes = {
        layout.prefix + name: shape for layout in layouts for name, shape in layout.shapes.items()
    }
    with zero.world.agreed():
        weights = pretrained.Weights(folder, shapes)
        checksum = sampled_checksum(weights.path)
    same_on_all_ranks(zero.world, {f"--init-from: checksum of {pretrained.WEIGHTS}": checksum})
    with zero.world.agreed(), weights:
        for unit in zero.units.values():
            full = zero.ledger.track("full", np.zeros(unit.layout.padded, np.float32))
            for name, view in unit.layout.views(full).items():
                weights.fill(unit.layout.prefix + name, view)
            unit.fill(full)


def _take(args, given, saved, free, source):
    for name, value in saved.items():
        if name not in given:
            setattr(args, name, value)
        elif name not in free and given[name] != value:
            raise ValueError(
                f"--{name.replace('_', '-')}: {given[name]} contradicts {value} ({source})"
            )


def _fit_batch(args, given, batch, size):
    """Keep the global batch on `size` ranks: derive --micro-batch or --accumulate if not given."""
    if "accumulate" not in given:
        args.accumulate = max(1, batch // (args.micro_batch * size))
    elif "micro_batch" not in given:
        args.micro_batch = max(1, batch // (args.accumulate * size))
    if args.micro_batch * args.accumulate * size != batch:
        product = f"{args.micro_batch} x {args.accumulate} x {size}"
        raise ValueError(
            f"--micro-batch: micro-batch x accumulate x ranks = {product} is not the checkpoint's"
            f" {batch} sequences; {_what_fits(args, given, batch, size)}"
        )


def _what_fits(args, given, batch, size):
    """The flags for a global batch of `batch` sequences on `size` ranks, if possible."""
    if batch % size:
        near = (range(size, 0, -1), range(size + 1, min(batch, 8 * size) + 1))
        fitting = [next((str(n) for n in numbers if batch % n == 0), None) for numbers in near]
        return f"none fits {size} ranks; {' or '.join(filter(None, fitting))} ranks would fit"

    def largest(at_most):
        near = range(at_most, max(0, at_most - SEARCHED), -1)
        return next((n for n in near if batch // size % n == 0), 1)

    if "accumulate" in given and "micro_batch" not in given:
        return f"--accumulate {largest(args.accumulate)} would fit"
    micro_batch = largest(args.micro_batch)
    follows = "accumulate" not in given
    accumulate = "" if follows else f" --accumulate {batch // size // micro_batch}"
    return f"--micro-batch {micro_batch}{accumulate} would fit"
