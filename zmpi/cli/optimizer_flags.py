"""Builds the optimizer from the command line."""

from dataclasses import fields

from zmpi.cli.options import named_as_flags, number, real, whole
from zmpi.cli.own import FileClass, call, load_class
from zmpi.cli.shared_flags import OPTIMIZERS, add_shared
from zmpi.numbers.optim import DOMAINS, Optimizer

COMMAND_DEFAULTS = {
    "lr": 3e-3,
    "warmup": 20,
    "schedule": "cosine",
    "clip": 1.0,
}  # the command's defaults
OTHERS = ("decay_steps", "weight_decay", "beta1", "beta2", "eps", "momentum")
HYPERPARAMETERS = (*COMMAND_DEFAULTS, *OTHERS)


def add_optimizer_flags(group):
    """Add the flags that choose the optimizer."""
    add = group.add_argument
    add_shared(group, "--optimizer")
    _course_flags(add)
    numbers = {
        "clip": "maximum global norm of the gradient (0: off)",
        "weight_decay": "decoupled, on matrices only (default: 0.1; sgd: 0)",
        "beta1": "decay of the first moment (default: 0.9; not for sgd)",
        "beta2": "decay of the second moment (default: 0.95; not for sgd)",
        "eps": "added to the root of the second moment (default: 1e-8; not for sgd)",
        "momentum": "decay of the velocity (default: 0; not for adamw)",
    }
    for name, what in numbers.items():
        flag, default = f"--{name.replace('_', '-')}", COMMAND_DEFAULTS.get(name)
        add(flag, type=number(DOMAINS[name]), default=default, help=what)


def _course_flags(add):
    """Add the flags of the learning rate."""
    course = {
        "lr": (
            real(0, above=True, highest=DOMAINS["lr"].highest),
            "learning rate after the warm-up",
        ),
        "warmup": (whole(0), "steps over which the learning rate rises"),
    }
    for name, (kind, what) in course.items():
        add(f"--{name}", type=kind, default=COMMAND_DEFAULTS[name], help=what)
    add(
        "--schedule",
        choices=("cosine", "constant"),
        default=COMMAND_DEFAULTS["schedule"],
        help="learning rate after the warm-up",
    )
    add(
        "--decay-steps",
        type=whole(1),
        help="step at which cosine reaches --lr/10 (default: --steps)",
    )


def build_optimizer(args):
    """The optimizer of the flags; ValueError for a flag that does not apply to it."""
    given = {name: getattr(args, name) for name in HYPERPARAMETERS}
    if isinstance(args.optimizer, FileClass):
        found = _own_class(args.optimizer)
        cosine = (given["schedule"] or found.schedule) == "cosine"
        if cosine and not (given["decay_steps"] or found.decay_steps):
            given["decay_steps"] = _decay_steps(args, found.warmup)
        return own_optimizer(args.optimizer, given, COMMAND_DEFAULTS)
    kind = OPTIMIZERS[args.optimizer]
    own = {field.name for field in fields(kind)}
    given = {name: value for name, value in given.items() if value is not None}
    foreign = [name for name in given if name not in own]
    if foreign:
        raise ValueError(
            f"--{foreign[0].replace('_', '-')}: does not apply to --optimizer {args.optimizer}"
        )
    with named_as_flags():
        return kind(**{**given, "decay_steps": _decay_steps(args, COMMAND_DEFAULTS["warmup"])})


def own_optimizer(place, given, defaults):
    """Your own optimizer; `given` and `defaults` as in own.call."""
    return call("--optimizer", place, _own_class(place), given, defaults)


def _own_class(place):
    return load_class("--optimizer", place, (Optimizer,), "Optimizer")


def _decay_steps(args, warmup):
    """The cosine's last step: --decay-steps, or --steps; always after the warm-up."""
    warmup = warmup if args.warmup is None else args.warmup
    return max(args.decay_steps or args.steps, warmup + 1)
