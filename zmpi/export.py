"""python -m zmpi.export: a checkpoint's weights for other tools, as a GPT-2 in the published format. Needs no MPI.

The folder loads in transformers: GPT2LMHeadModel.from_pretrained(DIR). Weights are the float32 masters, unpadded, the
tied embedding once. They pass through one parameter at a time, each block compared with its checksum.
"""

import resource
from pathlib import Path
from time import perf_counter

from zmpi.cli.options import Parser, alone, file_name
from zmpi.cli.shared_flags import add_shared
from zmpi.saving import pretrained
from zmpi.saving.found import read_checkpoint, with_newest
from zmpi.saving.manifest import Readers
from zmpi.saving.schema import SIZES_OF_KIND

COMMAND = "zmpi.export"
OTHER_FILES = 64  # that a process has open, about


def parser():
    """All flags. The names are a contract."""
    flags = Parser(COMMAND, __doc__)
    add_shared(flags, "--checkpoint")
    flags.add_argument(
        "--to",
        type=file_name,
        metavar="DIR",
        required=True,
        help="output folder (created; its parent must exist)",
    )
    return flags


def main(argv=None):
    """Run the command; what is wrong with it is one line of error, status 2."""
    with alone(COMMAND):
        args = parser().parse_args(argv)
        began = perf_counter()
        manifest = with_newest(args.checkpoint, lambda folder: _exported(folder, args.to))
        size, seconds = (
            (Path(args.to) / pretrained.WEIGHTS).stat().st_size / 1e6,
            perf_counter() - began,
        )
        print(
            f"exported step {manifest['step']} of {manifest.folder} to {args.to}: {size:,.1f} MB in {seconds:.2f} s"
        )


def _exported(folder, to):
    manifest = read_checkpoint(folder)
    export_weights(manifest, to)
    return manifest


def export_weights(manifest, to):
    """Write the weights of a checkpoint into a folder. Raises ValueError for what is no GPT, or damaged: nothing is written."""
    model = manifest["model"]
    if model["kind"] != "GPT":
        raise ValueError(
            f"{manifest.folder}: only a transformer has a published format, this is a {model['kind']}"
        )
    sizes = {"layers" if name == "depth" else name: model[name] for name in SIZES_OF_KIND["GPT"]}
    with Readers(manifest, _files_at_once(len(manifest.files))) as readers:
        pretrained.write(
            to, sizes, manifest.shapes, lambda name: manifest.read_parameter(name, readers)
        )


def _files_at_once(wanted):
    """How many of so many files may be open. Raises the soft limit of this process where it is in the way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - OTHER_FILES))


if __name__ == "__main__":
    main()
