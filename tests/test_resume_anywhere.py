"""B09: saved at 4 ranks, stage 2; resumed at other sizes and stages: same state, same losses."""

from pathlib import Path

import pytest
from mpirun import run_world

DRIVER = Path(__file__).parent / "resuming.py"


@pytest.mark.parametrize(
    ("precision", "cases", "sizes"), [("float32", 8, (1, 2, 3, 6)), ("float16", 4, (3,))]
)
def test_saved_at_four_ranks_resumed_at_any(tmp_path, precision, cases, sizes):
    saved = run_world(4, [DRIVER, "save", tmp_path, precision], timeout=60)
    assert saved.status == 0, saved.output
    for size in sizes:
        resumed = run_world(size, [DRIVER, "resume", tmp_path, precision], timeout=60)
        assert resumed.status == 0 and resumed.output.count("equal by name") == cases, (
            resumed.output
        )
        assert resumed.output.count("the same bits") >= 4, resumed.output
        print(resumed.output)
