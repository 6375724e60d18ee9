"""python -m zmpi.export: a checkpoint's weights for other tools, as a GPT-2 in the published format. Needs no MPI.

The folder loads in transformers: GPT2LMHeadModel.from_pretrained(DIR). Weights are the float32 masters, unpadded, the
tied embedding once. They pass through one parameter at a time, each block compared with its checksum.
"""

from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

from zmpi.manners.options import Parser, alone, file_name
from zmpi.saving import pretrained
from zmpi.saving.blocks import Room
from zmpi.saving.folder import newest
from zmpi.saving.manifest import Manifest

COMMAND = "zmpi.export"


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
        "--to",
        type=file_name,
        metavar="DIR",
        required=True,
        help="folder to write, made in one that is there",
    )
    return flags


def main(argv=None):
    """Run the command; what is wrong with it is one line of error, status 2."""
    with alone(COMMAND):
        args = parser().parse_args(argv)
        began = perf_counter()
        manifest = Manifest.read(newest(args.checkpoint))
        export(manifest, args.to)
        size, seconds = (
            (Path(args.to) / pretrained.WEIGHTS).stat().st_size / 1e6,
            perf_counter() - began,
        )
        print(
            f"exported step {manifest['step']} of {manifest.folder} to {args.to}: {size:,.1f} MB in {seconds:.2f} s"
        )


def export(manifest, to):
    """Write the weights of a checkpoint into a folder. Raises ValueError for what is no GPT, or damaged: nothing is written."""
    sizes = dict(manifest["model"])
    if sizes.pop("kind") != "GPT":
        raise ValueError(
            f"{manifest.folder}: only a transformer has a published format, this is a {manifest['model']['kind']}"
        )
    sizes["layers"] = sizes.pop("depth")
    with ExitStack() as stack:
        room = (
            Room()
        )  # all files are open, so that a job at work cannot take them away; one block is in memory
        readers = [
            stack.enter_context(manifest.open(file, room)) for file in range(len(manifest.files))
        ]
        pretrained.write(
            to, sizes, manifest.shapes, lambda name: manifest.read_parameter(name, readers)
        )


if __name__ == "__main__":
    main()
