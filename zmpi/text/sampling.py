"""One token after the other: what a prediction sees, and what is drawn from it. No MPI in here."""

from dataclasses import dataclass

import numpy as np

from models import GPT
from models.cached import Cache


@dataclass(frozen=True)
class Draws:
    """How tokens are drawn: at temperature 0 always the likeliest; `top_k` 0 draws from all."""

    tokens: int = 100  # at most
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0


def generate(zero, tokens, draws, coding, closed):
    """Yields draws.tokens tokens, one by one and the same on every rank: rank 0's draws.

    Tokens are drawn from coding.ids (None: from all). One of coding.ends ends the loop early and is not yielded; so does
    closed() on rank 0, on all ranks.
    """
    ids = np.arange(zero.model.vocab) if coding.ids is None else coding.ids
    ids = ids[ids < zero.model.vocab]
    tokens, cache, device = list(tokens), None, zero.world.device
    for position in range(draws.tokens):
        if isinstance(zero.model, GPT) and cache and cache.length < zero.model.context:
            logits_BV = cache.predict(device.put(_window(tokens[-1:])), zero.forward)
        else:
            window, cache = device.put(_window(tokens[-zero.model.context :])), Cache(zero.model)
            logits_BV = (
                cache.predict(window, zero.forward)
                if isinstance(zero.model, GPT)
                else zero.forward(window)
            )
        mine = ids[draw(device.get(logits_BV)[0, ids], draws, position)]
        token, ended = zero.comm.gather_scalars([mine, closed()])[0]
        if ended or int(token) in coding.ends:
            return
        tokens.append(int(token))
        yield tokens[-1]


def draw(logits_V, draws, position):
    """A token from its logits: the likeliest at temperature 0; else drawn, as a function of (seed, position) alone."""
    if not draws.temperature:
        return int(np.argmax(logits_V))
    with np.errstate(
        over="ignore"
    ):  # far below the likeliest, at a temperature near 0: minus infinity is right
        scaled_V = (logits_V - logits_V.max()).astype(np.float64) / draws.temperature
    if draws.top_k and draws.top_k < len(scaled_V):
        scaled_V[scaled_V < np.partition(scaled_V, -draws.top_k)[-draws.top_k]] = -np.inf
    share_V = np.cumsum(np.exp(scaled_V))
    number = np.random.Generator(
        np.random.Philox(key=draws.seed, counter=[position, 0, 0, 0])
    ).random()
    return int(np.searchsorted(share_V, number * share_V[-1], side="right"))


def _window(tokens):
    return np.array([tokens], np.int64)
