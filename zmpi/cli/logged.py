"""Reads a log of zmpi.train: its header, and the numbers of every step.

A log may be damaged, or anyone's: every field used is checked, and nothing in it is run.
"""

from dataclasses import dataclass, field

from zmpi.process.files import open_file, parse_json
from zmpi.saving.rules import NUMBER, SCALAR, Rule, check, or_null, whole_number

LINE_BYTES = 1 << 24  # bytes of one line, at most: 100,000 ranks take about 6 MB
STEP_RULES = {
    "loss": or_null(NUMBER),
    "grad_norm": or_null(NUMBER),
    "lr?": NUMBER,
    "tokens?": whole_number(),
}
STEP_RULES |= {"loss_scale?": NUMBER, "skipped?": whole_number(0, 1)}
EVALUATION_RULES = {"val_loss": or_null(NUMBER)}
STRING = Rule("a string", lambda value: isinstance(value, str))
HEADER_RULES = {"argv": [STRING], "size": whole_number(1), "stage": SCALAR, "reduction": SCALAR}
HEADER_RULES |= {"micro_batch": whole_number(1), "accumulate": whole_number(1)}


@dataclass
class Logged:
    """A log's content. `numbers`: {name: {step: number}}, with None for numbers not finite.

    `header`: None if the log has none (it was rotated); `end`: how the run ended, None if unknown.
    """

    path: str
    header: dict | None = None
    numbers: dict = field(default_factory=dict)
    end: str | None = None

    @property
    def steps(self):
        """The logged steps, in order."""
        return sorted(self.numbers.get("loss", ()))

    def add(self, entry, where):
        """Add one entry; ValueError, starting with `where`, for a wrong field."""
        if "unit_sizes" in entry:
            check(entry, HEADER_RULES, where)
            self.header = self.header or entry
            return
        check(entry, {"step": whole_number()}, where)
        for mark, schema in (("loss", STEP_RULES), ("val_loss", EVALUATION_RULES)):
            if mark in entry:
                check(entry, schema, where)
                for name in (key.removesuffix("?") for key in schema):
                    if name in entry:
                        self.numbers.setdefault(name, {})[entry["step"]] = entry[name]
        if "end" in entry:
            check(entry, {"end": STRING}, where)
        self.end = entry.get("end")  # of a resumed run, the last one counts


def read_log(path):
    """The Logged of a file, without a truncated last line (of a killed run).

    Raises ValueError, naming the file and the line, for anything that zmpi.train does not write.
    """
    found = Logged(path)
    with open_file(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), 1):
            where = f"{path}: line {number}"
            if len(line) > LINE_BYTES:
                raise ValueError(
                    f"{where}: expected at most {LINE_BYTES:,} bytes: not a log of zmpi.train"
                )
            if not line.endswith(b"\n"):
                break
            entry = parse_json(line, where)
            if not isinstance(entry, dict):
                raise ValueError(f"{where}: expected an object: not a log of zmpi.train")
            found.add(entry, where)
    if found.header is None and not found.numbers:
        raise ValueError(f"{path}: expected a log of zmpi.train, got none of its entries")
    return found
