"""Your own classes, from your own files: the FILE:CLASS of --comm, --model and --optimizer."""

import argparse
import hashlib
import inspect
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


class FileClass(str):
    """FILE:CLASS. Each rank may have the file in another place, with the same content."""

    @property
    def file(self):
        return Path(self.rpartition(":")[0])

    @property
    def name(self):
        return self.rpartition(":")[2]

    def identity(self):
        """What must agree between ranks: the class's name and the file's checksum (or None)."""
        try:
            digest = hashlib.sha256(self.file.read_bytes()).hexdigest()[:12]
        except OSError:
            digest = None
        return f"{self.name} of a file with SHA-256 {digest}"


def own_or(*names):
    """An argparse type: one of the names, or a FileClass."""

    def convert(text):
        if text in names:
            return text
        if ":" not in text:
            expected = ", ".join([*names, "FILE:CLASS"])
            of = "one of " if names else ""
            raise argparse.ArgumentTypeError(f"expected {of}{expected}; got {text!r}")
        return FileClass(text)

    return convert


def leave_defaults(args, flag, names, given):
    """If `flag` is a FileClass, set the `names` not `given` to None: the class has defaults."""
    if isinstance(getattr(args, flag), FileClass):
        for name in set(names) - set(given):
            setattr(args, name, None)


def load_class(flag, place, kinds=(object,), what="class"):
    """The class of a FileClass, a subclass of one of `kinds`; ValueError, naming the flag, if not.

    The file is imported once, even for several flags.
    """
    place = FileClass(place)
    if not place.file.is_file() or not place.name:
        file = place.rpartition(":")[0] or "FILE"
        raise ValueError(f"{flag}: expected FILE:CLASS, got {place} ({file} is not a file)")
    module = _imported(flag, place.file)
    found = getattr(module, place.name, None)
    if not isinstance(found, type):
        raise ValueError(f"{flag}: {place.file} has no class {place.name}")
    if not issubclass(found, kinds):
        raise ValueError(f"{flag}: {place.file}: class {place.name} is not a zmpi {what}")
    return found


def _imported(flag, file):
    name = f"own {file.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, file)
    if spec is None:
        raise ValueError(f"{flag}: {file} is not a Python file")
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look it up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"{flag}: {file} cannot be imported: {_error_text(error)}") from error
    return module


def call(flag, place, found, given, defaults):
    """found(**given), with the flags that were given, by name (None: not given).

    A parameter without a default gets the flag's, from `defaults`. Raises a one-line ValueError for
    what the class does not accept.
    """
    parameters = inspect.signature(found).parameters.values()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    values = {name: value for name, value in given.items() if value is not None}
    for name in values:
        if name not in named and not anything:
            raise ValueError(f"--{name.replace('_', '-')}: not accepted by {flag} {place}")
    for name, parameter in named.items():
        if name not in values and parameter.default is parameter.empty:
            if name not in defaults:
                raise ValueError(f"{flag}: {place} needs {name}, which is not a flag")
            values[name] = defaults[name]
    try:
        return found(**values)
    except Exception as error:
        name, colon, rest = str(error).partition(":")
        if isinstance(error, ValueError) and colon and name in values:
            raise ValueError(f"--{name.replace('_', '-')}:{rest} ({flag} {place})") from error
        raise ValueError(f"{flag}: {place}: {_error_text(error)}") from error


def accepts(found, name):
    """Whether a class accepts the parameter."""
    parameters = inspect.signature(found).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _error_text(error):
    """An exception as text, with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if f.filename != __file__ and "<frozen" not in f.filename]
    where = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
