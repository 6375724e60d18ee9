"""Agreement between ranks: an error on one is an error on all, settings are equal. Collective."""

import hashlib
from contextlib import contextmanager
from dataclasses import is_dataclass
from numbers import Number

from zmpi.process.errors import UsageError

LONG = 200  # characters; a longer setting is shown by its checksum


@contextmanager
def agreed(world):
    """Turn a ValueError, OSError or MemoryError inside, on any rank, into a UsageError on all."""
    problem = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = str(error)
    except MemoryError as error:
        problem = f"memory: {error}"
    problems = world.share(problem)
    found = [(world.launched[rank], text) for rank, text in enumerate(problems) if text is not None]
    if found:
        rank, text = found[0]
        raise UsageError(text if len(found) == world.size else f"{text} (on rank {rank})")


def same_on_all_ranks(world, settings):
    """Raise UsageError on all ranks for the first of {name: setting} that differs between ranks."""
    mine = {name: _shown(setting) for name, setting in settings.items()}
    everyone = world.share(mine)
    for name, first in everyone[0].items():
        for rank, others in enumerate(everyone):
            if others[name] != first:
                raise UsageError(
                    f"{name}: expected the same on all ranks, got {first} on rank 0 and "
                    f"{others[name]} on rank {world.launched[rank]}"
                )


def _shown(setting):
    """A setting as text, equal for equal settings; a long one as its checksum."""
    plain = isinstance(setting, (Number, str, dict)) or is_dataclass(setting)
    words = str(setting) if plain else type(setting).__name__
    if len(words) <= LONG:
        return words
    return f"one with SHA-256 {hashlib.sha256(words.encode()).hexdigest()[:12]}"
