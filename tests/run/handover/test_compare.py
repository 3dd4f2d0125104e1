"""`tamis compare`: differences at equal tokens, time and loss, the page, and runs that must not be compared."""

from pathlib import Path

import pytest

from tamis.config import ConfigError, load_config
from tamis.run.files.directory import RunDirectory
from tamis.run.handover.compare import LossCurve, compare_runs, difference

SLOW = LossCurve("slow", 10, [100.0, 200.0, 300.0], [1.0, 2.0, 3.0], [5.0, 4.0, 3.0])
GOOD = LossCurve("good", 10, [100.0, 200.0], [0.5, 1.0], [4.0, 3.5])


def test_runs_are_compared_where_both_have_been() -> None:
    found = difference(SLOW, GOOD)
    assert (found.tokens, found.at_equal_tokens) == (200.0, -0.5)
    assert (found.hours, found.at_equal_hours) == (1.0, -1.5)
    assert found.loss == 3.5
    assert found.tokens_ratio == pytest.approx(200 / 250) and found.hours_ratio == pytest.approx(1.0 / 2.5)
    itself = difference(SLOW, SLOW)
    assert (itself.at_equal_tokens, itself.at_equal_hours, itself.tokens_ratio) == (0.0, 0.0, 1.0)


def logged(out: Path, losses: list[float], toks_per_s: float, *overrides: str) -> RunDirectory:
    run = RunDirectory(out).create()
    config = load_config(None, ["data.tokenizer=byte", "train.seq_len=100", "train.batch_size=10", *overrides])
    run.config_yaml.write_text(config.to_yaml())
    rows = [f"{10 * (i + 1)},{loss},0.001,{toks_per_s}" for i, loss in enumerate(losses)]
    run.training_csv.write_text("\n".join(["step,loss,lr,toks_per_s", *rows]) + "\n")
    rows = [f"{10 * (i + 1)},{loss + 0.1},1.0" for i, loss in enumerate(losses)]
    run.val_csv.write_text("\n".join(["step,loss,ppl", *rows]) + "\n")
    return run


def test_two_runs_as_text_and_page(tmp_path: Path) -> None:
    dense = logged(tmp_path / "dense", [5.0, 4.0, 3.0], 1000.0, "model.attention=dense")
    nsa = logged(tmp_path / "<nsa>", [4.5, 3.5, 2.5], 2000.0)
    text = compare_runs([dense, nsa], page=tmp_path / "page.html")
    assert text.startswith("validation loss in nats per token")
    last = text.splitlines()[-1]
    assert "-0.5000 at 0.0M tokens" in last
    assert "0.83 × the tokens, 0.42 × the time" in last
    page = (tmp_path / "page.html").read_text()
    assert page.count("<polyline") == 4 and "&lt;nsa&gt;" in page and "<nsa>" not in page


def test_the_time_to_compile_the_first_step_is_not_counted(tmp_path: Path) -> None:
    runs = [logged(tmp_path / name, [5.0, 4.0, 3.0], 1000.0) for name in ("one", "other")]
    rows = runs[1].training_csv.read_text().splitlines()
    runs[1].training_csv.write_text("\n".join([rows[0], "1,9.0,0.001,1.0", *rows[1:]]) + "\n")
    assert "1.00 × the tokens, 1.00 × the time" in compare_runs(runs)


def test_runs_of_other_data_or_tokenizers_are_refused_unless_asked_for(tmp_path: Path) -> None:
    one = logged(tmp_path / "one", [5.0, 4.0], 1000.0)
    for number, key in enumerate(["data.tokenizer=gpt2", "data.dataset=sample", "data.packing=documents"]):
        other = logged(tmp_path / f"other{number}", [5.0, 4.0], 1000.0, key)
        with pytest.raises(ConfigError, match=rf"differ in {key.partition('=')[0]}: .*--any-data"):
            compare_runs([one, other])
        assert "against one" in compare_runs([one, other], any_data=True)
    empty = logged(tmp_path / "empty", [], 1000.0)
    with pytest.raises(ConfigError, match="fewer than two losses"):
        compare_runs([one, empty])
