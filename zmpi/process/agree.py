"""What ranks agree on: that nothing went wrong on any of them, and that all were given the same. Collective."""

import hashlib
from contextlib import contextmanager
from dataclasses import is_dataclass
from numbers import Number

from zmpi.process.errors import UsageError

LONG = 200  # characters that one can compare by eye


@contextmanager
def agreed(world):
    """What goes wrong inside on any rank is one error on all: ValueError, OSError and MemoryError become UsageError."""
    problem = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = str(error)
    except MemoryError as error:
        problem = f"memory: {error}"
    problems = world.share(problem)
    found = [(rank, text) for rank, text in enumerate(problems) if text is not None]
    if found:
        rank, text = found[0]
        raise UsageError(text if len(found) == world.size else f"{text} (on rank {rank})")


def same_on_all_ranks(world, settings):
    """Raise UsageError on all ranks for the first of the {name: setting} that is not the same on all."""
    mine = {name: _told(setting) for name, setting in settings.items()}
    everyone = world.share(mine)
    for name, told in everyone[0].items():
        for rank, others in enumerate(everyone):
            if others[name] != told:
                raise UsageError(
                    f"{name}: {told} on rank 0, {others[name]} on rank {rank}: all ranks need the same"
                )


def _told(setting):
    """A setting in words that are the same for the same setting; a long one by its checksum."""
    plain = isinstance(setting, (Number, str, dict)) or is_dataclass(setting)
    words = str(setting) if plain else type(setting).__name__
    return (
        words
        if len(words) <= LONG
        else f"one of SHA-256 {hashlib.sha256(words.encode()).hexdigest()[:12]}"
    )
