"""How a command that runs on all ranks begins: one command line, parsed by every rank and answered by one."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from zmpi.comm import Communicator
from zmpi.engine import ZeRO
from zmpi.manners.guard import UsageError, one_line
from zmpi.manners.launch import end_before_mpi
from zmpi.manners.options import Told, forgiving_output, real
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
    forgiving_output()
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
    path, _, name = place.rpartition(":")
    if not Path(path).is_file() or not name:
        raise ValueError(
            f"--comm: expected FILE:CLASS, got {place} ({path or 'FILE'} is not a file)"
        )
    spec = spec_from_file_location(f"comm_of_{Path(path).stem}", path)
    if spec is None:
        raise ValueError(f"--comm: {path} is not a Python file")
    module = sys.modules[spec.name] = module_from_spec(spec)  # where dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--comm: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, ZeRO):
        return found
    if isinstance(found, type) and issubclass(found, Communicator):
        return type(f"ZeROWith{name}", (ZeRO,), {"make_communicator": found})
    raise ValueError(f"--comm: {path} has no class {name} that is a zmpi Communicator or ZeRO")
