"""A folder of small tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluate.test_tasks import write_task

WORDS = ["fellow", "citizens", "of", "the", "senate", "we", "meet", "again", "war", "peace", "land", "gold", "law"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve examples of each form, with answers of several lengths."""
    path = tmp_path / "tasks"
    for i in range(12):
        a, b, c = (WORDS[(i * k + 3) % len(WORDS)] for k in (1, 5, 7))
        record = {"query": f"{a} {b}", "choices": [c, a + b, c + " " + b], "gold": i % 3}
        schema = {"context_options": [f"{a} so {b}", f"{b} so {a} and {c}"], "continuation": c, "gold": i % 2}
        for name, value in {"choice": record, "schema": schema, "cloze": {"context": a, "continuation": b}}.items():
            old = (path / f"{name}.jsonl").read_text().splitlines() if i else []
            write_task(path, *old, value, name=name)
    return path
