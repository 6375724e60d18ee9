"""Under mpirun: `save DIR PRECISION` at one number of ranks, `resume DIR PRECISION` at another.

The global batch is 12 micro-batches of 2 sequences, at every number of ranks that divides 12.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent / "world")]
from training import adamw, gpt, share  # noqa: E402

from zmpi import Policy, World, ZeRO  # noqa: E402

MICRO_BATCHES, SAVED_AFTER, MORE = 12, 6, 4


def engine(world, stage, precision):
    return ZeRO(
        gpt(), world, stage, adamw(decay_steps=10), policy=Policy(precision, loss_scale_window=4)
    )


def losses(zero, count):
    accumulate = MICRO_BATCHES // zero.world.size
    return [
        zero.train_step(share(zero.model, zero.step + 1, zero.world, accumulate))
        for _ in range(count)
    ]


def by_name(zero):
    """{full name and vector: array} of the whole training state, without padding."""
    found = {}
    for unit in zero.units.values():
        for vector, shard in unit.shards().items():
            whole = np.concatenate(zero.world.share(shard))
            found |= {
                f"{unit.layout.prefix}{name} {vector}": view
                for name, view in unit.layout.views(whole).items()
            }
    return found


def save(world, folder, precision):
    zero = engine(world, 2, precision)
    losses(zero, SAVED_AFTER)
    zero.save(folder / "saved")
    before = by_name(zero)
    after = losses(zero, MORE)
    if world.rank == 0:
        np.savez(folder / "state.npz", **before)
        (folder / "losses.json").write_text(json.dumps(after))


def resume(world, folder, precision):
    expected, state = (
        json.loads((folder / "losses.json").read_text()),
        np.load(folder / "state.npz"),
    )
    for stage in (0, 1, 2, 3):
        for reduction in ("ordered", "mpi") if precision == "float32" else ("ordered",):
            zero = engine(world.twin(reduction=reduction), stage, precision)
            zero.load(folder / "saved")
            found = by_name(zero)
            assert found.keys() == set(state.files)
            for name, array in found.items():
                assert (
                    array.shape == state[name].shape and array.tobytes() == state[name].tobytes()
                ), (stage, name)
            more = losses(zero, MORE)
            same = more == expected
            worst = max(abs(a - b) / b for a, b in zip(more, expected, strict=True))
            assert same if reduction == "ordered" else worst < 1e-5, (
                stage,
                reduction,
                more,
                expected,
            )
            if world.rank == 0:
                figure = "the same bits" if same else f"within {worst:.1e}"
                told = f"{len(found)} vectors equal by name, the next {MORE} losses {figure}"
                print(
                    f"{world.size} ranks, stage {stage}, {precision}, {reduction}: {told}",
                    flush=True,
                )


if __name__ == "__main__":
    what, where, precision = sys.argv[1:]
    {"save": save, "resume": resume}[what](
        World(device="cpu", reduction="ordered", timeout=60), Path(where), precision
    )
