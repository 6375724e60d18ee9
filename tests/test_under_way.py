"""A script whose steps end with gathers under way keeps its memory, and ends with status 0.

The campaign, by hand: tests/faults/under_way.py, 100 rounds.
"""

from pathlib import Path

import pytest
from mpirun import run_world

SCRIPT = Path(__file__).parent / "faults" / "under_way.py"


@pytest.mark.parametrize("late", [[], [1]], ids=["all ranks alike", "one rank a gather behind"])
def test_what_a_step_left_under_way_touches_nothing_and_blocks_nobody(late):
    """MALLOC_PERTURB_ fills what is freed: whoever used it would find that, not its numbers."""
    ended = run_world(3, [SCRIPT, 10, *late], timeout=60, MALLOC_PERTURB_="165")
    assert (ended.status, ended.left) == (0, []), ended.output
    assert [ended.output.count(f"rank {rank}: as promised") for rank in (0, 1, 2)] == [1, 1, 1]
