"""What zmpi.verify prints, as a command; its checks are tested in world/test_verify.py."""

from mpirun import ROOT, run_world


def test_one_ranks_error_is_one_line_and_the_others_do_not_wait_for_ever():
    planted = ROOT / "tests" / "faults" / "planted.py"
    world = run_world(3, [planted, "--planted", "one rank raises alone"], timeout=60)
    lines = [line for line in world.output.splitlines() if line.startswith("zmpi: ")]
    assert world.status == 1 and not world.left
    assert len(lines) == 1 and lines[0].startswith("zmpi: rank 1: "), world.output
    assert "TypeError in planted.py" in lines[0]
    assert "Traceback" not in world.output


def test_a_tolerance_above_a_tenth_is_refused():
    world = run_world(2, ["-m", "zmpi.verify", "--tolerance", "0.2"], timeout=60)
    line = "zmpi.verify: error: --tolerance: expected at most 0.1, got 0.2"
    assert (world.status, world.output.splitlines()[:1]) == (2, [line])
