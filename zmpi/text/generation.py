"""Text generation: from a prompt's tokens to new tokens, and their text as it grows.

    coding.encode(prompt)  ->  next_tokens(...), each by `draw`  ->  Voice.say(token)

A coding is Bytes, Ids or Words (a tokenizer.json). `ids`: its tokens that have a text (None: all of
the model's); `ends`: the tokens that end one.
"""

import codecs
import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from models import GPT
from models.cached import Cache
from zmpi.text.formats import refuse_irregular

# Tokenizers' names for the end of a text or of a turn.
ENDS = (
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_turn>",
)
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a character with bytes missing decodes to this
PENDING = 8  # tokens that may wait for the rest of a character, which has at most 4 bytes


# ---- one token after the other -------------------------------------------------------------------


@dataclass(frozen=True)
class Draws:
    """How tokens are drawn: temperature 0 takes the likeliest; `top_k` 0 draws from all."""

    tokens: int = 100  # at most
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0


def next_tokens(zero, tokens, draws, coding, closed):
    """Yield up to draws.tokens tokens, the same on every rank: rank 0's draws.

    Draws from coding.ids (None: all). Stops at one of coding.ends, which is not yielded, or when
    closed() is true on rank 0. Collective.
    """
    ids = np.arange(zero.model.vocab) if coding.ids is None else coding.ids
    ids = ids[ids < zero.model.vocab]
    tokens, cache, device = list(tokens), None, zero.world.device
    for position in range(draws.tokens):
        if isinstance(zero.model, GPT) and cache and cache.length < zero.model.context:
            logits_BV = cache.predict(device.put(_window(tokens[-1:])), zero.forward)
        else:
            window, cache = device.put(_window(tokens[-zero.model.context :])), Cache(zero.model)
            cached = isinstance(zero.model, GPT)
            logits_BV = cache.predict(window, zero.forward) if cached else zero.forward(window)
        mine = ids[draw(device.get(logits_BV)[0, ids], draws, position)]
        token, ended = zero.comm.gather_scalars([mine, closed()])[0]
        if ended or int(token) in coding.ends:
            return
        tokens.append(int(token))
        yield tokens[-1]


def draw(logits_V, draws, position):
    """A token from its logits: the likeliest at temperature 0, else drawn by (seed, position)."""
    if not draws.temperature:
        return int(np.argmax(logits_V))
    with np.errstate(over="ignore"):  # at a temperature near 0, unlikely tokens become -inf
        scaled_V = (logits_V - logits_V.max()).astype(np.float64) / draws.temperature
    if draws.top_k and draws.top_k < len(scaled_V):
        scaled_V[scaled_V < np.partition(scaled_V, -draws.top_k)[-draws.top_k]] = -np.inf
    share_V = np.cumsum(np.exp(scaled_V))
    random = np.random.Generator(np.random.Philox(key=draws.seed, counter=[position, 0, 0, 0]))
    return int(np.searchsorted(share_V, random.random() * share_V[-1], side="right"))


def _window(tokens):
    return np.array([tokens], np.int64)


# ---- text as tokens, tokens as text --------------------------------------------------------------


class Bytes:
    """Tokens are bytes."""

    ids, ends = np.arange(256), ()

    def encode(self, prompt):
        return list(prompt.encode(errors="surrogateescape"))

    def decoder(self):
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return self

    def add(self, token):
        return self._utf8.decode(bytes([token]))

    def rest(self):
        return self._utf8.decode(b"", final=True)


class Ids:
    """Tokens are written as numbers, separated by commas."""

    ids = None  # all of the model's

    def __init__(self, ends=()):
        self.ends = ends

    def encode(self, prompt):
        return prompt

    def decoder(self):
        self._before = ""
        return self

    def add(self, token):
        before, self._before = self._before, ","
        return f"{before}{token}"

    def rest(self):
        return ""


class Words:
    """Tokens of a tokenizer.json, without its truncation, padding and dropout.

    Raises a one-line ValueError if the package fails on the file, a prompt or tokens.
    """

    def __init__(self, path):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(
                "--tokenizer: needs the package tokenizers (pip install tokenizers)"
            ) from None
        refuse_irregular("--tokenizer", path)
        self._path = path
        with _failing_in_one_line(f"--tokenizer: {path}: not a tokenizer.json"):
            self._tokenizer = Tokenizer.from_file(str(path))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            if hasattr(self._tokenizer.model, "dropout"):  # it would differ between ranks
                self._tokenizer.model.dropout = None
            self.ids = np.array(sorted(set(self._tokenizer.get_vocab().values())), np.int64)
            added = self._tokenizer.get_added_tokens_decoder().items()
        self.ends = tuple(number for number, token in added if token.content in ENDS)
        if not len(self.ids):
            raise ValueError(f"--tokenizer: {path}: its vocabulary is empty")

    def encode(self, prompt):
        """The prompt's tokens, without those that the tokenizer appends (end, separator)."""
        with _failing_in_one_line(f"--tokenizer: {self._path} cannot encode the prompt"):
            prompt.encode()  # fails on surrogates: bytes that were not UTF-8
            found = self._tokenizer.encode(prompt)
            tokens, added = found.ids, found.special_tokens_mask
        while tokens and added[len(tokens) - 1]:
            tokens = tokens[:-1]
        return tokens

    def decoder(self):
        return Growing(self._decode)

    def _decode(self, tokens):
        with _failing_in_one_line(f"--tokenizer: {self._path} cannot decode tokens {tokens}"):
            return self._tokenizer.decode(tokens)


@contextmanager
def _failing_in_one_line(what):
    """Turn whatever the package raises (BaseException if its Rust panics) into a ValueError.

    A panic also writes a backtrace to stderr, below Python: it is discarded.
    """
    kept = None
    with suppress(OSError):  # stderr may be closed
        kept = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from None
    finally:
        if kept is not None:
            os.dup2(kept, 2)
            os.close(kept)


# ---- text as it grows ----------------------------------------------------------------------------


class Growing:
    """The growing text of tokens. Each call decodes only the last few, so the work is linear.

    decode(tokens) returns their whole text. Printed tokens stay as context for the next ones: a
    decoder may treat the first token of a text differently.
    """

    def __init__(self, decode):
        self._decode = decode
        self._tokens, self._out, self._said = [], 0, ""  # `_said`: the text of `_out` tokens

    def add(self, token):
        """The text that this token adds; none while a character is incomplete."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(INCOMPLETE) or len(text) <= len(self._said):
            return self._let_go(text)
        grown = text[len(self._said) :]
        del self._tokens[: self._out]
        self._out, self._said = len(self._tokens), self._decode(self._tokens)
        return grown

    def rest(self):
        """The text left after the last token."""
        return self._decode(self._tokens)[len(self._said) :]

    def _let_go(self, text):
        """If too many tokens wait (broken characters, tokens without text), release the first ones.

        They go if the rest decodes the same without them; at least 4 stay, a whole character.
        """
        waiting = len(self._tokens) - self._out
        for stay in range(4, PENDING) if waiting > PENDING else ():
            first, last = self._tokens[:-stay], self._tokens[-stay:]
            grown = self._decode(first)[len(self._said) :]
            others = self._tokens[: self._out] + last
            if self._said + grown + self._decode(others)[len(self._said) :] == text:
                self._tokens = others
                return grown
        return ""


class Voice:
    """Prints tokens as text as they come. `closed`: the pipe was closed, or decoding failed."""

    def __init__(self, coding, prompt, silent):
        self._text, self._silent, self.closed = coding.decoder(), silent, False
        self._fault = None
        for token in prompt:
            self._write(self._text.add(token))

    def say(self, token):
        """Print the text that this token completes."""
        try:
            self._write(self._text.add(token))
        except ValueError as error:
            self._fault, self.closed = error, True

    def end(self):
        """Print the rest and a newline; ValueError if a token could not be decoded."""
        if self._fault:
            raise self._fault
        self._write(self._text.rest() + "\n")

    def _write(self, text):
        if not self._silent:
            print(text, end="", flush=True)
            self.closed = sys.stdout.lost  # a Stream, as in all commands
