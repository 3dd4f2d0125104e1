"""Seeded odd data: files that are damaged, mistyped or made to exhaust a reader."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tamis.config import Config
from tamis.data import DataError, open_loader, validation_batches
from tamis.data.prepare import prepare
from tests.data.conftest import config_of, documents

BATCHES = 3
ODD_LINES = [
    b"", b"{", b"[]", b"null", b"5", b'"text"', b'{"text": null}', b'{"text": 5}', b'{"text": ["a"]}',
    b'{"other": "a"}',
    b'{"text": "\xff"}', rb'{"text": "\ud800"}', b"\0\0\0", b"[" * 100_000, b'{"a":' * 50_000, b'{"text": "  "}',
    b"9" * 5000, b'{"text": "' + b"x" * 300_000 + b'"}', b'{"text": "a", "text": 3}', b"NaN",
    b'{"text": "<|endoftext|>"}',
]  # fmt: skip


def failures_of(seed: int, folder: Path) -> list[str]:
    """Read one odd source as training does; return what was wrong with the answer."""
    rng = random.Random(seed)
    make = [_jsonl, _text, _parquet, _gzip, _manifest][seed % 5]
    folder = folder / str(seed)
    folder.mkdir()
    config = make(rng, folder)
    name = f"case {seed} ({make.__name__})"
    try:
        loader = open_loader(config)
        try:
            batches = [loader.next().tokens for _ in range(BATCHES)] + validation_batches(config)
        finally:
            loader.close()
    except DataError as error:
        text = str(error)
        plain = text.isprintable() and len(text) < 1500
        named = str(folder) in text or "data." in text
        return [] if plain and named else [f"{name}: the message names neither file nor key: {text[:300]!r}"]
    except BaseException as error:
        return [f"{name}: {type(error).__name__}: {error}"[:300]]
    ids = np.concatenate([batch.ravel() for batch in batches])
    return [] if ids.min() >= 0 and ids.max() < config.vocab_size else [f"{name}: token ids {ids.min()} to {ids.max()}"]


def _config(rng: random.Random, path: Path, **more: object) -> Config:
    keys = {"data_dataset": "fineweb_edu_local", "data_local_path": str(path), "data_epochs": None} | more
    return config_of(**keys, data_on_bad_record=rng.choice(["stop", "skip"]), data_loader_timeout_s=60.0)


def _jsonl(rng: random.Random, folder: Path) -> Config:
    lines = [json.dumps({"text": text}).encode() for text in documents(20, seed=rng.randrange(99))]
    for _ in range(rng.randint(1, 4)):
        lines.insert(rng.randrange(len(lines)), rng.choice(ODD_LINES))
    (folder / "a.jsonl").write_bytes(rng.choice([b"\n", b"\r\n", b"\n\n"]).join(lines))
    return _config(rng, folder)


def _text(rng: random.Random, folder: Path) -> Config:
    units = [b"word ", b"\n", b"\xff\xfe", b"<|endoftext|>\n", "é".encode(), b"\0", b"x", rng.randbytes(40)]
    parts = [rng.choice(units) * rng.choice([1, 50, 200_000]) for _ in range(rng.randint(1, 6))]
    (folder / "a.txt").write_bytes(b"".join(parts))
    return _config(rng, folder / "a.txt")


def _parquet(rng: random.Random, folder: Path) -> Config:
    columns = [documents(20), [5] * 20, [None] * 20, [b"\xff"] * 20, [["a"]] * 20, ["  "] * 20]
    name = rng.choice(["text", "text", "other"])
    pq.write_table(pa.table({name: rng.choice(columns)}), folder / "a.parquet")
    _damage(rng, folder / "a.parquet")
    return _config(rng, folder)


def _gzip(rng: random.Random, folder: Path) -> Config:
    lines = b"\n".join(json.dumps({"text": text}).encode() for text in documents(30))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(rng.choice([lines, b"", b"\0" * 30_000_000])))
    _damage(rng, folder / "a.jsonl.gz")
    return _config(rng, folder)


def _manifest(rng: random.Random, folder: Path) -> Config:
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents(40)))
    shards = folder / "shards"
    prepare(_config(rng, folder / "a.jsonl"), shards, workers=1)
    path = shards / "manifest.json"
    manifest = json.loads(path.read_text())
    odd = rng.choice([None, True, -1, 10**30, 1.5, "x", "../a.jsonl", [], {}, "train-00000.bin"])
    if rng.random() < 0.5:
        manifest[rng.choice(list(manifest))] = odd
    else:
        manifest["shards"][0][rng.choice(list(manifest["shards"][0]))] = odd
    path.write_text(json.dumps(manifest))
    _damage(rng, rng.choice([path, *shards.glob("*.bin")]))
    return _config(rng, shards, data_dataset="shards")


def _damage(rng: random.Random, path: Path) -> None:
    """Leave the file as it is, cut it, flip bytes in it, or replace it."""
    content = bytearray(path.read_bytes())
    kind = rng.choice(["none", "cut", "flip", "replace"])
    if kind == "cut":
        content = content[: rng.randrange(len(content) + 1)]
    elif kind == "flip" and content:
        for _ in range(5):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "replace":
        content = bytearray(rng.choice([b"", b"PAR1", b"\x1f\x8b", b"[" * 100_000, rng.randbytes(500)]))
    path.write_bytes(content)
