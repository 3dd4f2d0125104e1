"""Training on packed documents: validated, resumed exactly, and different from training across documents."""

import json
from pathlib import Path

from tamis.config import Config
from tamis.run.files.directory import RunDirectory
from tests.train.processes import run_ranks, tiny_config, train_rank
from tests.train.test_resume import assert_same_bits, rows, tensors

SMALL = ["train.batch_size=4", "train.save_every=3", "train.eval_every=3", "train.lr_min_ratio=1.0"]


def packed(out: Path, steps: int, packing: str = "documents") -> Config:
    """A config for documents shorter than a row, which lie next to `out`."""
    corpus = out.parent / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"document number {n} ends"}) + "\n" for n in range(2000)))
    data = [f"data.packing={packing}", "data.dataset=fineweb_edu_local", f"data.local_path={corpus}"]
    return tiny_config(out, *SMALL, *data, f"train.steps={steps}")


def test_a_resumed_run_on_packed_documents_ends_bit_identical_to_an_unbroken_one(tmp_path: Path) -> None:
    unbroken, broken, stream = (RunDirectory(tmp_path / name) for name in ("unbroken", "broken", "stream"))
    run_ranks(tmp_path / "a", 1, train_rank, packed(unbroken.path, 6))
    run_ranks(tmp_path / "b", 1, train_rank, packed(broken.path, 3))
    run_ranks(tmp_path / "c", 1, train_rank, packed(broken.path, 6), "auto")
    run_ranks(tmp_path / "d", 1, train_rank, packed(stream.path, 3, "stream"))
    assert_same_bits(tensors(broken, 6), tensors(unbroken, 6))
    losses = {run.path: [row[1] for row in rows(run.training_csv)[1:]] for run in (unbroken, broken, stream)}
    assert losses[unbroken.path] == losses[broken.path]
    assert losses[unbroken.path][0] != losses[stream.path][0]  # the same tokens, without attention across documents
    assert rows(unbroken.val_csv)[1][1] != rows(stream.val_csv)[1][1]
