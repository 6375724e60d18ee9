"""The guard among living ranks: it must cost nothing where nothing is wrong."""

import time


def test_every_world_shares_the_guard_of_its_process(world):
    from zmpi import World

    again = World(device="cpu", timeout=50)
    assert again.guard is world.guard
    assert again.guard.timeout == 50


def test_a_wait_is_counted_and_its_name_kept(world, comm):
    count = world.guard._state[0]
    with world.guard.waiting("barrier"):
        comm.Barrier()
    assert world.guard._state == (count + 1, "barrier", 0.0)


def test_entering_a_wait_costs_less_than_two_microseconds(world, comm):
    """0.3 µs on a quiet core. The best of many short rounds: other ranks share the cores."""
    best = 1.0
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(100):
            with world.guard.waiting("nothing"):
                pass
        best = min(best, (time.perf_counter() - began) / 100)
    assert best < 2e-6


def test_the_thread_costs_no_measurable_time(world, comm):
    """It looks at the communicator ten times a second; 1 % of a core is far above what that takes, and would show."""
    comm.Barrier()
    began = time.process_time()
    time.sleep(1.5)
    assert time.process_time() - began < 0.015
