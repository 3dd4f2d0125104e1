"""Local files of every kind, and what happens to those that are damaged."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tamis.config import Config
from tamis.data import DataError, open_loader
from tamis.data.local_files import TEXT_PIECE_BYTES, LocalFiles, read_text_file
from tamis.data.sample import SAMPLE_FOLDER
from tests.data.conftest import config_of, documents

FINEWEB_COLUMNS = ["text", "id", "dump", "url", "file_path", "language", "language_score", "token_count", "score"]


def texts_of(path: Path, column: str = "text") -> list[str]:
    source = LocalFiles(path, column)
    return [record.decode() for file in range(len(source.files)) for _, record in source.read(file) if record]


def config_on(path: Path, **overrides: object) -> Config:
    return config_of(data_dataset="fineweb_edu_local", data_local_path=str(path), data_epochs=None, **overrides)


def read_some(path: Path, **overrides: object):
    loader = open_loader(config_on(path, **overrides))
    for _ in range(20):
        loader.next()
    return loader


def write_parquet(path: Path, values: list, kind: pa.DataType | None = None) -> None:
    pq.write_table(pa.table({"text": pa.array(values, kind)}), path, row_group_size=7)


def test_the_sample_has_fineweb_edus_columns():
    names = pq.read_schema(next(SAMPLE_FOLDER.glob("*.parquet"))).names
    assert names[: len(FINEWEB_COLUMNS)] == FINEWEB_COLUMNS


def compressed(lines: str, codec: str, parts: int = 1) -> bytes:
    """Text as several compressed members in a row, as parallel compressors write it."""
    size = len(lines) // parts + 1
    pieces = [lines[i * size : (i + 1) * size].encode() for i in range(parts)]
    return b"".join(pa.Codec(codec).compress(piece, asbytes=True) for piece in pieces)


def test_every_kind_of_file_gives_the_same_documents(tmp_path):
    texts = documents(40)
    lines = "".join(json.dumps({"text": text, "more": 1}) + "\n" for text in texts)
    write_parquet(tmp_path / "a.parquet", texts)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(compressed(lines, "gzip", parts=3))
    (tmp_path / "a.jsonl.zst").write_bytes(compressed(lines, "zstd", parts=3))
    (tmp_path / "a.txt.zst").write_bytes(compressed("\n<|endoftext|>\n".join(texts), "zstd"))
    for name in ("a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        assert texts_of(tmp_path / name) == texts, name
    assert [text.rstrip("\n") for text in texts_of(tmp_path / "a.txt.zst")] == texts


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_reading_can_begin_at_any_record(tmp_path, name):
    texts = documents(40)
    write_parquet(tmp_path / "a.parquet", texts)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = LocalFiles(tmp_path / name)
    for start in range(42):
        assert list(source.read(0, start)) == [(i, texts[i].encode()) for i in range(start, 40)]


def test_large_strings_are_read(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["one", "two"], pa.large_string())
    assert texts_of(tmp_path / "a.parquet") == ["one", "two"]


def test_text_files_end_documents_at_their_marks(tmp_path):
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo\n\nstill two\n<|endoftext|>\nthree")
    assert texts_of(tmp_path / "a.txt") == ["one\n", "two\n\nstill two\n", "three"]


def test_long_text_without_marks_is_cut_between_paragraphs_and_nothing_is_lost(tmp_path):
    path = tmp_path / "long.txt"
    text = "".join(f"paragraph {i} of some length\n\n" for i in range(5000)) + "x" * 3 * TEXT_PIECE_BYTES
    path.write_text(text)
    pieces = [record.decode() for record in read_text_file(path)]
    assert len(pieces) > 5
    assert "".join(pieces) == text
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])


def test_a_line_without_end_is_cut_between_words_or_characters_and_nothing_is_lost(tmp_path):
    words, letters = "some words " * 40_000, "é–𝄞x" * 50_000
    for name, text in (("words.txt", words), ("letters.txt", letters), ("both.txt", letters + words)):
        (tmp_path / name).write_text(text)
        pieces = [record.decode() for record in read_text_file(tmp_path / name)]
        assert "".join(pieces) == text
        assert max(len(piece.encode()) for piece in pieces) <= 3 * TEXT_PIECE_BYTES * 4
    assert all(
        piece.endswith(("words ", "some "))
        for piece in [record.decode() for record in read_text_file(tmp_path / "words.txt")]
    )


def test_records_after_a_line_that_is_too_long_keep_their_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + 40 * 2**20 * b"x" + b'\n{"text": "c"}\n')
    records = list(LocalFiles(path).read(0))
    assert [number for number, _ in records] == [0, 1, 2]
    assert records[2][1] == b"c" and list(LocalFiles(path).read(0, 2)) == [(2, b"c")]


def test_a_folder_is_read_with_its_subfolders_but_not_hidden_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / ".cache.txt").write_text("hidden")
    assert texts_of(tmp_path) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "broken', "not JSON"),
        (b'{"other": "x"}', "no key 'text'"),
        (b'["text"]', "not an object"),
        (b'{"text": 5}', "not an object with text"),
        (b'{"text": "\xff\xfe"}', "invalid Unicode|invalid UTF-8"),
        (rb'{"text": "\ud800"}', "invalid Unicode"),
        (100_000 * b"[", "JSON that is nested too deeply"),
        (b'{"text": "' + 17 * 2**20 * b"x" + b'"}', "a line of more than 16 MiB"),
    ],
)
def test_an_unreadable_line_stops_with_file_and_line_or_is_counted(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"text": text}).encode() for text in documents(20)]
    path.write_bytes(b"\n".join([*good[:3], line, *good[3:]]) + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:4: ({reason}).*data\.on_bad_record"):
        read_some(path)
    loader = read_some(path, data_on_bad_record="skip")
    assert "unreadable records skipped" in loader.description
    assert "a.jsonl:4" in loader.description


def test_invalid_utf8_in_parquet_is_named_and_its_neighbours_are_kept(tmp_path):
    path = tmp_path / "a.parquet"
    values = [text.encode() for text in documents(20)]
    values[9] = b"bad \xff\xfe bytes"
    array = pa.array(values, pa.binary()).view(pa.string())  # as a careless writer leaves it
    pq.write_table(pa.table({"text": array}), path)
    with pytest.raises(DataError, match=r"a\.parquet:10: invalid UTF-8"):
        read_some(path)
    assert "records skipped" in read_some(path, data_on_bad_record="skip").description


def test_empty_documents_and_nulls_are_counted_and_leave_no_token(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, ["", None, "  \n", *documents(20)])
    loader = read_some(path, data_val_fraction=0.0)
    assert "empty documents" in loader.description
    tokens = open_loader(config_on(path, data_val_fraction=0.0)).next().tokens
    assert not ((tokens[..., 1:] == 256) & (tokens[..., :-1] == 256)).any()


@pytest.mark.parametrize("damage", ["truncated", "garbage", "flipped"])
def test_a_corrupted_parquet_file_is_an_error_that_names_it(tmp_path, damage):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": documents(3000)}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "garbage":
        content = bytearray(b"not parquet at all")
    else:
        content[100:2000] = bytes(1900)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as parquet"):
        read_some(path)


@pytest.mark.parametrize(("name", "codec"), [("a.jsonl.gz", "gzip"), ("a.jsonl.zst", "zstd")])
def test_a_truncated_compressed_file_is_an_error_that_names_it(tmp_path, name, codec):
    path = tmp_path / name
    content = compressed("".join(json.dumps({"text": text}) + "\n" for text in documents(3000)), codec)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=f"{name} cannot be read"):
        read_some(path)


def test_a_missing_column_names_the_key_and_the_existing_columns(tmp_path):
    write_parquet(tmp_path / "a.parquet", documents(5))
    with pytest.raises(DataError, match=r"no column 'body': set data\.text_column to one of text"):
        read_some(tmp_path, data_text_column="body")


def test_a_column_of_numbers_is_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", [1, 2, 3])
    with pytest.raises(DataError, match=r"int64.*data\.text_column"):
        read_some(tmp_path)


@pytest.mark.parametrize("path", ["missing", "empty", "file.csv"])
def test_a_path_without_data_is_an_error_that_names_the_key(tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"data\.local_path"):
        open_loader(config_on(tmp_path / path))
