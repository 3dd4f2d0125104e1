"""Uploads of one run: which checkpoints are missing in the store, one checkpoint with its records, retention there."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from tamis.config import ConfigError
from tamis.run.copies.index import (
    EVIDENCE,
    INDEX,
    PAGES,
    FileSum,
    StepCopy,
    complete_copies,
    newest_first,
    owner_of,
    record_names,
    step_folders,
    write_owner,
)
from tamis.run.copies.store import Store, StoreError, Transfer
from tamis.run.files.directory import RunDirectory
from tamis.run.files.manifest import read_manifest, sha256_of, size_of
from tamis.run.files.reading import read_bytes, read_text
from tamis.run.files.records import write_text_atomic

MOST_RECORD_BYTES = 256 << 20


class CopyRefused(ConfigError):
    """The place belongs to another run; the message names the remedies."""


class SourceGone(Exception):
    """A checkpoint that the run deleted or damaged before it could be copied."""


def own_id(run: RunDirectory) -> str:
    """A random name of this run directory, by which a store recognises it."""
    with suppress(OSError):
        if known := read_text(run.copy_id).strip():
            return known
    write_text_atomic(run.copy_id, secrets.token_hex(16) + "\n")
    return read_text(run.copy_id).strip()


class Copier:
    """Copies the checkpoints of one run to one store. Not thread-safe."""

    def __init__(self, run: RunDirectory, store: Store, keep: int, transfer: Transfer) -> None:
        self.run, self.store, self.keep, self.transfer = run, store, keep, transfer
        self.copies: dict[int, StepCopy] = {}  # what the store holds complete
        self._unusable: set[int] = set()  # steps whose files disagree with their manifest
        self._seen: dict[str, tuple[int, int]] = {}  # record → modification time and size when it was copied last
        self._staging = run.path / ".copying"

    def claim(self) -> None:
        """Take the place, or raise CopyRefused if it belongs to another run; then learn what it holds."""
        if owner_of(self.store) is None:
            write_owner(self.store, own_id(self.run))
        self.require_own()
        self.copies = complete_copies(self.store)

    def require_own(self) -> None:
        owner = owner_of(self.store) or {}
        if owner.get("owner") != own_id(self.run):
            raise CopyRefused(
                f"the place that copy.to names belongs to a run of another machine or directory since "
                f"{owner.get('since', 'an unknown time')}: name another copy.to. If that run is gone, continue it "
                "here with tamis run --from and the same address"
            )

    def newest(self) -> int | None:
        """The step of the newest complete copy."""
        copies = newest_first(self.copies)
        return copies[0].step if copies else None

    def pending(self) -> list[int]:
        """Finished checkpoints that the store lacks, newest first; none that retention there would delete at once."""
        steps = self.run.checkpoints()[::-1]
        generation = self._generation()
        wanted = [step for step in steps if step not in self._unusable][: self.keep or None]
        return [step for step in wanted if not self._is_copied(step, generation)]

    def _is_copied(self, step: int, generation: int) -> bool:
        copy = self.copies.get(step)
        try:
            digest = read_manifest(self.run.manifest(step))["sha256"]
        except ValueError:
            return True  # deleted since, or damaged: nothing to copy
        return copy is not None and copy.generation == generation and copy.checkpoint == digest

    def _generation(self) -> int:
        """One more than that of copies which are beyond the run's newest checkpoint: the run went back."""
        last = max((copy.generation for copy in self.copies.values()), default=1)
        here = max(self.run.checkpoints(), default=None)
        beyond = [copy for copy in self.copies.values() if here is not None and copy.step > here]
        return last + 1 if any(copy.generation == last for copy in beyond) else last

    def copy_step(self, step: int) -> None:
        """Copy a checkpoint with its records, have the other end sum every file, then declare it complete.

        Raises SourceGone for a checkpoint that cannot be copied any more, and TransferCancelled.
        """
        self.require_own()
        generation = self._generation()
        folder = f"step{step}"
        try:
            sources = self._stage(step)
            sums = {name: FileSum(size_of(path), sha256_of(path)) for name, path in sources.items()}
            digest = self._require_whole(step, sources, sums)
            if self.copies.pop(step, None):  # of an earlier generation: incomplete while its files change
                self.store.remove(f"{folder}/{INDEX}")
            self._send(folder, sources, {name: entry.sha256 for name, entry in sums.items()})
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)
        self.require_own()
        copy = StepCopy(step, generation, digest, sums)
        self.store.write(f"{folder}/{INDEX}", copy.to_json())
        self.copies[step] = copy

    def copy_records(self) -> None:
        """Replace the curves, events and report in the store, as far as they have changed."""
        for name in [*record_names(self.run), *PAGES]:
            with suppress(FileNotFoundError):
                state = os.stat(self.run.path / name)
                if self._seen.get(name) != (state.st_mtime_ns, state.st_size):
                    self.store.write(name, read_bytes(self.run.path / name, MOST_RECORD_BYTES))
                    self._seen[name] = (state.st_mtime_ns, state.st_size)

    def retire(self) -> list[int]:
        """Delete all but the newest `keep` copies, and incomplete folders of older steps; 0 keeps all."""
        kept = [copy.step for copy in newest_first(self.copies)[: self.keep or None]]
        removed = [step for step in self.copies if step not in kept]
        unfinished = [step for step in step_folders(self.store) if step not in self.copies and step < min(kept)]
        for step in [*removed, *unfinished] if self.keep else []:
            self.store.remove(f"step{step}/{INDEX}")
            self.store.remove(f"step{step}")
            self.copies.pop(step, None)
        return removed

    def _send(self, folder: str, sources: dict[str, Path], digests: dict[str, str]) -> None:
        """Upload the files that are not there yet, then compare the checksums of what the other end holds."""
        is_new = not self.store.names(folder)
        missing = list(sources) if is_new else self._differing(folder, digests)
        if missing:
            self.store.put(folder, {name: sources[name] for name in missing}, self.transfer)
        if damaged := self._differing(folder, {name: digests[name] for name in missing}):
            for name in damaged:
                self.store.remove(f"{folder}/{name}")
            raise StoreError(f"{', '.join(damaged)} arrived damaged: the checksum there is not the one here")

    def _differing(self, folder: str, digests: dict[str, str]) -> list[str]:
        found = self.store.checksums([f"{folder}/{name}" for name in digests])
        return [name for name, digest in digests.items() if found.get(f"{folder}/{name}") != digest]

    def _stage(self, step: int) -> dict[str, Path]:
        """Name → file: links to the checkpoint, which retention cannot take away, and records as they are now."""
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir()
        checkpoint = self.run.checkpoint(step)
        staged: dict[str, Path] = {}
        try:
            parts = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
            for source in [*parts, self.run.manifest(step)]:
                name = f"{checkpoint.name}/{source.name}" if source.parent == checkpoint else source.name
                staged[name] = _link(source, self._staging / name)
        except FileNotFoundError:
            raise SourceGone(f"{checkpoint.name} was deleted here before it was copied") from None
        for name in [*record_names(self.run), *EVIDENCE]:
            with suppress(FileNotFoundError):
                staged[name] = Path(shutil.copyfile(self.run.path / name, self._staging / name))
        return staged

    def _require_whole(self, step: int, sources: dict[str, Path], sums: dict[str, FileSum]) -> str:
        """The checkpoint's own checksum; SourceGone unless its files agree with it."""
        checkpoint, manifest = self.run.checkpoint(step).name, self.run.manifest(step).name
        if checkpoint in sums:
            digest = sums[checkpoint].sha256
        else:
            parts = {name.partition("/")[2]: entry.sha256 for name, entry in sums.items() if "/" in name}
            listing = "".join(f"{parts[name]} {name}\n" for name in sorted(parts))
            digest = hashlib.sha256(listing.encode()).hexdigest()
        try:
            if read_manifest(sources[manifest])["sha256"] == digest:
                return digest
        except ValueError:
            pass
        self._unusable.add(step)
        raise SourceGone(f"{checkpoint} is damaged here, and is not copied")


def _link(source: Path, target: Path) -> Path:
    """A second name for a file; where the disk has no such links, the file itself."""
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        return source
    return target
