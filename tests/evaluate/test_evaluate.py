"""Scores of a model: against one pass per text, against `transformers` on the exported model, and eval.json."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tamis.data.tokenizer import tokenizer_for
from tamis.evaluate import scoring
from tamis.evaluate.command import evaluate_model
from tamis.evaluate.held_out import bits_per_byte
from tamis.evaluate.scoring import ScoredText, TaskResult, request_for, score, score_task
from tamis.evaluate.tasks import Option, read_tasks
from tamis.generate.export import export_command
from tests.generate.test_load import save
from tests.model.tiny import tiny_config, tiny_model

BYTES = tokenizer_for("byte")


def alone(model, request: ScoredText) -> tuple[float, bool]:
    """The score by one pass over the text alone, as the definition has it."""
    logits = model.logits(model(torch.tensor([request.ids]))[0])[0].log_softmax(dim=-1)
    picked = [
        (float(logits[i - 1, request.ids[i]]), int(logits[i - 1].argmax()))
        for i in range(request.start, len(request.ids))
    ]
    return sum(p for p, _ in picked), [best for _, best in picked] == request.ids[request.start :]


@torch.no_grad()
def test_batched_scores_equal_one_pass_per_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scoring.TOKENS_AT_ONCE, "cpu", 300)  # several batches
    monkeypatch.setitem(scoring.LOGITS_AT_ONCE, "cpu", 257 * 5)
    model, generator = tiny_model(), torch.Generator().manual_seed(1)
    lengths = [2, 72, 3, 40, 65, 8, 73, 30, 9, 64]
    requests = [ScoredText(torch.randint(257, (n,), generator=generator).tolist(), max(1, n // 2)) for n in lengths]
    best = int(model.logits(model(torch.tensor([[7, 8]]))[0])[0, -1].argmax())
    requests.append(ScoredText([7, 8, best], 2))  # a text that the model continues exactly
    shares: list[float] = []
    for found, request in zip(score(model, requests, shares.append), requests, strict=True):
        expected, is_greedy = alone(model, request) if len(request.ids) <= 72 else (found.log_probability, False)
        assert found.log_probability == pytest.approx(expected, abs=1e-4)
        assert (found.tokens, found.is_greedy) == (len(request.ids) - request.start, is_greedy)
    assert found.is_greedy
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_white_space_goes_to_the_answer_and_the_oldest_tokens_are_dropped() -> None:
    gpt2 = tokenizer_for("gpt2")
    request = request_for(Option("The sky is ", "blue"), gpt2, 100)
    assert gpt2.decode(request.ids[request.start :]) == " blue"
    assert request.ids[0] == gpt2.eot
    assert request_for(Option("", "blue"), gpt2, 100).start == 1
    cut = request_for(Option("abcdefgh ", "xyz"), BYTES, 6)
    assert bytes(cut.ids) == b"fgh xyz"
    assert bytes(cut.ids[cut.start :]) == b" xyz"
    with pytest.raises(ValueError, match="an answer of 9 tokens does not fit 6: raise --max-len"):
        request_for(Option("a ", "bcdefghi"), BYTES, 6)


def test_the_choices_are_those_of_transformers_on_the_exported_model(folder: Path, tmp_path: Path) -> None:
    """Each text alone through `transformers`: mean log-probability of the answer's tokens, or the greedy tokens."""
    import transformers  # here, because every test process loads this file

    config = tiny_config()
    exported = export_command(save(tmp_path / "run", tiny_model(), config=config), tmp_path / "exported")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    for task in read_tasks(folder):
        _, chosen = score_task(tiny_model(), BYTES, task)
        expected = []
        for number in range(len(task.examples)):
            means = []
            for option in task.prompts(number):
                request = request_for(option, BYTES, 72)
                logits = theirs(torch.tensor([request.ids])).logits[0].detach().log_softmax(dim=-1)
                targets = torch.tensor(request.ids[request.start :])
                rows = logits[request.start - 1 : -1]
                means.append(float(rows.gather(1, targets[:, None]).mean()))
                is_greedy = bool((rows.argmax(dim=-1) == targets).all())
            expected.append((0 if is_greedy else -1) if task.kind == "cloze" else means.index(max(means)))
        assert chosen == expected


def test_bits_per_byte_is_the_loss_over_the_bytes_without_end_of_text() -> None:
    model = tiny_model()
    tokens = torch.randint(256, (2, 41), generator=torch.Generator().manual_seed(2))
    loss = float(model.loss(tokens)[0].detach())
    assert bits_per_byte(model, BYTES, [tokens.numpy()], packed=False) == pytest.approx(loss / math.log(2), rel=1e-5)
    tokens[0, 20] = BYTES.eot
    with torch.no_grad():
        log_p = model.logits(model(tokens[:, :-1])[0]).log_softmax(dim=-1).gather(2, tokens[:, 1:, None])
    expected = -(float(log_p.sum()) - float(log_p[0, 19])) / math.log(2) / 79
    assert bits_per_byte(model, BYTES, [tokens.numpy()], packed=False) == pytest.approx(expected, rel=1e-5)
    assert bits_per_byte(model, BYTES, [], packed=False) is None


def test_accuracy_standard_error_and_centred_score() -> None:
    result = TaskResult(examples=101, shots=0, accuracy=0.4, acc=0.4, acc_norm=0.4, chance=0.25)
    assert result.standard_error == pytest.approx(math.sqrt(0.4 * 0.6 / 100))
    assert result.centred == pytest.approx(0.2)


def test_the_command_writes_figures_and_a_table(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config("data.dataset=sample", "train.eval_batches=2", "data.val_fraction=0.05")
    checkpoint = save(tmp_path / "run", tiny_model(), config=config)
    results = evaluate_model(checkpoint.parent, folder, shots=1, device="cpu")
    assert json.loads((tmp_path / "run" / "eval.json").read_text()) == results
    assert list(results["tasks"]) == ["choice", "cloze", "schema"]
    choice = results["tasks"]["choice"]
    assert (choice["examples"], choice["shots"], choice["chance"]) == (12, 1, 0.3333)
    centred = [figures["centred"] for figures in results["tasks"].values()]
    assert results["mean_centred"] == pytest.approx(sum(centred) / 3, abs=1e-3)
    assert results["bits_per_byte"] > 0
    output = capsys.readouterr().out
    assert all(word in output for word in ("choice", "mean of the centred scores", "bits per byte"))
    text = tmp_path / "text.txt"
    for content, message in ((b"", "is empty"), (b"\xff", "cannot be read")):
        text.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            evaluate_model(checkpoint, text=text, device="cpu")


def test_another_text_has_its_own_name_and_leaves_the_other_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config("data.dataset=sample", "train.eval_batches=2", "data.val_fraction=0.05")
    checkpoint, file = save(tmp_path / "run", tiny_model(), config=config), tmp_path / "run" / "eval.json"
    text = tmp_path / "foreign.txt"
    text.write_text("zq" * 200)
    alone = evaluate_model(checkpoint, text=text, device="cpu")
    assert (alone["bits_per_byte"], alone["tasks"]) == (None, {})
    assert alone["texts"]["foreign.txt"]["bits_per_byte"] > 0
    own = evaluate_model(checkpoint, folder, shots=0, device="cpu")
    assert own["texts"] == alone["texts"]
    capsys.readouterr()
    again = evaluate_model(checkpoint, text=text, device="cpu")
    assert {**again, "texts": {}} == {**own, "texts": {}}
    assert json.loads(file.read_text()) == again
    output = capsys.readouterr().out
    assert "bits per byte on the text foreign.txt: " in output
    assert "held-out" not in output
    with_tasks = evaluate_model(checkpoint, folder, shots=0, limit=3, text=text, device="cpu")
    assert (with_tasks["bits_per_byte"], with_tasks["limit"]) == (own["bits_per_byte"], 3)
    for odd in ("[", "[1]", '{"texts": 3}'):
        file.write_text(odd)
        assert list(evaluate_model(checkpoint, text=text, device="cpu")["texts"]) == ["foreign.txt"]
