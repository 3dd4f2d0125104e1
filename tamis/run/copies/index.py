"""What a store holds of a run: a folder step{N} for each checkpoint, whose copy.json is written last.

A folder without copy.json is incomplete. Files that disagree with it are damaged. Neither is ever used. copy.json lists
the checkpoint, its manifest, and the records of that moment. owner.json names the run directory that may write there.
Next to it lie the newest curves, events and report, for people to look at.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from tamis.run.copies.store import Store
from tamis.run.files.directory import RunDirectory
from tamis.run.files.reading import parse_json_line
from tamis.run.files.records import utc

INDEX = "copy.json"
OWNER = "owner.json"
RECORDS = (
    *("config.yaml", "run.info", "env.json", "training.csv", "val.csv", "metrics.json", "events.jsonl", "cost.json"),
    *("samples.jsonl", "eval.json", "preflight.json", "go_no_go.json", "judgement.json"),
)
EVIDENCE = ("heartbeat_rank0.jsonl", "gpu_usage.csv")  # large: copied with a checkpoint only
PAGES = ("report.html", "live.html")
_FOLDER = re.compile(r"step(\d{1,12})")
_TOKENIZER = re.compile(r"tokenizer-[0-9a-f]{12}\.(json|tiktoken)")  # the copy of a tokenizer's file that a run keeps
_PART_OF_CHECKPOINT = re.compile(r"checkpoint_step\d+\.pt/[\w.-]+")


@dataclass(frozen=True)
class FileSum:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StepCopy:
    """A complete copy of one checkpoint and its records."""

    step: int
    generation: int  # grows when a run goes back to an earlier step: copies of before are older, whatever their step
    checkpoint: str  # the sha256 in the checkpoint's manifest
    files: dict[str, FileSum]

    @property
    def folder(self) -> str:
        return f"step{self.step}"

    @property
    def age_order(self) -> tuple[int, int]:
        """Greater for newer copies."""
        return self.generation, self.step

    def to_json(self) -> bytes:
        return json.dumps(asdict(self) | {"time": utc()}).encode() + b"\n"


def record_names(run: RunDirectory) -> list[str]:
    """The small records; one that the run does not have may be among them."""
    return [*RECORDS, *sorted(path.name for path in run.path.glob("tokenizer-*") if is_tokenizer(path.name))]


def is_tokenizer(name: str) -> bool:
    return bool(_TOKENIZER.fullmatch(name))


def complete_copies(store: Store) -> dict[int, StepCopy]:
    """The complete copies by step."""
    found = {}
    for step in step_folders(store):
        copy = parse_copy(store.read(f"step{step}/{INDEX}"), step)
        if copy is not None:
            found[step] = copy
    return found


def step_folders(store: Store) -> list[int]:
    """The steps that have a folder, complete or not."""
    return sorted(int(match[1]) for name in store.names() if (match := _FOLDER.fullmatch(name)))


def newest_first(copies: dict[int, StepCopy]) -> list[StepCopy]:
    return sorted(copies.values(), key=lambda copy: copy.age_order, reverse=True)


def parse_copy(content: bytes | None, step: int) -> StepCopy | None:
    """The fields of a copy.json; None if there is none, or one that this version cannot trust."""
    fields = parse_json_line(content or b"")
    if fields is None or fields.get("step") != step:
        return None
    generation, checkpoint, files = (fields.get(key) for key in ("generation", "checkpoint", "files"))
    if type(generation) is not int or type(checkpoint) is not str or not isinstance(files, dict):
        return None
    sums = {name: _file_sum(name, entry, step) for name, entry in files.items()}
    whole = {name: entry for name, entry in sums.items() if entry is not None}
    names = RunDirectory("")
    has_checkpoint = any(name.partition("/")[0] == names.checkpoint(step).name for name in whole)
    if len(whole) < len(files) or not has_checkpoint or not {names.manifest(step).name, "config.yaml"} <= whole.keys():
        return None
    return StepCopy(step, generation, checkpoint, whole)


def _file_sum(name: str, entry: Any, step: int) -> FileSum | None:
    """The size and checksum of a file whose name may be written into a run directory."""
    if not _is_known(name, step) or not isinstance(entry, dict):
        return None
    size, digest = entry.get("bytes"), entry.get("sha256")
    return FileSum(size, digest) if type(size) is int and type(digest) is str else None


def _is_known(name: str, step: int) -> bool:
    names = RunDirectory("")
    checkpoint, manifest = names.checkpoint(step).name, names.manifest(step).name
    if _PART_OF_CHECKPOINT.fullmatch(name):
        return name.startswith(f"{checkpoint}/") and not name.endswith("/..")
    return is_tokenizer(name) or name in (checkpoint, manifest, *RECORDS, *EVIDENCE)


def owner_of(store: Store) -> dict[str, Any] | None:
    """Who may write there: `owner`, a random id, and `since`; None if no one has claimed the place."""
    content = store.read(OWNER)
    return None if content is None else parse_json_line(content) or {"owner": "unreadable"}


def write_owner(store: Store, owner: str) -> None:
    store.write(OWNER, json.dumps({"owner": owner, "since": utc()}).encode() + b"\n")
