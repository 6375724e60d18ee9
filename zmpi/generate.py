"""python -m zmpi.generate: text from a checkpoint, printed as it comes. Also under mpirun, with the weights in shards.

A prediction sees the last --context tokens. Until the context is full each token is computed once (models/cached.py);
then the window moves on with every token, and with it all positions: the window is computed anew.
"""

from models import GPT, MLP
from zmpi.checkpoint import find, load_weights
from zmpi.coding import Bytes, Ids, Voice, Words
from zmpi.engine import ZeRO
from zmpi.manners.model_flags import SEEDS
from zmpi.manners.options import Parser, file_name, real, whole
from zmpi.manners.start import start, world_flags
from zmpi.optim import SGD
from zmpi.precision import Policy
from zmpi.sampling import generate

COMMAND = "zmpi.generate"


def parser():
    """All flags. The names are a contract."""
    flags = Parser(COMMAND, __doc__)
    add = flags.add_argument
    add(
        "--checkpoint",
        type=file_name,
        metavar="DIR",
        required=True,
        help="folder of checkpoints (takes the newest), or one",
    )
    add(
        "--prompt",
        metavar="TEXT",
        help="text to go on from (default: none; one of the two prompts is needed)",
    )
    add(
        "--prompt-ids",
        metavar="N,N,...",
        type=_ids,
        help="tokens to go on from; tokens are printed (default: none)",
    )
    tokenizer = "tokenizer.json that makes tokens of text (default: bytes, for byte models only)"
    add("--tokenizer", type=file_name, metavar="FILE", help=tokenizer)
    add("--tokens", type=whole(1), default=100, help="tokens to generate")
    add(
        "--temperature",
        type=real(0),
        default=0.0,
        help="0: always the likeliest token; 1: as the model predicts",
    )
    add(
        "--top-k",
        type=whole(0),
        default=0,
        help="draw from the k likeliest tokens only (0: from all)",
    )
    add("--seed", type=whole(0, SEEDS), default=0, help="seed of the draws")
    world_flags(flags)
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
    zero = ZeRO(
        model,
        world,
        stage=3 if world.size > 1 else 0,
        optimizer=SGD(),
        policy=Policy(manifest["recipe"]),
    )
    load_weights(zero, manifest)
    with world.agreed():
        voice = Voice(coding, tokens, silent=world.rank != 0)
    for token in generate(zero, tokens, args, coding.limit, lambda: voice.closed):
        voice.say(token)
    voice.end()


def _coding(args, manifest):
    """How the prompt becomes tokens, and tokens become text."""
    if args.prompt_ids is not None:
        if args.tokenizer:
            raise ValueError("--tokenizer: --prompt-ids are tokens already; give one of the two")
        return Ids()
    if args.tokenizer:
        return Words(args.tokenizer)
    of_bytes = (
        manifest["run"]["data"]["kind"] == "uint8"
        if manifest["run"]
        else manifest["model"]["vocab"] == 256
    )
    if not of_bytes:
        raise ValueError(
            "--prompt: the model's tokens are not bytes; give --tokenizer tokenizer.json, or --prompt-ids"
        )
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
        raise ValueError(
            f"{manifest.folder}: expected a {' or '.join(kinds)}, got a {manifest['model']['kind']}"
        )
    return kind(layers=sizes.pop("depth"), **sizes)


def _refuse(tokens, model, args):
    """A prompt that the model cannot read."""
    name = "--prompt" if args.prompt_ids is None else "--prompt-ids"
    least = model.context if isinstance(model, MLP) else 1
    if len(tokens) < least:
        raise ValueError(
            f"{name}: expected at least {least} token{'s' * (least > 1)}, got {len(tokens)}"
        )
    if max(tokens) >= model.vocab:
        raise ValueError(
            f"{name}: token {max(tokens)} is not below the model's vocabulary of {model.vocab}"
        )


if __name__ == "__main__":
    main()
