"""python -m zmpi.export: weights of a checkpoint in the published GPT-2 format. Needs no MPI.

The folder loads in transformers: GPT2LMHeadModel.from_pretrained(DIR). Weights are the float32
masters, unpadded, with the tied embedding once. They are copied one parameter at a time, and every
block is checked against its checksum.
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
OTHER_FILES = 64  # roughly how many other files a process has open


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
    """Run the command; an error is one line, status 2."""
    with alone(COMMAND):
        args = parser().parse_args(argv)
        began = perf_counter()
        manifest = with_newest(args.checkpoint, lambda folder: _exported(folder, args.to))
        size = (Path(args.to) / pretrained.WEIGHTS).stat().st_size / 1e6
        speed = f"{size:,.1f} MB in {perf_counter() - began:.2f} s"
        print(f"exported step {manifest['step']} of {manifest.folder} to {args.to}: {speed}")


def _exported(folder, to):
    manifest = read_checkpoint(folder)
    export_weights(manifest, to)
    return manifest


def export_weights(manifest, to):
    """Write a checkpoint's weights to a folder; ValueError, and nothing written, if not a GPT."""
    model = manifest["model"]
    if model["kind"] != "GPT":
        raise ValueError(
            f"{manifest.folder}: expected a transformer (others have no published format), got"
            f" {model['kind']}"
        )
    sizes = {"layers" if name == "depth" else name: model[name] for name in SIZES_OF_KIND["GPT"]}
    with Readers(manifest, _files_at_once(len(manifest.files))) as readers:
        pretrained.write(
            to, sizes, manifest.shapes, lambda name: manifest.read_parameter(name, readers)
        )


def _files_at_once(wanted):
    """How many of `wanted` files can be open at once, after raising this process's soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - OTHER_FILES))


if __name__ == "__main__":
    main()
