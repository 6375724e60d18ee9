"""Schemas for JSON files, as data: a checkpoint may be damaged or malicious, and is never trusted.

A schema is a Rule; a list [schema] for an array of any length; or a dictionary {key: schema} for an
object, which may have other keys. A key ending in "?" is optional.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

LARGEST = (1 << 53) - 1  # integers up to here are exact in every JSON reader


@dataclass(frozen=True)
class Rule:
    """A condition on a value, and its description for errors."""

    expected: str
    holds: Callable


def whole_number(lowest=0, highest=LARGEST):
    """A whole number within bounds."""
    words = f"a whole number from {lowest} to {highest}"
    return Rule(words, lambda value: type(value) is int and lowest <= value <= highest)


def or_null(rule):
    """A value that the rule allows, or null."""
    return Rule(f"{rule.expected}, or null", lambda value: value is None or rule.holds(value))


def one_of(*values):
    """One of a few strings."""
    words = f"one of {', '.join(values)}"
    return Rule(words, lambda value: isinstance(value, str) and value in values)


def _is_number(value):
    return type(value) in (int, float) and abs(value) < 1e300 and isfinite(value)


def _is_text(value):
    return isinstance(value, str) and len(value) <= 4096 and (value.isprintable() or not value)


def _is_file_name(value):
    return _is_text(value) and "/" not in value and "\\" not in value and value.strip(".") != ""


NUMBER = Rule("a finite number", _is_number)
TEXT = Rule("a printable string of at most 4096 characters", _is_text)
FILE_NAME = Rule("a file's name without a folder", _is_file_name)
SCALAR = Rule(
    "a number, a printable string, true, false or null",
    lambda value: value is None or type(value) is bool or _is_number(value) or _is_text(value),
)


def check(value, schema, where):
    """Raise ValueError, starting with `where` and the field, for the first broken rule."""
    if isinstance(schema, Rule):
        if not schema.holds(value):
            raise ValueError(f"{where}: expected {schema.expected}, got {shown(value)}")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected an array, got {shown(value)}")
        for number, item in enumerate(value):
            check(item, schema[0], f"{where}[{number}]")
    else:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object, got {shown(value)}")
        for key, rule in schema.items():
            name = key.removesuffix("?")
            if name in value:
                check(value[name], rule, f"{where}: {name}")
            elif key == name:
                raise ValueError(f"{where}: {name} is missing")


def shown(value):
    """A value in at most 60 safe characters, for an error line."""
    if isinstance(value, (list, dict)):
        return "an array" if isinstance(value, list) else "an object"
    words = ascii(value) if not isinstance(value, int) or abs(value) <= 1 << 128 else "a larger one"
    return words if len(words) <= 60 else f"{words[:57]}..."
