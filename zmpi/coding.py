"""Text as tokens and tokens as text, which comes out as it grows. No MPI in here."""

import codecs
import sys


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
            raise ValueError(
                "--tokenizer: needs the package tokenizers (pip install tokenizers)"
            ) from None
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
        if not self._silent:
            print(text, end="", flush=True)
            self.closed = sys.stdout.lost  # an Output, as in every command
