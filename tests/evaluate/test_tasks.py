"""Task files: the three forms, few-shot prompts, and one clear error for each malformed file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tamis.evaluate.tasks import Option, read_tasks

CHOICES = {"query": "The sky is", "choices": ["blue", "green", "far"], "gold": 0}
SCHEMA = {"context_options": ["Ann so Ann", "Ann so Bob"], "continuation": "slept.", "gold": 1}
CLOZE = {"context": "one two", "continuation": "three"}


def write_task(folder: Path, *records: object, name: str = "task") -> Path:
    folder.mkdir(exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("record", "kind", "options", "chance"),
    [
        (
            CHOICES,
            "multiple choice",
            [("The sky is ", word) for word in ("blue", "green", "far")],
            1 / 3,
        ),
        (SCHEMA, "schema", [("Ann so Ann ", "slept."), ("Ann so Bob ", "slept.")], 1 / 2),
        (CLOZE, "cloze", [("one two ", "three")], 0),
    ],
)
def test_each_form_gives_its_options_and_the_accuracy_of_a_guess(record, kind, options, chance, tmp_path: Path) -> None:
    [task] = read_tasks(write_task(tmp_path, record))
    assert (task.kind, task.chance) == (kind, chance)
    assert task.prompts(0) == [Option(*option) for option in options]


def test_solved_examples_come_first_and_never_hold_the_question_itself(tmp_path: Path) -> None:
    write_task(tmp_path, *({"context": f"a{i}", "continuation": f"b{i}"} for i in range(6)))
    (tmp_path / "tasks.yaml").write_text('task: {shots: 3, delimiter: " -> "}\n')
    [task] = read_tasks(tmp_path)
    for number in range(6):
        *solved, question = task.prompts(number)[0].prompt.split("\n\n")
        assert question == f"a{number} -> "
        assert len(set(solved)) == 3
        assert f"a{number} -> b{number}" not in solved
    assert task.prompts(2) == task.prompts(2)
    [plain] = read_tasks(tmp_path, shots=0, limit=2)
    assert (plain.prompts(1)[0].prompt, len(plain.examples)) == ("a1 -> ", 2)


def test_no_space_is_added_where_one_side_has_white_space(tmp_path: Path) -> None:
    write_task(tmp_path, {"context": "Q?\n", "continuation": "A"}, {"context": "Q?", "continuation": " A"})
    [task] = read_tasks(tmp_path)
    assert [task.prompts(i)[0].prompt for i in range(2)] == ["Q?\n", "Q?"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", r"task\.jsonl, line 2 is not valid JSON"),
        ("[1]", "line 2 must be a JSON object, got list"),
        ({"question": "?"}, "line 2 is no known example, it has question: write query, choices, gold; or"),
        ({"query": "?", "gold": 0}, "line 2 lacks choices: a multiple choice example has"),
        (CHOICES | {"gold": 3}, "gold must be the index of the right one, 0 to 2, got 3"),
        (CHOICES | {"gold": True}, "gold must be the index"),
        (CHOICES | {"choices": ["one"]}, "choices must be a list of at least two texts"),
        (CHOICES | {"choices": ["one", ""]}, "none of them empty"),
        (CLOZE | {"continuation": ""}, "continuation must be a text that is not empty"),
        (CLOZE | {"context": 3}, "context must be a text"),
        (CLOZE, r"mixes cloze and multiple choice examples: split it"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(record, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_tasks(write_task(tmp_path, CHOICES, record))


def test_a_folder_without_tasks_an_empty_file_and_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a folder: give one with one JSONL file per task"):
        read_tasks(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no task"):
        read_tasks(tmp_path)
    with pytest.raises(ValueError, match="holds no example"):
        read_tasks(write_task(tmp_path, ""))
    write_task(tmp_path, CLOZE)
    for text, message in {
        "other: {shots: 1}": r"settings of other, and there is no other\.jsonl",
        "task: {shot: 1}": "unknown key shot",
        "task: {shots: -1}": "shots must be a number from 0 to 100",
        "task: {delimiter: 3}": "delimiter must be a text",
        "task: 3": "must map the name of a task",
        "task: {": "not valid YAML",
    }.items():
        (tmp_path / "tasks.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_tasks(tmp_path)
