"""copies.json: what another place holds of a run, written by the process that copies."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field

from tamis.run.files.directory import RunDirectory
from tamis.run.files.reading import read_json
from tamis.run.files.records import is_time, write_json_atomic


@dataclass(frozen=True)
class CopiesState:
    """The complete copies, what is being copied, and why nothing can be, if so."""

    newest_step: int | None = None
    steps: list[int] = field(default_factory=list)
    copying_step: int | None = None
    last_success: float | None = None  # Unix time
    problem: str | None = None


def write_copies(run: RunDirectory, state: CopiesState) -> None:
    with suppress(OSError):  # a full disk must not end the copies, which may be what saves the run
        write_json_atomic(run.copies, asdict(state))


def read_copies(run: RunDirectory) -> CopiesState | None:
    """The state; None if nothing is copied, or if the file holds something else."""
    try:
        fields = read_json(run.copies)
    except (OSError, ValueError):
        return None
    if not isinstance(fields, dict):
        return None
    newest, copying, success, problem = (
        fields.get(key) for key in ("newest_step", "copying_step", "last_success", "problem")
    )
    return CopiesState(
        newest_step=newest if type(newest) is int else None,
        steps=[step for step in fields["steps"] if type(step) is int] if isinstance(fields.get("steps"), list) else [],
        copying_step=copying if type(copying) is int else None,
        last_success=success if is_time(success) else None,
        problem=problem if isinstance(problem, str) else None,
    )
