"""zmpi.generate's parts without MPI: sampling, how text is printed, what a prediction sees."""

import gzip
import io
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import spread

from models import GPT, MLP, plain_weights, unit_of
from zmpi.generate import parser
from zmpi.messages.device import choose_device
from zmpi.process.errors import UsageError
from zmpi.process.streams import Stream
from zmpi.text.generation import (
    Bytes,
    Draws,
    Growing,
    Ids,
    Voice,
    Words,
    draw,
    next_tokens,
)


def draws(**changed):
    return Draws(**{"tokens": 30} | changed)


class Alone:
    """The part of an engine that generate uses, for weights that are whole."""

    def __init__(self, model):
        self.model, self.weights, self.seen = model, spread(plain_weights(model, 0, np.float64)), []
        self.world = SimpleNamespace(device=choose_device("cpu"))
        self.comm = SimpleNamespace(gather_scalars=lambda values: np.array([values], float))

    def forward(self, x, apply=lambda layer, w, x: layer.forward(w, x)[0]):
        self.seen.append(x.shape[1])
        for layer in self.model.layers:
            x = apply(layer, self.weights[unit_of(layer)], x)
        return x


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 3, "seed": 5}]
)
def test_every_token_follows_from_the_last_context_tokens(settings):
    """The cache and the sliding window give what a full forward over these tokens gives."""
    zero, asked = Alone(GPT(layers=2, width=6, heads=3, context=9, vocab=11)), draws(**settings)
    tokens = [3, 1, 4]
    for position, token in enumerate(next_tokens(zero, tokens, asked, Ids(), lambda: False)):
        assert token == draw(zero.forward(np.array([tokens[-9:]]))[0, -1], asked, position)
        tokens.append(token)
    assert len(tokens) == 33
    counted = zero.seen[::2]
    assert counted[:7] == [3, 1, 1, 1, 1, 1, 1] and set(counted[7:]) == {9}, (
        "a token costs one position until it slides"
    )


def test_a_window_model_sees_its_context():
    zero, tokens = Alone(MLP(layers=1, width=6, context=4, vocab=11)), [3, 1, 4, 1, 5]
    for position, token in enumerate(next_tokens(zero, tokens, draws(), Ids(), lambda: False)):
        assert token == draw(zero.forward(np.array([tokens[-4:]]))[0], draws(), position)
        tokens.append(token)


def test_generation_ends_when_nobody_listens():
    zero, heard = Alone(GPT(layers=1, width=6, heads=3, context=9, vocab=11)), []
    for token in next_tokens(zero, [1], draws(), Ids(), lambda: len(heard) == 4):
        heard.append(token)
    assert len(heard) == 4


def test_draws_follow_the_models_shares():
    """1000 draws of a token with a share of 0.7: within 4 standard deviations (0.0145 each)."""
    logits = np.log([0.7, 0.2, 0.1])
    drawn = [draw(logits, draws(temperature=1.0), position) for position in range(1000)]
    assert abs(drawn.count(0) / 1000 - 0.7) < 0.058 and {1, 2} <= set(drawn)
    assert drawn == [draw(logits, draws(temperature=1.0), position) for position in range(1000)]
    assert drawn != [
        draw(logits, draws(temperature=1.0, seed=1), position) for position in range(1000)
    ]
    assert {
        draw(logits, draws(temperature=1.0, top_k=2), position) for position in range(1000)
    } == {0, 1}
    assert {draw(logits, draws(temperature=5.0, top_k=1), position) for position in range(100)} == {
        0
    }
    assert {draw(logits, draws(), position) for position in range(10)} == {0}
    for near_zero in (1e-9, 1e-310):
        assert {draw(logits, draws(temperature=near_zero), position) for position in range(10)} == {
            0
        }


def test_bytes_come_out_as_whole_characters():
    out = Bytes().decoder()
    told = [out.add(token) for token in Bytes().encode("aé€")]
    assert told == ["a", "", "é", "", "", "€"] and out.rest() == ""
    assert out.add(0xE2) == "" and out.rest() == "\N{REPLACEMENT CHARACTER}"


def test_ids_come_out_with_commas():
    out = Ids().decoder()
    assert "".join(out.add(token) for token in (5, 17, 3)) + out.rest() == "5,17,3"


# ---- a tokenizer.json ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    """A byte-level tokenizer.json of almost 300 tokens; token 0 is <|endoftext|>."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    made.train_from_iterator(["the then them, def forward(self, x): return self.other(x)"], trainer)
    return json.loads(made.to_str())


@pytest.fixture
def words(tmp_path, made):
    """words(**entries): the Words of that tokenizer.json with other entries."""

    def write(**entries):
        (tmp_path / "tokenizer.json").write_text(json.dumps(made | entries))
        return Words(tmp_path / "tokenizer.json")

    return write


def grown(coding, tokens):
    """What is printed token by token."""
    out = coding.decoder()
    return [*(out.add(token) for token in tokens), out.rest()]


def test_a_tokenizers_text_comes_out_as_it_grows(words):
    """Characters of several tokens are printed when they are whole."""
    coding = words()
    tokens = coding.encode("the é€ then")
    assert len(tokens) < len("the é€ then".encode())
    told = grown(coding, tokens)
    assert "".join(told) == "the é€ then" and "" in told[:-1]


@given(st.lists(st.integers(0, 259) | st.sampled_from([0, 0xE2, 0x82, 0xAC, 0xF0, 1]), max_size=60))
@settings(deadline=None)
def test_what_is_printed_is_what_the_whole_is_decoded_to(tokens):
    """Bytes in any order: characters that never complete, runs of them, and tokens without text."""

    def decode(tokens):
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    out = Growing(decode)
    assert "".join(out.add(token) for token in tokens) + out.rest() == decode(tokens)


EURO = ["<0xE2>", "<0x82>", "<0xAC>"]


@given(st.lists(st.sampled_from([["▁the"], ["▁"], ["re"], ["<s>"], EURO]), max_size=40))
@settings(deadline=None)
def test_other_decoders_texts_come_out_as_they_grow_too(words_of_llama, tokens):
    """A first token without its space, and bytes decoded one by one while characters are whole."""
    numbers = [words_of_llama.token_to_id(token) for group in tokens for token in group]
    out = Growing(words_of_llama.decode)
    told = "".join(out.add(token) for token in numbers) + out.rest()
    assert told == words_of_llama.decode(numbers)


@pytest.fixture(scope="module")
def words_of_llama():
    tokenizers = pytest.importorskip("tokenizers")
    vocab = ["<s>", "▁the", "▁", "re", *(f"<0x{byte:02X}>" for byte in range(256))]
    found = tokenizers.Tokenizer(
        tokenizers.models.BPE({w: i for i, w in enumerate(vocab)}, [], byte_fallback=True)
    )
    found.add_special_tokens(["<s>"])
    parts = tokenizers.decoders
    found.decoder = parts.Sequence(
        [parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    )
    return found


@pytest.mark.parametrize("kind", ["text", "broken", "without text"])
def test_decoding_four_times_the_tokens_is_four_times_the_work(kind):
    """Counted in decoded tokens: decoding all text each time would be sixteen times as many."""
    counted, each = [], {"text": b"word ", "broken": b"\xe2", "without text": b""}[kind]

    def decode(tokens):
        counted.append(len(tokens))
        return (each * len(tokens)).decode(errors="replace")

    work = {}
    for length in (500, 2000):
        counted.clear()
        out = Growing(decode)
        told = "".join(out.add(7) for _ in range(length)) + out.rest()
        assert told == (each * length).decode(errors="replace")
        work[length] = sum(counted)
    assert work[2000] < 4.1 * work[500]  # the first tokens have less before them


def test_truncation_padding_dropout_and_ends_of_a_tokenizer_are_off(words, made):
    """They are of batches and of training, and cut or filled a prompt without a word."""
    expected = words().encode("def forward(self, x):")
    assert len(expected) > 4
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 32}, "direction": "Left", "pad_to_multiple_of": None}
    fill |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    end = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, end, end],
        "pair": [],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    for entries in (
        {"truncation": cut},
        {"padding": fill},
        {"truncation": cut, "padding": fill},
        {"post_processor": template},
        {"model": made["model"] | {"dropout": 0.9}},
    ):
        assert words(**entries).encode("def forward(self, x):") == expected, entries
    written = words(post_processor=template).encode("x<|endoftext|>")
    assert written[-1] == 0, "an end that the prompt holds stays"


def test_a_tokenizer_that_fails_or_panics_is_one_line(words, tmp_path, capfd):
    """PanicException is no Exception, and Rust writes a backtrace to stderr."""
    missing = {"type": "WordLevel", "vocab": {"the": 0}, "unk_token": "[UNK]"}
    retries = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    for entries in ({"model": missing, "added_tokens": []}, {"normalizer": retries}):
        with pytest.raises(ValueError, match=r"^--tokenizer: .*json cannot encode the prompt: \w"):
            words(**entries).encode("a" * 40 + "!")
    with pytest.raises(ValueError, match="cannot encode the prompt: 'utf-8' codec"):
        words().encode("\udcff")
    with pytest.raises(ValueError, match=r"cannot decode tokens \[-1\]: "):
        words().decoder().add(-1)
    assert capfd.readouterr() == ("", "")
    os.write(2, b"stderr is back")
    assert capfd.readouterr().err == "stderr is back"


def test_what_is_no_tokenizer_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    os.mkfifo(tmp_path / "pipe")
    for name, content in {
        "broken.json": b'{"version": "?"}',
        "vocab.json": b'{"the": 0}',
        "empty.json": b"",
        "merges.txt": b"#version: 0.2\nt h\n",
        "t.json.gz": gzip.compress(b"{}"),
        "utf16.json": "{}".encode("utf-16"),
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"^--tokenizer: .*{name}: not a tokenizer.json: \w"):
            Words(tmp_path / name)
    for path, kind in {
        tmp_path: "a directory",
        tmp_path / "pipe": "a pipe",
        "/x": "missing",
    }.items():
        with pytest.raises(
            ValueError, match=rf"^--tokenizer: expected a file, got {path} \({kind}\)"
        ):
            Words(path)


def test_only_tokens_with_a_text_are_drawn(words, made):
    """A model's vocabulary is often larger than its tokenizer's, which may also skip numbers."""
    vocab = {word: 2 * number for word, number in made["model"]["vocab"].items()}
    coding = words(model=made["model"] | {"vocab": vocab}, added_tokens=[])
    zero = Alone(GPT(layers=1, width=6, heads=3, context=9, vocab=700))
    assert coding.ids.tolist() == list(range(0, 2 * len(vocab), 2))
    tokens = list(
        next_tokens(zero, [2], draws(temperature=50.0, tokens=200), coding, lambda: False)
    )
    assert len(set(tokens)) > 50 and set(tokens) <= set(vocab.values())
    narrow = Alone(GPT(layers=1, width=6, heads=3, context=9, vocab=11))
    tokens = list(next_tokens(narrow, [2], draws(temperature=50.0), coding, lambda: False))
    assert set(tokens) == {0, 2, 4, 6, 8, 10}


def test_an_end_of_text_ends_the_text(words):
    assert words().ends == (0,)
    zero, asked = (
        Alone(GPT(layers=1, width=6, heads=3, context=9, vocab=11)),
        draws(temperature=9.0),
    )
    every = list(next_tokens(zero, [1], asked, Ids(), lambda: False))
    end = every[5]
    expected = every[: every.index(end)]
    assert len(every) == 30
    assert list(next_tokens(zero, [1], asked, Ids((99, end)), lambda: False)) == expected


def test_a_token_that_cannot_be_decoded_ends_the_text_with_its_error(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", Stream(printed, "utf-8"))

    class Failing(Ids):
        def add(self, token):
            if token == 3:
                raise ValueError("token 3")
            return super().add(token)

    voice = Voice(Failing(), [1], silent=False)
    voice.say(2)
    assert not voice.closed
    voice.say(3)
    assert voice.closed
    with pytest.raises(ValueError, match="token 3"):
        voice.end()
    assert printed.getvalue() == b"1,2"
    with pytest.raises(ValueError, match="token 3"):
        Voice(Failing(), [3], silent=True)


def test_a_closed_pipe_is_no_error(monkeypatch):
    """What cannot be printed any more ends the loop, on all ranks, and not with a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.stdout", Stream(os.fdopen(writer, "wb")))
    voice = Voice(Ids(), [1], silent=False)
    assert voice.closed
    voice.say(2)
    voice.end()


def test_a_prompt_that_begins_with_a_minus_says_how_it_is_written():
    needed = ["--checkpoint", "dir", "--prompt"]
    with pytest.raises(UsageError, match=r"--prompt: .* --prompt=-x"):
        parser().parse_args([*needed, "-x"])
    assert parser().parse_args([*needed[:2], "--prompt=-x"]).prompt == "-x"
