"""Completions that run together equal those of `tamis generate` alone, whatever joins, ends or is cancelled between."""

import queue
import random

import pytest

from tamis.data.tokenizer import tokenizer_for
from tamis.generate.sample import Sampling, generate
from tamis.serve.completion import Completion, Piece
from tamis.serve.engine import MOST_WAITING, Busy, Engine
from tests.model.tiny import tiny_model

BYTES = tokenizer_for("byte")
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model():
    return tiny_model("train.seq_len=96").eval()


@pytest.fixture
def engine(model):
    running = Engine(model, rows=3, max_len=96)
    running.warm_up()
    running.start()
    yield running
    running.stop(30.0)


def submit(engine: Engine, prompt: list[int], count: int, sampling: Sampling = GREEDY, **options) -> queue.Queue[Piece]:
    pieces: queue.Queue[Piece] = queue.Queue()
    engine.submit(Completion(BYTES, prompt, count, sampling, pieces.put, **options))
    return pieces


def whole(pieces: queue.Queue[Piece]) -> tuple[str, Piece]:
    text = ""
    while True:
        piece = pieces.get(timeout=120)
        text += piece.text
        if piece.finish:
            return text, piece


def alone(model, prompt: list[int], count: int, sampling: Sampling) -> str:
    tokens = [token for (token,) in generate(model, [prompt], count, sampling, stop_token=BYTES.eot)]
    return BYTES.to_bytes([t for t in tokens if t is not None and t != BYTES.eot]).decode(errors="replace")


def test_completions_of_many_lengths_and_settings_equal_those_alone(engine, model):
    dice = random.Random(0)
    requests = []
    for number in range(12):
        prompt = [dice.randrange(256) for _ in range(dice.choice([1, 5, 31, 60]))]
        sampling = GREEDY if number % 2 else Sampling(1.0, top_k=dice.choice([0, 5]), top_p=0.9, seed=number)
        requests.append((prompt, dice.choice([1, 7, 30]), sampling))
    answers = [submit(engine, *request) for request in requests]
    for request, pieces in zip(requests, answers, strict=True):
        assert whole(pieces)[0] == alone(model, *request)
    assert engine.counters.prompt_tokens == sum(len(prompt) for prompt, _, _ in requests)


def test_log_probabilities_do_not_depend_on_what_else_runs(engine):
    """To the last bit: the same row goes through products of the same shape, alone and among others."""

    def logprobs(others: int) -> list[float]:
        pieces = [submit(engine, [7, 8, 9 + n], 12, top_logprobs=1) for n in range(1 + others)]
        found = []
        while not (piece := pieces[0].get(timeout=120)).finish:
            found += [one.logprob for one in piece.logprobs]
        for rest in pieces[1:]:
            whole(rest)
        return found

    assert logprobs(others=0) == logprobs(others=2)


def test_a_prompt_of_several_tiles_is_read_between_the_steps_of_others(engine, model, monkeypatch):
    monkeypatch.setattr("tamis.serve.engine.TILE", {"cpu": 7})
    long, short = list(range(60)), [3, 4, 5]
    first, second = submit(engine, short, 40), submit(engine, long, 20)
    assert whole(first)[0] == alone(model, short, 40, GREEDY)
    assert whole(second)[0] == alone(model, long, 20, GREEDY)


def test_a_cancelled_completion_frees_its_row_and_leaves_others_alone(engine, model):
    pieces: queue.Queue[Piece] = queue.Queue()
    dropped = Completion(BYTES, [1], 90, GREEDY, pieces.put)
    engine.submit(dropped)
    kept = submit(engine, [2, 3], 25)
    dropped.cancel()
    assert whole(pieces)[1].finish in ("cancelled", "length", "stop")
    assert whole(kept)[0] == alone(model, [2, 3], 25, GREEDY)


def test_clients_take_turns(engine):
    waiting = engine._waiting
    for client, prompt in (("a", 1), ("a", 2), ("a", 3), ("b", 4)):
        waiting.put(Completion(BYTES, [prompt], 1, GREEDY, lambda piece: None, client=client))
    assert [waiting.take().prompt[0] for _ in range(4)] == [1, 4, 2, 3]


def test_what_does_not_fit_or_is_too_much_is_refused(model):
    idle = Engine(model, rows=1, max_len=96)  # never started: everything waits
    with pytest.raises(ValueError, match="96 of this server"):
        submit(idle, [1] * 90, 7)
    for _ in range(MOST_WAITING):
        submit(idle, [1], 1)
    with pytest.raises(Busy, match="completions wait"):
        submit(idle, [1], 1)


def test_a_failing_step_ends_its_completions_and_not_the_server(engine, model, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_decode", fail)
        assert "out of luck" in whole(submit(engine, [1], 5))[1].error
    assert whole(submit(engine, [1], 5))[0] == alone(model, [1], 5, GREEDY)


def test_log_probabilities_and_selected_blocks_come_with_the_text(engine, model):
    pieces = submit(engine, list(range(70)), 6, top_logprobs=3, with_blocks=True)
    found, blocks, finish = [], None, None
    while finish is None:
        piece = pieces.get(timeout=120)
        found, blocks, finish = [*found, *piece.logprobs], piece.blocks, piece.finish
    assert len(found) == 6 and all(one.top[0] == (one.token, one.logprob) and len(one.top) == 3 for one in found)
    layers = len(model.blocks)
    assert len(blocks) == layers and all(0 in group for layer in blocks for group in layer)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello world", ["wor"], "hello "),
        ("aab", ["ab"], "a"),
        ("héllo\n\nx", ["\n\n"], "héllo"),
        ("abc", ["zz"], "abc"),
    ],
)
def test_stop_strings_end_the_text_before_them_and_none_of_it_is_shown(text, stop, expected):
    shown: list[Piece] = []
    completion = Completion(BYTES, [1], 100, GREEDY, shown.append, stop=stop)
    for token in [*text.encode(), BYTES.eot]:
        if not completion.is_finished:
            completion.add(token)
    assert "".join(piece.text for piece in shown) == expected
    assert shown[-1].finish == "stop"
