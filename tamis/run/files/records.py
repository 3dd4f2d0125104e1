"""Small files that must never be half-written: logs that survive a resume, JSON and text replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tamis.run.files.console import print_error
from tamis.run.files.reading import open_to_append, parse_json_line, read_last_lines, read_text

TRAINING_HEADER = "step,loss,lr,toks_per_s"
VAL_HEADER = "step,loss,ppl"
MOST_CSV_BYTES = 1 << 30
MOST_SAMPLE_BYTES = 64 << 20
YEAR_10000 = 253402300800
_STEP = re.compile(r"[0-9]{1,18},")
ELSEWHERE = "use a folder that you may write to; a run can be copied to one"
NOT_ALLOWED = "check who may read or write it"
FULL = "free some space, then repeat the command"
WRITE_REMEDIES = {
    errno.EROFS: ELSEWHERE,
    errno.EACCES: NOT_ALLOWED,
    errno.EPERM: NOT_ALLOWED,
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
}


def write_atomic(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a temporary file, then put it in place: a reader sees the old content or the new, whole."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with errors_naming(path):
        try:
            with open_new(temporary) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Let an OSError of the block name this file, not the scratch file or folder that becomes it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise


@contextlib.contextmanager
def optional_write() -> Iterator[None]:
    """Turn an OSError of the block into a line on stderr: what the block writes is printed too, and that counts."""
    try:
        yield
    except OSError as error:
        print_error(f"not written: {os_error_text(error)}")


def os_error_text(error: OSError) -> str:
    """The file, what the system reports about it, and what to do."""
    if error.errno is None or error.strerror is None:  # a message of ours
        return str(error)
    place = "" if error.filename is None else f"{error.filename}: "
    remedy = WRITE_REMEDIES.get(error.errno)
    return f"{place}{error.strerror}{f'; {remedy}' if remedy else ''}"


def read_problem(error: OSError | UnicodeDecodeError) -> str:
    """What is wrong with a file that the message already names."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def open_new(path: Path, mode: str = "wb") -> IO[bytes]:
    """Create a scratch file with a predictable name; what lies there, a link say, is removed and never followed."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    return os.fdopen(descriptor, mode)


def write_text_atomic(path: str | Path, text: str) -> None:
    write_atomic(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def write_json_atomic(path: str | Path, value: Any) -> None:
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_directory(path: Path) -> None:
    """A rename lasts through a power cut only once its directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def utc(timestamp: float | None = None) -> str:
    """A Unix time, or now, as `2026-05-28T22:10:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(timestamp))


def is_time(value: object) -> bool:
    """True for a number that `utc` can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < YEAR_10000


class CsvLog:
    """A CSV file with a fixed header whose first column is the step; each row reaches the file at once."""

    def __init__(self, path: str | Path, header: str) -> None:
        self.path = Path(path)
        self.header = header
        self._waiting: list[str] = []  # rows a full disk refused; written with the next one

    def resume_at(self, step: int) -> None:
        """Keep the rows up to `step`, which a resumed run does not write again; 0 starts the file afresh.

        A half-written line, as a kill leaves it, goes too.
        """
        rows = [line for line in self._lines() if self._step_of(line) <= step]
        write_text_atomic(self.path, "\n".join([self.header, *rows]) + "\n")

    def steps(self) -> list[int]:
        """The steps that have a row."""
        return [self._step_of(line) for line in self._lines()]

    def row(self, step: int) -> list[float] | None:
        """The numbers of a step's row; None if it has none, or one with something else."""
        line = next((line for line in self._lines() if self._step_of(line) == step), "")
        try:
            return [float(cell) for cell in line.split(",")]
        except ValueError:
            return None

    def append(self, *values: float | int | str) -> None:
        row = ",".join(_cell(value) for value in values)
        if len(values) != len(self.header.split(",")):
            raise ValueError(f"{self.path.name} has the columns {self.header}, got the row {row}")
        self._waiting.append(row + "\n")
        with contextlib.suppress(OSError):  # a full disk must neither end the training nor cost a row
            self._write_waiting()

    def _write_waiting(self) -> None:
        with open_to_append(self.path) as file:
            rows, size = "".join(self._waiting).encode(), file.tell()
            try:
                complete = file.write(rows) == len(rows)
            except OSError:
                complete = False
            if complete:
                self._waiting.clear()
            else:
                file.truncate(size)

    def _lines(self) -> list[str]:
        """Complete rows, without the header; the last line counts only if its newline was written."""
        try:
            lines = read_text(self.path, MOST_CSV_BYTES).split("\n")[:-1]
        except FileNotFoundError:
            return []
        columns = len(self.header.split(","))
        return [line for line in lines if line.count(",") == columns - 1 and _STEP.match(line)]

    def _step_of(self, line: str) -> int:
        return int(line.split(",")[0])


@dataclass(frozen=True)
class Sample:
    """A held-out opening and how the model continued it."""

    step: int
    prompt: str
    text: str


class SampleLog:
    """samples.jsonl: one JSON object per line."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def resume_at(self, step: int) -> None:
        """Keep the samples up to `step`; a resumed run writes the later ones again."""
        kept = [sample for sample in self.read() if sample.step <= step]
        write_text_atomic(self.path, "".join(map(_sample_line, kept)))

    def append(self, samples: list[Sample]) -> None:
        with open_to_append(self.path) as file:
            file.write("".join(map(_sample_line, samples)).encode())

    def read(self, most_lines: int | None = None) -> list[Sample]:
        """The newest samples, oldest first; lines that are none are left out."""
        return [
            Sample(record["step"], record["prompt"], record["text"])
            for line in read_last_lines(self.path, MOST_SAMPLE_BYTES, most_lines)
            if (record := parse_json_line(line)) is not None and _is_sample(record)
        ]


def _sample_line(sample: Sample) -> str:
    return json.dumps(asdict(sample)) + "\n"


def _is_sample(record: dict[str, Any]) -> bool:
    texts = (record.get("prompt"), record.get("text"))
    return type(record.get("step")) is int and all(isinstance(text, str) for text in texts)


def _cell(value: float | int | str) -> str:
    return format(value, ".8g") if isinstance(value, float) else str(value)
