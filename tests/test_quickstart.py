"""Follows docs/quickstart.md from top to bottom in one scratch checkout, with a model that trains in a second."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkout import MINIATURE, ROOT, make_checkout

PAGE = (ROOT / "docs" / "quickstart.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.M | re.S)
COMMANDS = [line.partition("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
TRAINING = ("tamis run", "tamis train", "tamis estimate")
SMALL = [*MINIATURE, "train.seq_len=160", "train.steps=4", "train.eval_every=2", "train.save_every=2"]


def in_miniature(command: str) -> str:
    """Add the small model's keys; a second `tamis run` is resolved as a configuration, and not trained."""
    if command.startswith("tamis run train."):
        return command.replace("tamis run", "tamis config show configs/train_showcase.yaml")
    if command.startswith("tamis data prepare"):
        return f"{command} data.tokenizer=byte data.val_fraction=0.05"
    return " ".join([command, *SMALL]) if command.startswith(TRAINING) else command


@pytest.mark.timeout(600)
def test_every_command_of_the_quickstart_works_in_the_order_of_the_page(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "project")
    texts = checkout.path / "my_texts"
    texts.mkdir()
    for n in range(20):
        (texts / f"{n}.txt").write_text(f"A text of my own, number {n}. " * 40)
    for command in COMMANDS:
        done = checkout.run(in_miniature(command))
        assert done.code == 0, f"{command}\n{done}"
    assert (checkout.path / "artifacts" / "train_showcase" / "report.html").is_file()
    assert (checkout.path / "artifacts" / "mine" / "checkpoint_step4.pt").is_file()
    assert (checkout.path / "shards" / "manifest.json").is_file()
