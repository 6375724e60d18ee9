"""Errors that every rank raises together."""


class Agreed(Exception):
    """An error on all ranks: rank 0 prints one line, no traceback, and all exit with `status`."""

    status = 1


class UsageError(Agreed):
    """The user asked for something that cannot be done."""

    status = 2


def one_line(text) -> str:
    """The message on one line, with "?" for control characters (a file may have put them there)."""
    line = " ".join(str(text).splitlines())
    return "".join(character if character.isprintable() else "?" for character in line)
