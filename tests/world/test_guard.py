"""The guard among living ranks: it must cost next to nothing where nothing is wrong."""

import itertools
import sys
import time

import pytest

from zmpi.process.guard import POLL


def test_every_world_shares_the_guard_of_its_process(world):
    from zmpi import World

    again = World(device="cpu", timeout=50)
    assert again.guard is world.guard
    assert again.guard.timeout == 50


def test_a_wait_is_counted_and_its_name_kept(world, comm):
    count = world.guard._state[0]
    with world.guard.waiting("barrier"):
        comm.Barrier()
    assert world.guard._state == (count + 1, "barrier", None)


def test_entering_a_wait_makes_two_calls(world, comm):
    """It surrounds every collective: just `with`, no clock, lock, message or system call."""
    calls = []

    def count(frame, event, function):
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(function.__name__)

    sys.setprofile(count)
    with world.guard.waiting("nothing"):
        pass
    sys.setprofile(None)
    assert calls == ["waiting", "__enter__", "__exit__", "setprofile"]


def test_the_thread_looks_ten_times_a_second_and_no_more(world, comm, monkeypatch):
    """Less often on a busy machine, never more: a polling thread would take a core."""
    looks = []
    judge = world.guard._judge
    monkeypatch.setattr(world.guard, "_judge", lambda: (looks.append(time.monotonic()), judge()))
    comm.Barrier()
    time.sleep(15 * POLL)
    monkeypatch.undo()
    gaps = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert bool(gaps) == (world.size > 1)  # a world of one has no such thread
    assert all(gap > 0.99 * POLL for gap in gaps)


def test_requests_of_the_guard_are_kept_until_they_are_complete_and_no_longer(world, comm):
    if world.size == 1:
        pytest.skip("a world of one sends nothing")
    messages = world.guard._messages
    for _ in range(20):
        assert len(messages.ask_all(10)) == world.size
    comm.Barrier()
    messages.finish()
    assert messages._sent == []
    for _ in range(20):
        messages.ask_all(10)
    assert len(messages._sent) < 20
