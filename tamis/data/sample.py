"""The embedded sample: State of the Union addresses in FineWeb-Edu's columns, read as any parquet folder is."""

from __future__ import annotations

from pathlib import Path

from tamis.data.files import LocalFiles

SAMPLE_FOLDER = Path(__file__).parent / "assets" / "sample"


def sample_source() -> LocalFiles:
    return LocalFiles(SAMPLE_FOLDER)
