"""The trace as text; what its events are is tested in worlds (world/test_trace.py)."""

import re

from zmpi.cost.trace import as_text


def test_the_columns_of_a_text_never_run_together():
    """However long a name or a figure is: here a long name, very many elements, and minutes."""
    step = {"step": 1, "verb": "step", "name": "1", "start": 0.0, "end": 600.0}
    reduce = {"verb": "reduce", "name": "a_layer_with_a_long_name.12", "blocked_s": 123.4}
    reduce |= {"step": 1, "start": 100.0, "end": 300.0, "elements": 123_456_789_012}
    lines = as_text([[step, reduce], [step]]).splitlines()
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert re.split(" {2,}", lines[2]) == [
        "rank 0",
        "reduce a_layer_with_a_long_name.12",
        "123,456,789,012 elements over 2 ranks, 123400.00 ms blocked",
        "at 100000.00 ms",
        "for 200000.00 ms",
    ]
