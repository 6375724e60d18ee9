"""The numbers that a setting accepts: never a bool, NaN or infinity."""

from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral, Real

import numpy as np

SIZE_BOUND = 1 << 31  # sizes of models and batches are below this


@dataclass(frozen=True)
class Domain:
    """All finite numbers from `lowest` to `highest` (or below `below`); `whole`: integers only."""

    lowest: float = 0
    highest: float = inf
    below: float = inf
    whole: bool = False
    above: bool = False  # exclude `lowest` itself
    words: str = ""  # what errors say was expected, instead of the bounds

    def of(self, name, value):
        """The value, of any number type, as an int or float; ValueError naming the setting."""
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            raise ValueError(f"{name}: expected {self}, got {value!r}")
        try:
            number = int(value) if self.whole else float(value)
        except OverflowError:  # an integer too large for a float
            number = inf
        if not self.has(number):
            raise ValueError(f"{name}: expected {self.described(number)}, got {value}")
        return number

    def fits(self, value):
        """Whether `of` would accept the value."""
        try:
            return self.of("", value) is not None
        except ValueError:
            return False

    def parse(self, text):
        """The number in a text; ValueError, to which the caller adds the setting's name."""
        try:
            number = int(text) if self.whole else float(text)
        except ValueError:
            raise ValueError(f"expected {self}, got {text!r}") from None
        if not self.has(number):
            raise ValueError(f"expected {self.described(number)}, got {text}")
        return number

    def has(self, number):
        """Whether the number is in the domain."""
        finite = self.whole or isfinite(number)
        low = number > self.lowest if self.above else number >= self.lowest
        return finite and low and number <= self.highest and number < self.below

    def described(self, number):
        """The domain in words, with its upper bound if the number is beyond it."""
        if self.words:
            return self.words
        if self.below <= number < inf:
            return f"{self} and below {self.below}"
        if self.highest < number < inf:
            return f"{self} and at most {self.highest}"
        return str(self)

    def __str__(self):
        if self.words:
            return self.words
        name = "whole number" if self.whole else "finite number"
        if self.lowest == -inf:
            return f"a {name}"
        return f"a {name} {'above' if self.above else 'of at least'} {self.lowest}"


def switch(name, value):
    """The value as a bool; ValueError naming the setting if it is not one."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}: expected True or False, got {value!r}")
    return bool(value)
