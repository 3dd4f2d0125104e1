"""Reads evaluation tasks from a folder: one JSONL file per task, and an optional `tasks.yaml` with their settings.

| form            | keys                                  | the model is right if                                |
|-----------------|---------------------------------------|------------------------------------------------------|
| multiple choice | `query`, `choices`, `gold`            | the right choice is the likeliest after the query    |
| schema          | `context_options`, `continuation`, `gold` | the continuation is likeliest after the right context |
| cloze           | `context`, `continuation`             | it continues the context with exactly these tokens   |
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tamis.config.yaml_file import read_value
from tamis.run.files.reading import read_text

Kind = Literal["multiple choice", "schema", "cloze"]
SETTINGS_FILE = "tasks.yaml"
BETWEEN_SHOTS = "\n\n"
MOST_SHOTS = 100
KEYS: dict[Kind, tuple[str, ...]] = {
    "multiple choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "cloze": ("context", "continuation"),
}


@dataclass(frozen=True)
class Option:
    """One possible text: the model scores `answer` after `prompt`."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Example:
    options: tuple[Option, ...]
    gold: int  # index of the right option


@dataclass(frozen=True)
class Task:
    name: str
    kind: Kind
    examples: list[Example]
    shots: int = 0  # solved examples before each question
    delimiter: str | None = None  # between prompt and answer; None: a space, where neither side has one

    @property
    def chance(self) -> float:
        """The accuracy of a guess."""
        if self.kind == "cloze":
            return 0.0
        return sum(1 / len(example.options) for example in self.examples) / len(self.examples)

    def prompts(self, number: int) -> list[Option]:
        """Return the options of example `number` with their whole prompts: the solved examples come first.

        The solved examples are drawn from the task's others, the same for every model.
        """
        drawn = random.Random(number).sample(range(len(self.examples)), min(self.shots + 1, len(self.examples)))
        others = [i for i in drawn if i != number][: self.shots]
        solved = "".join(self._solved(self.examples[i]) + BETWEEN_SHOTS for i in others)
        return [
            Option(solved + option.prompt + self._between(option), option.answer)
            for option in self.examples[number].options
        ]

    def _solved(self, example: Example) -> str:
        option = example.options[example.gold]
        return option.prompt + self._between(option) + option.answer

    def _between(self, option: Option) -> str:
        if self.delimiter is not None:
            return self.delimiter
        is_joined = not option.prompt or option.prompt[-1].isspace() or option.answer[0].isspace()
        return "" if is_joined else " "


def read_tasks(folder: str | Path, shots: int | None = None, limit: int | None = None) -> list[Task]:
    """Return the tasks of a folder by name; a ValueError names the file, line and key to mend.

    Args:
        shots: solved examples before each question, for all tasks; None: as `tasks.yaml` has it, else 0.
        limit: take only so many examples of each task.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give one with one JSONL file per task (--tasks)")
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{folder} holds no task: give a folder with one JSONL file per task (--tasks)")
    settings = _read_settings(folder / SETTINGS_FILE, [path.stem for path in files])
    if shots is not None:
        settings = {path.stem: settings.get(path.stem, {}) | {"shots": shots} for path in files}
    return [_read_task(path, limit, settings.get(path.stem, {})) for path in files]


def _read_task(path: Path, limit: int | None, settings: dict[str, Any]) -> Task:
    kinds, examples = set(), []
    for where, record in _records(path):
        kind = _kind_of(where, record)
        kinds.add(kind)
        examples.append(_example(where, kind, record))
        if limit is not None and len(examples) == limit:
            break
    if not examples:
        raise ValueError(f"{path} holds no example: write one JSON object per line, or remove the file")
    if len(kinds) > 1:
        raise ValueError(f"{path} mixes {' and '.join(sorted(kinds))} examples: split it into one file for each")
    return Task(path.stem, kinds.pop(), examples, **settings)


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}, line {number}", _record(f"{path}, line {number}", line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file: {error.reason}") from None


def _record(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(record).__name__}")
    return record


def _kind_of(where: str, record: dict[str, Any]) -> Kind:
    for kind, keys in KEYS.items():
        if keys[0] in record:
            if missing := [key for key in keys if key not in record]:
                raise ValueError(f"{where} lacks {', '.join(missing)}: a {kind} example has {', '.join(keys)}")
            return kind
    forms = "; or ".join(", ".join(keys) for keys in KEYS.values())
    raise ValueError(f"{where} is no known example, it has {', '.join(record) or 'no key'}: write {forms}")


def _example(where: str, kind: Kind, record: dict[str, Any]) -> Example:
    if kind == "cloze":
        return Example((Option(_text(where, record, "context"), _text(where, record, "continuation")),), 0)
    several = "choices" if kind == "multiple choice" else "context_options"
    texts, gold = record[several], record["gold"]
    if not (isinstance(texts, list) and len(texts) > 1 and all(isinstance(text, str) and text for text in texts)):
        raise ValueError(f"{where}: {several} must be a list of at least two texts, none of them empty")
    if type(gold) is not int or not 0 <= gold < len(texts):
        raise ValueError(f"{where}: gold must be the index of the right one, 0 to {len(texts) - 1}, got {gold!r}")
    if kind == "multiple choice":
        query = _text(where, record, "query", may_be_empty=True)
        return Example(tuple(Option(query, text) for text in texts), gold)
    continuation = _text(where, record, "continuation")
    return Example(tuple(Option(text, continuation) for text in texts), gold)


def _text(where: str, record: dict[str, Any], key: str, may_be_empty: bool = False) -> str:
    value = record[key]
    if not isinstance(value, str) or not (value or may_be_empty):
        raise ValueError(f"{where}: {key} must be a text that is not empty, got {value!r}")
    return value


def _read_settings(path: Path, tasks: list[str]) -> dict[str, dict[str, Any]]:
    try:
        tree = read_value(read_text(path)) or {}
    except FileNotFoundError:
        return {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict) or not all(isinstance(value, dict) for value in tree.values()):
        raise ValueError(f"{path} must map the name of a task to its settings, as `arc_easy: {{shots: 10}}`")
    for name, settings in tree.items():
        if name not in tasks:
            raise ValueError(f"{path} has settings of {name}, and there is no {name}.jsonl next to it")
        _check_settings(f"{path}, {name}", settings)
    return tree


def _check_settings(where: str, settings: dict[str, Any]) -> None:
    if unknown := [key for key in settings if key not in ("shots", "delimiter")]:
        raise ValueError(f"{where} has the unknown key {unknown[0]}: it may have shots and delimiter")
    shots, delimiter = settings.get("shots", 0), settings.get("delimiter", "")
    if type(shots) is not int or not 0 <= shots <= MOST_SHOTS:
        raise ValueError(f"{where}: shots must be a number from 0 to {MOST_SHOTS}, got {shots!r}")
    if not isinstance(delimiter, str):
        raise ValueError(f"{where}: delimiter must be a text, got {delimiter!r}")
