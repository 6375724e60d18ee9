"""mpirun -n 4 python -m zmpi.verify: checks the promises on this MPI and device, row by row.

From Python, `promises(Trial(world, engine=MyZeRO))` checks a changed engine or communicator, a
subclass of ZeRO.
"""

import sys
from argparse import ArgumentTypeError

from zmpi.cli.model_flags import own_model
from zmpi.cli.optimizer_flags import own_optimizer
from zmpi.cli.options import Parser, real
from zmpi.cli.own import own_or
from zmpi.cli.shared_flags import WORLD_FLAGS, add_shared
from zmpi.cli.start import engine_of, start_command
from zmpi.process.streams import check_printed
from zmpi.proof.accounts import state_is_exact, volumes_are_exact
from zmpi.proof.conduct import conducted
from zmpi.proof.lifetimes import nothing_is_kept
from zmpi.proof.messages import messages_arrive
from zmpi.proof.saved import saving_loses_nothing
from zmpi.proof.sequences import data_is_shared_out
from zmpi.proof.training import (
    evaluation_agrees,
    gradient_is_right,
    narrow_types_follow,
    order_is_kept,
    rungs_agree,
    schedule_changes_nothing,
    stages_agree,
)
from zmpi.proof.trial import LARGER, SMALL, Trial
from zmpi.proof.updates import updates_are_right
from zmpi.proof.walks import walks_are_whole

COMMAND = "zmpi.verify"

# Each yields rows from a Trial. Later ones build on earlier ones.
CHECKS = {
    walks_are_whole: "P2",
    messages_arrive: "P1",
    data_is_shared_out: "P1",
    stages_agree: "P1 a",
    rungs_agree: "P1 a'",
    order_is_kept: "P1 b",
    narrow_types_follow: "P1 b",
    schedule_changes_nothing: "P1 c",
    evaluation_agrees: "P1",
    gradient_is_right: "P1",
    updates_are_right: "P1",
    volumes_are_exact: "P2",
    state_is_exact: "P2",
    nothing_is_kept: "P3",
    saving_loses_nothing: "P5",
}


def promises(trial, checks=tuple(CHECKS)):
    """Yield the rows of the table, the same on all ranks. Collective."""
    for check in checks:
        trial = yield from conducted(check, CHECKS[check], trial)


def main(argv=None):
    """Run the command; status 1 if a promise is not kept."""
    args, world = start_command(parser(), argv)
    with world.agreed():
        trial = _trial(args, world)
    say = print if world.rank == 0 else _nothing
    opening = f"{world.size} rank(s), {args.precision}, device {world.device.name}, {world.library}"
    say(f"{COMMAND}: {opening}", flush=True)
    rows = []
    for row in promises(trial):
        rows.append(row)
        status = "pass" if row.passed else "FAIL"
        say(f"{row.promise:5} {row.compared:58} {row.figure:30} {status}", flush=True)
        if row.where:
            say(f"      {row.where}", flush=True)
    given_up = dict.fromkeys(row.promise for row in rows if not row.passed)
    unchecked = dict.fromkeys(row.promise for row in rows if not row.checked)
    open_ = f"; not checked: {', '.join(unchecked)}" if unchecked else ""
    say(
        (f"not kept: {', '.join(given_up)}" if given_up else "all promises kept") + open_,
        flush=True,
    )
    with world.agreed():
        check_printed()
    sys.exit(1 if given_up else 0)


def _trial(args, world):
    """The Trial of the flags; ValueError for your own class if it cannot be used."""
    trial = Trial(world, engine_of(args.comm), args.precision, tolerance=args.tolerance)
    if args.model:
        name = args.model.name
        models = {name: own_model(args.model, *SMALL)}
        trial = trial.but(model=name, models=models, large=own_model(args.model, LARGER, *SMALL))
    if args.optimizer:
        mine = {name: getattr(trial.optimizer, name) for name in ("lr", "clip", "warmup")}
        trial = trial.but(optimizer=own_optimizer(args.optimizer, mine, mine))
    return trial


def parser():
    """All flags."""
    flags = Parser(COMMAND, __doc__.splitlines()[0])
    add = flags.add_argument
    add_shared(flags, "--precision", *WORLD_FLAGS, "--group", "--comm", timeout=60)
    for name in ("model", "optimizer"):
        add(
            f"--{name}",
            type=own_or(),
            metavar="FILE:CLASS",
            help=f"your own {name}, made small (default: zmpi's)",
        )
    add(
        "--tolerance",
        type=_tolerance,
        default=0.0,
        help="largest relative error of P1's rows, for a --comm that rounds (0: the same bits)",
    )
    return flags


def _tolerance(text):
    """An argparse type: the relative error that a communicator may declare."""
    value = real(0)(text)
    if value > 0.1:
        raise ArgumentTypeError(f"expected at most 0.1, got {text}")
    return value


def _nothing(*_, **__):
    """What the other ranks print."""


if __name__ == "__main__":
    main()
