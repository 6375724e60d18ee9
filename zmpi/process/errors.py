"""The errors on which all ranks agree."""


class Agreed(Exception):
    """An error which all ranks raise together: rank 0 prints one line, no traceback, and all exit with `status`."""

    status = 1


class UsageError(Agreed):
    """Something was asked for that cannot be done."""

    status = 2


def one_line(text) -> str:
    """A message as it is printed: its lines joined, and "?" for what a terminal would obey (a file may have put it there)."""
    line = " ".join(str(text).splitlines())
    return "".join(character if character.isprintable() else "?" for character in line)
