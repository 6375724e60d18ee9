"""The three shapes, and what is measured of each. Only numbers: the driver imports no framework."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A GPT-2, the sequences per rank of its micro-batch, and how its steps are timed."""

    layers: int
    width: int
    heads: int
    context: int
    vocab: int
    micro_batch: int
    turn: int  # steps in a row of one contender, before the next one's turn
    rounds: int  # turns of each contender that are counted

    @property
    def tokens(self):
        """Tokens of a rank in one step."""
        return self.micro_batch * self.context


SHAPES = {
    "tiny": Shape(2, 48, 4, 24, 300, 2, turn=2, rounds=2),  # to try the benchmarks themselves
    "S": Shape(4, 256, 4, 128, 256, 8, turn=5, rounds=12),
    "M": Shape(6, 512, 8, 256, 8192, 4, turn=2, rounds=12),
    "L": Shape(12, 768, 12, 256, 50257, 1, turn=1, rounds=20),
}


def shape_of(text):
    """The Shape that "S" names, or "S,width=512": one of the three with some sizes changed."""
    name, *changes = text.split(",")
    return replace(
        SHAPES[name],
        **{key: int(value) for key, value in (change.split("=") for change in changes)},
    )
