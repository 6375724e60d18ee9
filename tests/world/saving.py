"""Shared by the tests of checkpoints: an engine, its steps as numbers, and all its state."""

from training import adamw, gpt, share

from zmpi import Policy, ZeRO


def engine(world, stage=3, precision="float32", model=None, optimizer=None):
    """An engine whose loss scale, if any, doubles every 3 good steps, so that its state matters."""
    optimizer = optimizer or adamw(decay_steps=10)
    return ZeRO(
        model or gpt(), world, stage, optimizer, policy=Policy(precision, loss_scale_window=3)
    )


def steps(zero, first, last, accumulate=1):
    """The losses, norms and scales of steps first ... last."""
    numbers = []
    for step in range(first, last + 1):
        loss = zero.train_step(share(zero.model, step, zero.world, accumulate))
        numbers.append((loss.hex(), zero.last.grad_norm.hex(), zero.last.loss_scale, zero.updates))
    return numbers


def state(zero):
    """Everything that an engine carries from step to step, as bytes: of this rank."""
    found = {}
    for name, unit in zero.units.items():
        kinds = {"parameters": unit.parameters, "master": unit.master, **unit.moments}
        vectors = {kind: owned.stored for kind, owned in kinds.items()}
        found |= {(name, kind): vector.tobytes() for kind, vector in vectors.items()}
    return found | {
        "counts": (zero.step, zero.updates, zero.scaler.scale, zero.scaler.good_steps, zero.seed)
    }
