"""How a command that runs on all ranks begins: one command line, parsed by every rank and answered by one."""

from zmpi.comm import Communicator
from zmpi.engine import ZeRO
from zmpi.manners.guard import UsageError, one_line
from zmpi.manners.launch import end_before_mpi
from zmpi.manners.options import Told, real
from zmpi.manners.own import load_class
from zmpi.manners.streams import forgiving_output
from zmpi.world import MPI, World


def world_flags(group, timeout=300):
    """Add the flags that `start` makes a World of. `timeout`: the default, in seconds."""
    add = group.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where arrays live")
    add(
        "--transport",
        choices=("auto", "direct", "staged"),
        default="auto",
        help="how device memory reaches MPI",
    )
    add(
        "--timeout",
        type=real(0, above=True),
        default=timeout,
        help="seconds after which a stuck collective ends the run",
    )


def start(parser, argv):
    """(arguments, world) of the command. --help and --version are printed once and end it, and so does a wrong flag."""
    forgiving_output(f"{parser.prog}: warning")
    _load_mpi(parser.prog)
    try:
        args = parser.parse_args(argv)
    except UsageError:
        World(device="cpu")  # arms the process: rank 0 prints the error, all end with it
        raise
    except Told as told:
        if World(device="cpu").rank == 0:
            print(told, end="", flush=True)
        raise SystemExit(0) from None
    return args, World(
        args.device, args.transport, getattr(args, "reduction", "auto"), args.timeout
    )


def _load_mpi(command):
    """Without MPI there is nobody to agree with: one process speaks."""
    try:
        MPI.COMM_WORLD  # noqa: B018  (its first use loads it)
    except (ImportError, RuntimeError) as error:
        fault = one_line(str(error).strip().partition("\n")[0])
        end_before_mpi(f"{command}: error: mpi4py cannot load an MPI library: {fault}")


def engine_of(place):
    """The engine class that `--comm FILE:CLASS` names; ZeRO itself for None, or "zmpi".

    CLASS is a Communicator of the user's own, or a ZeRO with other parts. Raises ValueError where it is neither.
    """
    if place in (None, "zmpi"):
        return ZeRO
    found = load_class("--comm", place, (ZeRO, Communicator), "Communicator or ZeRO")
    if issubclass(found, ZeRO):
        return found
    return type(f"ZeROWith{found.__name__}", (ZeRO,), {"make_communicator": found})
