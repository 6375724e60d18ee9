"""Command lines that keep the contract: one line of error, no abbreviations, a default and a unit in every help text."""

import argparse
import sys
from contextlib import contextmanager
from math import isfinite

from zmpi import __version__
from zmpi.manners.guard import UsageError


class Told(Exception):
    """What --help or --version prints. Every rank is asked, one is to answer."""


class Parser(argparse.ArgumentParser):
    """An argument parser that neither prints nor exits: it raises UsageError, or Told."""

    def __init__(self, command, description):
        super().__init__(prog=command, description=description, allow_abbrev=False, formatter_class=_Help)
        self.add_argument("--version", action="version", version=f"zmpi {__version__}", help="print the version and end")
        self._said = ""

    def given(self, argv=None):
        """{name: value} of the flags that a command line sets, without those left at their defaults. Spends the parser."""
        for action in self._actions:
            action.default = argparse.SUPPRESS
        return vars(self.parse_args(argv))

    def error(self, message):
        unknown = message.partition("unrecognized arguments: ")[2]
        raise UsageError(f"{unknown.split()[0]}: no such flag" if unknown else message.removeprefix("argument "))

    def _print_message(self, message, file=None):
        self._said += message

    def exit(self, status=0, message=None):
        raise Told(self._said)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default for every flag that has one; switches are off by default and say so."""

    def _get_help_string(self, action):
        if action.default is argparse.SUPPRESS or "default:" in (action.help or ""):
            return action.help
        if action.nargs == 0:
            return f"{action.help} (default: off)"
        return super()._get_help_string(action)


def whole(lowest):
    """An argparse type: a whole number of at least `lowest`."""
    return _number(int, "whole number", lowest)


def real(lowest, above=False):
    """An argparse type: a finite number of at least (or above) `lowest`."""
    return _number(float, "finite number", lowest, above)


def auto_or_real(lowest):
    """An argparse type: "auto", or a finite number of at least `lowest`."""
    convert = real(lowest)
    return lambda text: text if text == "auto" else convert(text)


def _number(kind, name, lowest, above=False):
    bound = f"{name} {'above' if above else 'of at least'} {lowest}"

    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a {bound}, got {text!r}") from None
        if not isfinite(value) or value < lowest or (above and value == lowest):
            raise argparse.ArgumentTypeError(f"expected a {bound}, got {text}")
        return value

    return convert


@contextmanager
def named_as_flags():
    """A ValueError of the library, 'heads: ...', becomes the command's, '--heads: ...'."""
    try:
        yield
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        raise ValueError(f"--{name.replace('_', '-')}{colon}{rest}") from None


@contextmanager
def alone(command):
    """For a command that runs where no MPI is: prints what --help tells, or one line of error, and ends with its status."""
    try:
        yield
    except Told as told:
        print(told, end="", flush=True)
    except (UsageError, ValueError, OSError) as error:
        print(f"{command}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(UsageError.status) from None
