"""zmpi.generate's parts without MPI: what is drawn, how text comes out, and what a prediction sees."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from small_models import spread

from models import GPT, MLP, plain_weights, unit_of
from zmpi.coding import Bytes, Ids, Voice, Words
from zmpi.device import choose_device
from zmpi.manners.options import Output
from zmpi.sampling import draw, generate


def flags(**changed):
    return SimpleNamespace(
        **{
            "tokens": 30,
            "temperature": 0.0,
            "top_k": 0,
            "seed": 0,
            "prompt": "é!",
            "prompt_ids": [1, 2],
        }
        | changed
    )


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
    zero, asked = Alone(GPT(layers=2, width=6, heads=3, context=9, vocab=11)), flags(**settings)
    tokens = [3, 1, 4]
    for position, token in enumerate(generate(zero, tokens, asked, None, lambda: False)):
        assert token == draw(zero.forward(np.array([tokens[-9:]]))[0, -1], asked, position)
        tokens.append(token)
    assert len(tokens) == 33
    counted = zero.seen[::2]
    assert counted[:7] == [3, 1, 1, 1, 1, 1, 1] and set(counted[7:]) == {9}, (
        "a token costs one position until it slides"
    )


def test_a_window_model_sees_its_context():
    zero, tokens = Alone(MLP(layers=1, width=6, context=4, vocab=11)), [3, 1, 4, 1, 5]
    for position, token in enumerate(generate(zero, tokens, flags(), None, lambda: False)):
        assert token == draw(zero.forward(np.array([tokens[-4:]]))[0], flags(), position)
        tokens.append(token)


def test_generation_ends_when_nobody_listens():
    zero, heard = Alone(GPT(layers=1, width=6, heads=3, context=9, vocab=11)), []
    for token in generate(zero, [1], flags(), None, lambda: len(heard) == 4):
        heard.append(token)
    assert len(heard) == 4


def test_draws_follow_the_models_shares():
    """1000 draws of a token with a share of 0.7: within 4 standard deviations (0.0145 each)."""
    logits = np.log([0.7, 0.2, 0.1])
    drawn = [draw(logits, flags(temperature=1.0), position) for position in range(1000)]
    assert abs(drawn.count(0) / 1000 - 0.7) < 0.058 and {1, 2} <= set(drawn)
    assert drawn == [draw(logits, flags(temperature=1.0), position) for position in range(1000)]
    assert drawn != [
        draw(logits, flags(temperature=1.0, seed=1), position) for position in range(1000)
    ]
    assert {
        draw(logits, flags(temperature=1.0, top_k=2), position) for position in range(1000)
    } == {0, 1}
    assert {draw(logits, flags(temperature=5.0, top_k=1), position) for position in range(100)} == {
        0
    }
    assert {draw(logits, flags(), position) for position in range(10)} == {0}
    for near_zero in (1e-9, 1e-310):
        assert {draw(logits, flags(temperature=near_zero), position) for position in range(10)} == {
            0
        }


def test_bytes_come_out_as_whole_characters():
    out = Bytes().decoder()
    told = [out.add(token) for token in Bytes().encode(flags(prompt="aé€"))]
    assert told == ["a", "", "é", "", "", "€"] and out.rest() == ""
    assert out.add(0xE2) == "" and out.rest() == "\N{REPLACEMENT CHARACTER}"


def test_ids_come_out_with_commas():
    out = Ids().decoder()
    assert "".join(out.add(token) for token in (5, 17, 3)) + out.rest() == "5,17,3"


def test_a_tokenizers_text_comes_out_as_it_grows(tmp_path):
    """A byte-level tokenizer: characters of several tokens are printed when they are whole."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["the then"], tokenizers.trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet)
    )
    made.save(str(tmp_path / "tokenizer.json"))
    coding = Words(str(tmp_path / "tokenizer.json"))
    tokens = coding.encode(flags(prompt="the é€ then"))
    assert len(tokens) < len("the é€ then".encode())
    out = coding.decoder()
    told = [out.add(token) for token in tokens]
    assert "".join(told) + out.rest() == "the é€ then" and "" in told
    (tmp_path / "broken.json").write_text(json.dumps({"version": "?"}))
    with pytest.raises(ValueError, match=r"--tokenizer: .*broken\.json"):
        Words(str(tmp_path / "broken.json"))


def test_a_closed_pipe_is_no_error(monkeypatch):
    """What cannot be printed any more ends the loop, on all ranks, and not with a traceback."""

    class Closed:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            pass

    monkeypatch.setattr("sys.stdout", Output(Closed()))
    voice = Voice(Ids(), [1], silent=False)
    assert voice.closed
    voice.say(2)
    voice.end()
