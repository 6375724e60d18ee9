"""The model of a command line."""

from models import GPT, MLP
from zmpi.manners.options import named_as_flags, whole


def model_flags(group):
    """Add the flags that choose the model."""
    add = group.add_argument
    add("--model", choices=("transformer", "mlp"), default="transformer", help="GPT-2, or a multilayer perceptron")
    add("--layers", type=whole(1), default=2, help="transformer blocks, or hidden layers")
    add("--width", type=whole(1), default=128, help="channels")
    add("--heads", type=int, help="attention heads (default: 4; transformer only)")
    add("--context", type=whole(1), default=64, help="tokens that a prediction sees at most")
    add("--vocab", type=whole(1), default=256, help="number of different tokens")


def build_model(args, **changed):
    """The model of the flags, some of them `changed`. Raises ValueError, which names the flag, for what does not fit."""
    get = {**vars(args), **changed}.get
    sizes = get("width"), get("context"), get("vocab")
    if get("model") == "mlp" and get("heads") is not None:
        raise ValueError(f"--heads: {get('heads')} given, but --model mlp has no attention")
    with named_as_flags():
        if get("model") == "mlp":
            return MLP(get("layers"), *sizes)
        width, context, vocab = sizes
        return GPT(get("layers"), width, 4 if get("heads") is None else get("heads"), context, vocab)
