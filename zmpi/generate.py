"""python -m zmpi.generate: text from a checkpoint, printed as it comes. Also under mpirun, with the weights in shards.

A prediction sees the last --context tokens. Until the context is full each token is computed once (models/cached.py);
then the window moves on with every token, and with it all positions: the window is computed anew.
"""

import codecs
import sys

import numpy as np

from models import GPT, MLP
from models.cached import Cache
from zmpi.checkpoint import find, load_weights
from zmpi.engine import ZeRO
from zmpi.optim import SGD
from zmpi.options import Parser, real, whole
from zmpi.precision import Policy
from zmpi.start import start

COMMAND = "zmpi.generate"


def parser():
    """All flags. The names are a contract."""
    flags = Parser(COMMAND, __doc__)
    add = flags.add_argument
    add("--checkpoint", metavar="DIR", required=True, help="folder of checkpoints (the newest is taken), or one")
    add("--prompt", metavar="TEXT", help="text to go on from (default: none; one of the two prompts is needed)")
    add("--prompt-ids", metavar="N,N,...", type=_ids, help="tokens to go on from; tokens are printed (default: none)")
    add("--tokenizer", metavar="FILE", help="tokenizer.json that makes tokens of text (default: bytes, for byte models only)")
    add("--tokens", type=whole(1), default=100, help="tokens to generate")
    add("--temperature", type=real(0), default=0.0, help="0: always the likeliest token; 1: as the model predicts")
    add("--top-k", type=whole(0), default=0, help="draw from the k likeliest tokens only (0: from all)")
    add("--seed", type=whole(0), default=0, help="seed of the draws")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where arrays live")
    add("--transport", choices=("auto", "direct", "staged"), default="auto", help="how device memory reaches MPI")
    add("--timeout", type=real(0, above=True), default=300, help="seconds after which a stuck collective ends the run")
    return flags


def main(argv=None):
    """Run the command; what is wrong with it ends all ranks with one line."""
    args, world = start(parser(), argv)
    manifest = find(args.checkpoint, world)
    with world.agreed():
        if (args.prompt is None) == (args.prompt_ids is None):
            raise ValueError("--prompt: give either --prompt or --prompt-ids")
        model = _build(manifest)
        coding = _coding(args, manifest)
        tokens = coding.encode(args)
        _refuse(tokens, model, args)
    zero = ZeRO(model, world, stage=3 if world.size > 1 else 0, optimizer=SGD(), policy=Policy(manifest["recipe"]))
    load_weights(zero, manifest)
    with world.agreed():
        voice = Voice(coding, tokens, silent=world.rank != 0)
    for token in generate(zero, tokens, args, coding.limit, lambda: voice.closed):
        voice.say(token)
    voice.end()


def generate(zero, tokens, args, limit, closed):
    """Yields args.tokens tokens, one by one and the same on every rank: rank 0's draws.

    Tokens are drawn below `limit`. closed() on rank 0 ends the loop early, on all ranks.
    """
    tokens, cache = list(tokens), None
    for position in range(args.tokens):
        if isinstance(zero.model, GPT) and cache and cache.length < zero.model.context:
            logits_V = cache.predict(_window(tokens[-1:]), zero.forward)[0]
        else:
            window, cache = tokens[-zero.model.context :], Cache(zero.model)
            logits_V = cache.predict(_window(window), zero.forward)[0] if isinstance(zero.model, GPT) else _plain(zero, window)
        mine = draw(logits_V[:limit], args, position)
        token, ended = zero.comm.gather_scalars([mine, closed()])[0]
        if ended:
            return
        tokens.append(int(token))
        yield tokens[-1]


def draw(logits_V, args, position):
    """A token from its logits: the likeliest at temperature 0; else drawn, as a function of (seed, position) alone."""
    if not args.temperature:
        return int(np.argmax(logits_V))
    scaled_V = logits_V.astype(np.float64) / args.temperature
    if args.top_k and args.top_k < len(scaled_V):
        scaled_V[scaled_V < np.partition(scaled_V, -args.top_k)[-args.top_k]] = -np.inf
    share_V = np.cumsum(np.exp(scaled_V - scaled_V.max()))
    number = np.random.Generator(np.random.Philox(key=args.seed, counter=[position, 0, 0, 0])).random()
    return int(np.searchsorted(share_V, number * share_V[-1], side="right"))


class Voice:
    """Prints tokens as text, as they come. `closed` turns true when nobody listens any more (a pipe that was closed)."""

    def __init__(self, coding, prompt, silent):
        self._text, self._silent, self.closed = coding.decoder(), silent, False
        for token in prompt:
            self.say(token)

    def say(self, token):
        """Print what this token makes readable."""
        self._write(self._text.add(token))

    def end(self):
        """Print what is left, and a line's end."""
        self._write(self._text.rest() + "\n")

    def _write(self, text):
        if self._silent or self.closed:
            return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self.closed = True
            sys.stdout = None  # what is buffered can go nowhere: no second error at the exit


# -- text and tokens ---------------------------------------------------------------------------------------------------


class Bytes:
    """Bytes are the tokens."""

    limit = 256

    def encode(self, args):
        return list(args.prompt.encode(errors="surrogateescape"))

    def decoder(self):
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return self

    def add(self, token):
        return self._utf8.decode(bytes([token]))

    def rest(self):
        return self._utf8.decode(b"", final=True)


class Ids:
    """Tokens are written as numbers, with commas."""

    limit = None

    def encode(self, args):
        return args.prompt_ids

    def decoder(self):
        self._before = ""
        return self

    def add(self, token):
        before, self._before = self._before, ","
        return f"{before}{token}"

    def rest(self):
        return ""


class Words:
    """Tokens of a tokenizer.json."""

    limit = None

    def __init__(self, path):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError("--tokenizer: needs the package tokenizers (pip install tokenizers)") from None
        try:
            self._tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"--tokenizer: {path}: {error}") from None

    def encode(self, args):
        return self._tokenizer.encode(args.prompt).ids

    def decoder(self):
        self._tokens, self._said = [], ""
        return self

    def add(self, token):
        """The text that grew by this token; none while a character is incomplete."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._grown(text)

    def rest(self):
        return self._grown(self._tokenizer.decode(self._tokens))

    def _grown(self, text):
        said, self._said = self._said, text
        return text[len(said) :]


def _coding(args, manifest):
    """How the prompt becomes tokens, and tokens become text."""
    if args.prompt_ids is not None:
        return Ids()
    if args.tokenizer:
        return Words(args.tokenizer)
    of_bytes = manifest["run"]["data"]["kind"] == "uint8" if manifest["run"] else manifest["model"]["vocab"] == 256
    if not of_bytes:
        raise ValueError("--prompt: the model's tokens are not bytes; give --tokenizer tokenizer.json, or --prompt-ids")
    return Bytes()


def _ids(text):
    """An argparse type: whole numbers with commas."""
    return [whole(0)(number) for number in text.split(",")]


def _build(manifest):
    """The checkpoint's model."""
    sizes = dict(manifest["model"])
    kinds = {"GPT": GPT, "MLP": MLP}
    kind = kinds.get(sizes.pop("kind"))
    if kind is None:
        raise ValueError(f"{manifest.folder}: expected a {' or '.join(kinds)}, got a {manifest['model']['kind']}")
    return kind(layers=sizes.pop("depth"), **sizes)


def _refuse(tokens, model, args):
    """A prompt that the model cannot read."""
    name = "--prompt" if args.prompt_ids is None else "--prompt-ids"
    least = model.context if isinstance(model, MLP) else 1
    if len(tokens) < least:
        raise ValueError(f"{name}: expected at least {least} token{'s' * (least > 1)}, got {len(tokens)}")
    if max(tokens) >= model.vocab:
        raise ValueError(f"{name}: token {max(tokens)} is not below the model's vocabulary of {model.vocab}")


def _plain(zero, window):
    """The logits after a whole window, of a model without a cache."""
    return zero.forward(_window(window))[0]


def _window(tokens):
    return np.array([tokens], np.int64)


if __name__ == "__main__":
    main()
