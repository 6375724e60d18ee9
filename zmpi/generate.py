"""python -m zmpi.generate: generates text from a checkpoint. Under mpirun, with sharded weights.

A prediction sees the last --context tokens. Until the context is full, each token is computed once
(models/cached.py); then every token moves the window, and all of it is recomputed.
"""

from models import GPT, MLP
from zmpi.cli.options import Parser, file_name, real, whole
from zmpi.cli.shared_flags import WORLD_FLAGS, add_shared
from zmpi.cli.start import start_command
from zmpi.core.engine import ZeRO
from zmpi.numbers.optim import SGD
from zmpi.numbers.precision import Policy
from zmpi.process.agree import same_on_all_ranks
from zmpi.process.streams import check_printed
from zmpi.saving.checkpoint import find, load_weights, refuse_other_model
from zmpi.saving.pretrained import END_OF_TEXT, PUBLISHED_VOCAB
from zmpi.saving.schema import SIZES_OF_KIND
from zmpi.text.generation import Bytes, Draws, Ids, Voice, Words, next_tokens

COMMAND = "zmpi.generate"


def parser():
    """All flags. The names are a contract."""
    flags = Parser(COMMAND, __doc__)
    add = flags.add_argument
    add_shared(flags, "--checkpoint")
    prompt = "text to continue (default: none; give this or --prompt-ids)"
    add("--prompt", metavar="TEXT", help=prompt)
    prompt = "tokens to continue; prints tokens (default: none)"
    add("--prompt-ids", metavar="N,N,...", type=_ids, help=prompt)
    tokenizer = "tokenizer.json for the text (default: bytes, only for models of bytes)"
    add("--tokenizer", type=file_name, metavar="FILE", help=tokenizer)
    add("--tokens", type=whole(1), default=100, help="maximum tokens to generate")
    stop = "token that ends the text: auto (the tokenizer's end of text), none, or its number"
    add("--stop", type=_stop, default="auto", metavar="auto|none|N", help=stop)
    temperature = "0: always the likeliest token; 1: as the model predicts"
    add("--temperature", type=real(0), default=0.0, help=temperature)
    top_k = "draw from the k likeliest tokens only (0: from all)"
    add("--top-k", type=whole(0), default=0, help=top_k)
    add_shared(flags, "--seed", what="seed of the draws")
    add_shared(flags, *WORLD_FLAGS)
    return flags


def main(argv=None):
    """Run the command; an error ends all ranks with one line."""
    args, world = start_command(parser(), argv)
    manifest = find(args.checkpoint, world)
    with world.agreed():
        if (args.prompt is None) == (args.prompt_ids is None):
            raise ValueError("--prompt: give either --prompt or --prompt-ids")
        model, policy = _build(manifest), Policy(manifest["recipe"])
        refuse_other_model(manifest, model, policy)
        coding = _coding(args, manifest)
        tokens = coding.encode(args.prompt if args.prompt_ids is None else args.prompt_ids)
        _refuse(tokens, model, args)
        if args.stop != "auto":
            coding.ends = () if args.stop == "none" else (args.stop,)
    if args.tokenizer:  # each node may have its own file: the tokens must be the same
        same_on_all_ranks(world, {"--tokenizer": str(tokens)})
    zero = ZeRO(
        model,
        world,
        stage=3 if world.size > 1 else 0,
        optimizer=SGD(),
        policy=policy,
    )
    load_weights(zero, args.checkpoint)
    with world.agreed():
        voice = Voice(coding, tokens, silent=world.rank != 0)
    draws = Draws(args.tokens, args.temperature, args.top_k, args.seed)
    for token in next_tokens(zero, tokens, draws, coding, lambda: voice.closed):
        voice.say(token)
    with world.agreed():
        voice.end()
        check_printed()


def _coding(args, manifest):
    """The coding between text and tokens."""
    if args.prompt_ids is not None:
        if args.tokenizer:
            raise ValueError("--tokenizer: --prompt-ids are already tokens; use only one of them")
        return Ids((END_OF_TEXT,) if manifest["model"]["vocab"] == PUBLISHED_VOCAB else ())
    if args.tokenizer:
        return Words(args.tokenizer)
    of_bytes = (
        manifest["run"]["data"]["kind"] == "uint8"
        if manifest["run"]
        else manifest["model"]["vocab"] == 256
    )
    if not of_bytes:
        raise ValueError(
            "--prompt: the model's tokens are not bytes; use --tokenizer FILE, or --prompt-ids"
        )
    return Bytes()


def _ids(text):
    """An argparse type: whole numbers, separated by commas."""
    return [whole(0)(number) for number in text.split(",")]


def _stop(text):
    """An argparse type: "auto", "none", or a token."""
    return text if text in ("auto", "none") else whole(0)(text)


def _build(manifest):
    """The checkpoint's model."""
    model, kinds = manifest["model"], {"GPT": GPT, "MLP": MLP}
    if model["kind"] not in kinds:
        raise ValueError(
            f"{manifest.folder}: expected a {' or '.join(kinds)}, got a {model['kind']}"
        )
    sizes = {name: model[name] for name in SIZES_OF_KIND[model["kind"]]}
    return kinds[model["kind"]](layers=sizes.pop("depth"), **sizes)


def _refuse(tokens, model, args):
    """Raise ValueError for a prompt that the model cannot read."""
    name = "--prompt" if args.prompt_ids is None else "--prompt-ids"
    least = model.context if isinstance(model, MLP) else 1
    if len(tokens) < least:
        raise ValueError(
            f"{name}: expected at least {least} token{'s' * (least > 1)}, got {len(tokens)}"
        )
    for flag, token in {name: max(tokens), "--stop": args.stop}.items():
        if isinstance(token, int) and token >= model.vocab:
            raise ValueError(
                f"{flag}: token {token} is not below the model's vocabulary of {model.vocab}"
            )


if __name__ == "__main__":
    main()
