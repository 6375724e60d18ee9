"""Command lines with one-line errors, no abbreviations, and a default in every flag's help."""

import argparse
import os
import shlex
import sys
from contextlib import contextmanager

from zmpi import __version__
from zmpi.numbers.domains import SIZE_BOUND, Domain
from zmpi.process.errors import UsageError, one_line
from zmpi.process.launch import launched_rank
from zmpi.process.streams import check_printed, forgiving_output


class HelpText(Exception):
    """The text of --help or --version, for one rank to print."""


class Parser(argparse.ArgumentParser):
    """An argument parser that neither prints nor exits: it raises UsageError, or HelpText."""

    def __init__(self, command, description):
        super().__init__(
            prog=command, description=description, allow_abbrev=False, formatter_class=_Help
        )
        self.add_argument(
            "--version",
            action="version",
            version=f"zmpi {__version__}",
            help="print the version and exit",
        )
        self._said, self._words = "", []

    def given(self, argv=None):
        """{name: value} of the flags given on a command line. The parser cannot be used again."""
        for action in self._actions:
            action.default = argparse.SUPPRESS
        return vars(self.parse_args(argv))

    def parse_args(self, args=None, namespace=None):
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_args(args, namespace)

    def error(self, message):
        flag, _, fault = message.removeprefix("argument ").partition(": ")
        if fault == "expected one argument":
            message += self._advice(flag)
        unknown = message.partition("unrecognized arguments: ")[2]
        first = unknown.split()[0] if unknown.strip() else repr(unknown)
        raise UsageError(
            f"{first}: no such flag; see --help" if unknown else message.removeprefix("argument ")
        )

    def _advice(self, flag):
        """How to write a value that starts with "-", which argparse takes for a flag."""
        for word, value in zip(self._words, self._words[1:], strict=False):
            flags = ("--", *self._option_string_actions)
            if word == flag and value.startswith("-") and value.partition("=")[0] not in flags:
                return f"; write a value that starts with - as {shlex.quote(f'{flag}={value}')}"
        return ""

    def _print_message(self, message, file=None):
        self._said += message

    def exit(self, status=0, message=None):
        raise HelpText(self._said)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows every flag's default; switches are off by default and say so."""

    def _get_help_string(self, action):
        if action.required:
            return f"{action.help} (required)"
        if action.default is argparse.SUPPRESS or "default:" in (action.help or ""):
            return action.help
        if action.default is None:
            return f"{action.help} (default: none)"
        if action.nargs == 0:
            return f"{action.help} (default: off)"
        return super()._get_help_string(action)


def whole(lowest, below=SIZE_BOUND):
    """An argparse type: a whole number from `lowest`, below a bound."""
    return number(Domain(lowest, below=below, whole=True))


def real(lowest, above=False, **bounds):
    """An argparse type: a finite number of at least (or above) `lowest`; `bounds` as in Domain."""
    return number(Domain(lowest, above=above, **bounds))


def number(domain):
    """An argparse type: a number of a Domain."""

    def convert(text):
        try:
            return domain.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def stage(text):
    """An argparse type: a stage, or a tuple of the one inside groups and the one between them."""
    numbers = [one.strip() for one in text.split(",")]
    if len(numbers) > 2 or not set(numbers) <= {"0", "1", "2", "3"}:
        raise argparse.ArgumentTypeError(f"expected 0, 1, 2 or 3, or INSIDE,OUTSIDE; got {text}")
    return int(text) if len(numbers) == 1 else tuple(map(int, numbers))


def group(text):
    """An argparse type: ranks per group, or "node"."""
    try:
        return text if text == "node" else Domain(1, whole=True).parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, or node; got {text}"
        ) from None


class FileName(str):
    """A path. It may differ between ranks, as nodes may have their own."""


def file_name(text):
    """An argparse type: a FileName; an empty one (an unset shell variable, say) is an error."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return FileName(text)


def auto_or(domain):
    """An argparse type: "auto", or a number of a Domain."""
    convert = number(domain)
    return lambda text: text if text == "auto" else convert(text)


def check_files(outputs, others):
    """Raise ValueError if a file of {flag: path} has no folder, or is another flag's too.

    Opens nothing. `others`: paths that are read, or are folders. None: not given.
    """
    flags = {}
    for flag, path in {**others, **outputs}.items():
        if path is not None and (
            os.path.isfile(path) or os.path.isdir(path) or not os.path.exists(path)
        ):
            other = flags.setdefault(os.path.realpath(path), flag)
            if other != flag and flag in outputs:  # one file may be read for two flags
                raise ValueError(f"{flag}: {path} is also the file of {other}")
    for flag, path in outputs.items():
        if path is not None:
            _check_folder(flag, path)


def _check_folder(flag, path):
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder):
        fault = "is a directory" if os.path.isdir(path) else f"its folder {folder} is missing"
        raise ValueError(f"{flag}: expected a file, got {path} ({fault})")


@contextmanager
def named_as_flags():
    """Turn a ValueError of the library, 'heads: ...', into the command's, '--heads: ...'."""
    try:
        yield
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        raise ValueError(f"--{name.replace('_', '-')}{colon}{rest}") from None


@contextmanager
def alone(command):
    """Run a command that needs no MPI: print --help's text, or an error line, and set the status.

    Under a launcher, one process runs it; the others exit.
    """
    if launched_rank(os.environ):
        raise SystemExit(0)
    forgiving_output()
    try:
        try:
            yield
        except HelpText as text:
            print(text, end="")
        check_printed()
    except KeyboardInterrupt:
        print(f"{command}: ended by SIGINT", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    except (UsageError, ValueError, OSError, MemoryError) as error:
        fault = f"memory: {error}" if isinstance(error, MemoryError) else error
        print(f"{command}: error: {one_line(fault)}", file=sys.stderr, flush=True)
        raise SystemExit(UsageError.status) from None
