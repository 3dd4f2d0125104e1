"""The vocabulary of a tokenizer file: its size belongs to the configuration, which describes the model. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tamis.config.yaml_file import ConfigError

VOCABULARY = {"gpt2": 50257, "byte": 257}  # end-of-text included: GPT-2's 50256, and 256 after the byte values
HUGGING_FACE, TIKTOKEN = ".json", ".tiktoken"
MOST_BYTES = 256 * 2**20


def tokenizer_file(name: str) -> Path:
    """The file of a `data.tokenizer` that is no built-in one: itself, or the tokenizer.json of a folder."""
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.suffix not in (HUGGING_FACE, TIKTOKEN) or not file.is_file():
        raise ConfigError(
            f"data.tokenizer is {name!r}: it must be gpt2, byte, a Hugging Face tokenizer.json (or a folder that "
            "holds one), or a .tiktoken file of ranks"
        )
    return file


def vocabulary_size(file: Path) -> int:
    """Tokens of a tokenizer file. End-of-text is the last: the file's own if its last token is special, else added."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES // 2**20} MiB")
        content = file.read_bytes()
        if file.suffix == TIKTOKEN:
            return 1 + max(int(line.split()[1]) for line in content.splitlines() if line) + 1
        return _size_of_json(json.loads(content))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"data.tokenizer: {file} cannot be read ({error!r}): give another file") from None


def _size_of_json(tree: dict[str, Any]) -> int:
    words = tree["model"]["vocab"]
    ids = words.values() if isinstance(words, dict) else range(len(words))
    added = {token["id"]: bool(token["special"]) for token in tree.get("added_tokens") or []}
    last = max([*ids, *added])
    return int(last) + (1 if added.get(last) else 2)
