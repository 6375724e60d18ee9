"""The settings in which two runs differ, and what each difference can change.

A log's header holds the resolved settings and the command line; flags not given have their
defaults, unless the run took them from a checkpoint or published weights.
"""

from dataclasses import asdict, dataclass
from typing import Any

from zmpi.cli.model_flags import DEFAULT_SIZES
from zmpi.cli.optimizer_flags import HYPERPARAMETERS, build_optimizer
from zmpi.cli.options import HelpText, Parser
from zmpi.cli.own import FileClass
from zmpi.cli.resume import SAVED
from zmpi.cli.train_flags import add_train_flags
from zmpi.core.layout import PIECES
from zmpi.process.errors import UsageError

NO_BIT, ROUNDING, TRAINING = "no bit", "rounding", "the training"
OUTPUTS = ("log", "checkpoint", "trace")  # each run has its own files
# Also in the header, resolved; padded sizes follow from the others.
RESOLVED = ("stage", "precision", "micro_batch", "accumulate", "data")
RESOLVED += ("device", "transport", "reduction")
DERIVED = ("argv", "padded_unit_sizes")
# Promised to change no bit (README: same training, nothing lost), or only where and how long.
HARMLESS = ("--prefetch", "--recompute", "--resume", "--timeout", "--steps", "--eval-every")
HARMLESS += ("--keep", "--save-every", "data.source", "data.python")
SUMMED = ("reduction", "threads", "device", "transport", "mpi")  # other sums, or in another order
BATCH = ("size", "micro_batch", "accumulate")


@dataclass(frozen=True)
class SettingThatDiffers:
    """A setting that differs: a key of the header, or a flag. None: missing in that run."""

    name: str
    a: Any
    b: Any
    can_change: str


def differing_settings(a, b):
    """[SettingThatDiffers] of two headers, with only the first unit size that differs."""
    found = {}
    for one, other in ((_header(a), _header(b)), _both_flags(a["argv"], b["argv"])):
        for name in [*one, *(name for name in other if name not in one)]:
            values = one.get(name), other.get(name)
            group = "unit_sizes" if name.startswith("unit_sizes.") else name
            if values[0] != values[1]:
                found.setdefault(group, SettingThatDiffers(name, *values, _effect(name, a, b)))
    return [*found.values()]


def _effect(name, a, b):
    """What a differing setting can change, by the README's promise of the same training."""
    if name in HARMLESS:
        return NO_BIT
    if name in SUMMED:
        return ROUNDING
    ordered = a["reduction"] == b["reduction"] == "ordered"
    if name == "stage":
        single = a["accumulate"] == b["accumulate"] == 1
        return NO_BIT if single or ordered else ROUNDING
    if name in BATCH and _global_batch(a) == _global_batch(b):
        alike = a["micro_batch"] == b["micro_batch"]
        divide = PIECES % a["size"] == PIECES % b["size"] == 0
        return NO_BIT if ordered and alike and divide else ROUNDING
    return TRAINING


def _global_batch(header):
    return header["micro_batch"] * header["accumulate"] * header["size"]


def _header(header):
    """{name: value} of a header; an object's values are named `key.inner`."""
    found = {}
    for name, value in header.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return {name: value for name, value in found.items() if name.partition(".")[0] not in DERIVED}


def _both_flags(a, b):
    """Two {--flag: value}, of the flags known for both command lines.

    If this version does not accept one of them, both are just their words.
    """
    a, b = (argv[1:] if argv and not argv[0].startswith("-") else argv for argv in (a, b))
    try:
        one, other = _flags(a), _flags(b)
    except (UsageError, HelpText, ValueError):
        return {"argv": " ".join(a)}, {"argv": " ".join(b)}
    common = [name for name in one if name in other]
    return tuple(
        {f"--{name.replace('_', '-')}": flags[name] for name in common} for flags in (one, other)
    )


def _flags(words):
    """{name: value} of a command line, without what the header also has.

    A value not given is the default; one taken from elsewhere (a checkpoint, published weights, the
    user's own class) is unknown, and left out.
    """
    args, given = _parser().parse_args(words), _parser().given(words)
    values, elsewhere = vars(args), {*HYPERPARAMETERS}
    if args.model == "transformer" and args.heads is None:
        values["heads"] = DEFAULT_SIZES["heads"]
    if args.resume:
        elsewhere |= {*SAVED}
    elif not isinstance(args.optimizer, FileClass):  # its own defaults, and the decay's end
        hyperparameters = asdict(build_optimizer(args))
        values |= hyperparameters
        given = {*given, *hyperparameters}
    if args.init_from or isinstance(args.model, FileClass):
        elsewhere |= {*DEFAULT_SIZES}
    out = {*OUTPUTS, *RESOLVED} | (elsewhere - {*given})
    return {name: value for name, value in values.items() if name not in out}


def _parser():
    flags = Parser("zmpi.train", "")
    add_train_flags(flags)
    return flags
