"""How a command on all ranks starts: every rank parses the command line, one prints."""

from zmpi.cli.options import FileName, HelpText
from zmpi.cli.own import FileClass, load_class
from zmpi.core.engine import ZeRO
from zmpi.messages.comm import Communicator
from zmpi.messages.world import MPI, World
from zmpi.process.agree import same_on_all_ranks
from zmpi.process.errors import UsageError, one_line
from zmpi.process.launch import end_before_mpi
from zmpi.process.streams import check_printed, forgiving_output

WORLD = ("device", "transport", "reduction", "timeout", "group")  # the flags passed to World

LOADING = "mpi4py cannot load an MPI library"
REMEDY = "load your site's MPI, or install one into this environment (pip install mpich)"


def start_command(parser, argv):
    """(arguments, world) of the command. --help, --version and errors print once and end it."""
    forgiving_output()
    _load_mpi(parser.prog)
    fault = help_text = None
    settings = {"device": "cpu"}
    try:
        args = parser.parse_args(argv)
        settings = {name: getattr(args, name) for name in WORLD if hasattr(args, name)}
    except UsageError as error:
        fault = error
    except HelpText as text:
        help_text = text
    world = World(**settings)  # arms the guard: rank 0 prints an error, and all ranks end
    with world.agreed():
        if fault:
            raise ValueError(str(fault))
    same_on_all_ranks(world, {"--help": "given" if help_text else "not given"})
    if help_text:
        with world.agreed():
            if world.rank == 0:
                print(help_text, end="")
            check_printed()
        raise SystemExit(0)
    flags = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
    same_on_all_ranks(world, {flag: _common(value) for flag, value in flags.items()})
    return args, world


def refuse_different_texts(world, text):
    """Raise UsageError on all ranks if one has another text than rank 0. Collective."""
    with world.agreed():
        fingerprint = text.fingerprint
    same_on_all_ranks(world, {f"--data: {name}": value for name, value in fingerprint.items()})


def _common(value):
    """The part of a flag's value that must agree between ranks. Paths may differ between nodes."""
    if isinstance(value, FileClass):
        return value.identity()
    return "a path" if isinstance(value, FileName) else str(value)


def _load_mpi(command):
    """Load MPI; on failure one process prints the error."""
    try:
        MPI.COMM_WORLD  # noqa: B018  (the first use loads it)
    except (ImportError, RuntimeError) as error:
        fault = one_line(str(error).strip().partition("\n")[0])
        end_before_mpi(f"{command}: error: {LOADING}: {fault}; {REMEDY}")


def engine_of(place):
    """The engine class of `--comm FILE:CLASS`; ZeRO itself for None or "zmpi".

    CLASS is the user's own Communicator, or a ZeRO with other parts; ValueError if neither.
    """
    if place in (None, "zmpi"):
        return ZeRO
    found = load_class("--comm", place, (ZeRO, Communicator), "Communicator or ZeRO")
    if issubclass(found, ZeRO):
        return found

    class WithCommunicator(ZeRO):
        make_communicator = found

    return WithCommunicator
