"""The same small task by `tamis eval` and by EleutherAI's harness gives the same numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tamis.data.tokenizer import tokenizer_for
from tamis.evaluate.command import evaluate_model
from tests.generate.test_load import save
from tests.model.tiny import tiny_config, tiny_model

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'tamis[lm_eval]'")

TASK = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def test_the_harness_gives_the_numbers_of_tamis_eval(folder: Path, tmp_path: Path, monkeypatch) -> None:
    from lm_eval.tasks import TaskManager

    from tamis.evaluate.harness import HarnessModel

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    checkpoint = save(tmp_path / "run", tiny_model(), config=tiny_config("data.dataset=synthetic"))
    ours = evaluate_model(checkpoint, folder, device="cpu")["tasks"]["choice"]
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml" / "choice.yaml").write_text(TASK.format(file=folder / "choice.jsonl"))
    tasks = TaskManager(include_path=str(tmp_path / "yaml"), include_defaults=False)
    model = HarnessModel(pretrained=str(checkpoint), device="cpu")
    found = lm_eval.simple_evaluate(model, tasks=["choice"], task_manager=tasks, bootstrap_iters=0)["results"]["choice"]
    assert [round(found[f"{name},none"], 4) for name in ("acc", "acc_norm")] == [ours["acc"], ours["acc_norm"]]


def test_whole_texts_and_continuations_are_those_of_the_model(tmp_path: Path) -> None:
    from tamis.evaluate.harness import HarnessModel

    decoder, text = tiny_model(), "We the people of the United States"
    model = HarnessModel(pretrained=str(save(tmp_path, decoder, config=tiny_config())), device="cpu")
    ids = torch.tensor([[256, *text.encode()]])
    with torch.no_grad():
        log_p = decoder.logits(decoder(ids)[0])[0, :-1].log_softmax(dim=-1)
    [total] = model.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    assert total == pytest.approx(float(log_p.gather(1, ids[0, 1:, None]).sum()), abs=1e-3)
    long = SimpleNamespace(args=(text * 5,))  # in several windows
    assert model.loglikelihood_rolling([long])[0] < total
    free = model.generate_until([SimpleNamespace(args=(text, {"max_gen_toks": 12}))])[0]
    stop = free[3]
    cut = model.generate_until([SimpleNamespace(args=(text, {"until": [stop], "max_gen_toks": 12}))])[0]
    assert cut == free[: free.index(stop)]
    assert tokenizer_for("byte").encode(free).size >= len(cut)
