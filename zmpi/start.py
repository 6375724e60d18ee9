"""How a command that runs on all ranks begins: one command line, parsed by every rank and answered by one."""

from zmpi.comm import World
from zmpi.guard import UsageError
from zmpi.options import Told


def start(parser, argv):
    """(arguments, world) of the command. --help and --version are printed once and end it, and so does a wrong flag."""
    try:
        args = parser.parse_args(argv)
    except UsageError:
        World(device="cpu")  # arms the process: rank 0 prints the error, all end with it
        raise
    except Told as told:
        if World(device="cpu").rank == 0:
            print(told, end="", flush=True)
        raise SystemExit(0) from None
    return args, World(args.device, args.transport, getattr(args, "reduction", "auto"), args.timeout)
