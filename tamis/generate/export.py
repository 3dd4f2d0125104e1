"""`tamis export`: writes a trained model as a Hugging Face folder: weights, configuration, tokenizer, code, model card.

`transformers` loads it with `trust_remote_code=True`. The code is `modeling_tamis.py`, and for machines without this
package the decoder in plain PyTorch with copies of the modules that specify attention.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tamis.checkpoint.weights import EXPORTED_CONFIG, EXPORTED_TOKENIZER, EXPORTED_WEIGHTS
from tamis.data.tokenizer import END_OF_TEXT, TiktokenTokenizer, Tokenizer, byte_letters
from tamis.generate.load import LoadedModel, load_model
from tamis.generate.model_card import model_card
from tamis.run.files.console import print_line

PACKAGE = Path(__file__).parents[1]
MODELLING_FILE = PACKAGE / "generate" / "modeling_tamis.py"
CODE = [
    MODELLING_FILE,
    PACKAGE / "generate" / "plain_decoder.py",
    *(PACKAGE / "attention" / f"{name}.py" for name in ("compress", "packing", "reference", "spec")),
]


def export_command(checkpoint: str | Path, folder: str | Path, *, precision: str = "fp32") -> Path:
    """Write `folder` from a checkpoint or run directory, and return it; refuse a folder that is not empty."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already holds something: name a new folder, or empty it")
    loaded = load_model(checkpoint, device="cpu", precision=precision)
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, loaded.tokenizer, loaded.model.max_len)
    _write_code(folder)
    eot = loaded.tokenizer.eot
    _write_json(folder / "generation_config.json", {"eos_token_id": eot, "pad_token_id": eot, "use_cache": True})
    (folder / "README.md").write_text(model_card(loaded, precision), encoding="utf-8")
    _write_json(folder / EXPORTED_CONFIG, _describe(loaded, precision))
    _write_weights(folder, loaded)
    print_line(f"{folder}: {loaded.config.model.name}, step {loaded.step}, {precision}")
    return folder


def _write_code(folder: Path) -> None:
    """Copy the code; imports among the copies become relative, as `transformers` needs them.

    Functions of the copies that use kernels import them where they need them. These imports become calls, because
    `transformers` refuses code whose imports are not installed, and a machine without this package never gets there.
    """
    stems = "|".join(path.stem for path in CODE)
    for path in CODE:
        text = path.read_text(encoding="utf-8")
        text = re.sub(rf"^from tamis\.\w+\.({stems}) import", r"from .\1 import", text, flags=re.MULTILINE)
        if path != MODELLING_FILE:
            called = r'\1\3 = __import__("\2", fromlist=["\3"]).\3'
            text = re.sub(r"^( +)from (tamis\.\S+) import (\w+)\b.*$", called, text, flags=re.MULTILINE)
        (folder / path.name).write_text(text, encoding="utf-8")


def _write_weights(folder: Path, loaded: LoadedModel) -> None:
    from safetensors.torch import save_file

    weights = {f"decoder.{name}": tensor.contiguous() for name, tensor in loaded.model.state_dict().items()}
    save_file(weights, folder / EXPORTED_WEIGHTS, metadata={"format": "pt"})


def _describe(loaded: LoadedModel, precision: str) -> dict[str, Any]:
    """Return config.json: the keys `transformers` reads, and under `tamis` those that build the model; no paths."""
    config, module = loaded.config, MODELLING_FILE.stem
    return {
        "model_type": "tamis",
        "architectures": ["TamisForCausalLM"],
        "auto_map": {"AutoConfig": f"{module}.TamisConfig", "AutoModelForCausalLM": f"{module}.TamisForCausalLM"},
        "vocab_size": config.vocab_size,
        "hidden_size": config.model.dim,
        "num_hidden_layers": config.model.n_layers,
        "num_attention_heads": config.model.n_heads,
        "num_key_value_heads": config.model.n_kv_groups,
        "max_position_embeddings": loaded.model.max_len,
        "eos_token_id": loaded.tokenizer.eot,
        "bos_token_id": loaded.tokenizer.eot,
        "pad_token_id": loaded.tokenizer.eot,
        "tie_word_embeddings": False,  # the embedding is used as the output matrix, there is no second one to tie
        "use_cache": True,
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision],
        "tamis_step": loaded.step,
        "tamis": {
            "model": config.model.model_dump(),
            "nsa": config.nsa.model_dump(),
            "data": {
                "tokenizer": EXPORTED_TOKENIZER if loaded.tokenizer.file else config.data.tokenizer,
                "vocab_size": config.data.vocab_size,
            },
            "train": {"seq_len": config.train.seq_len},
        },
    }


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, max_len: int) -> None:
    """Write a built-in vocabulary as byte-level BPE files (bytes have no merges), a file as tokenizer.json."""
    if tokenizer.file is not None:
        return _write_own_tokenizer(folder, tokenizer, tokenizer.file, max_len)
    vocabulary, pairs = _byte_level(tokenizer)
    vocabulary[END_OF_TEXT] = tokenizer.eot
    merges = [" ".join(pair) for pair in pairs]
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    special = {f"{kind}_token": END_OF_TEXT for kind in ("bos", "eos", "unk", "pad")}
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": max_len, "add_prefix_space": False}
    settings |= {"padding_side": "left", **special}  # the next token follows the last one
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", special)


def _byte_level(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and merges of byte pairs, spelled in the letters of byte-level BPE files."""
    tokens = [tokenizer.to_bytes([i]) for i in range(tokenizer.eot)]
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    vocabulary = {spell(token): i for i, token in enumerate(tokens)}
    return vocabulary, [(spell(first), spell(second)) for first, second in _merges(tokens)]


def _write_own_tokenizer(folder: Path, tokenizer: Tokenizer, file: Path, max_len: int) -> None:
    """Write tokenizer.json from a file of the user's own; end-of-text is added where the file has none."""
    tree = _tree_of_ranks(tokenizer) if isinstance(tokenizer, TiktokenTokenizer) else json.loads(file.read_bytes())
    added = tree.setdefault("added_tokens", [])
    if not any(token["id"] == tokenizer.eot for token in added):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        is_taken = any(token["content"] == END_OF_TEXT for token in added)
        content = "<|endofdocument|>" if is_taken else END_OF_TEXT
        added.append({"id": tokenizer.eot, "content": content, "special": True, **flags})
    end = next(token["content"] for token in added if token["id"] == tokenizer.eot)
    _write_json(folder / EXPORTED_TOKENIZER, tree)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_len}
    settings |= {"padding_side": "left", "eos_token": end, "pad_token": end}
    _write_json(folder / "tokenizer_config.json", settings)


def _tree_of_ranks(tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    """The content of a tokenizer.json with the byte pairs and the pattern of tiktoken ranks."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as HubTokenizer

    vocabulary, merges = _byte_level(tokenizer)
    hub = HubTokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    hub.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(tokenizer.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    hub.decoder = decoders.ByteLevel()
    return dict(json.loads(hub.to_str()))


def _merges(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the pair each longer token was merged from, in order: what remains when only earlier merges apply."""
    ranks = {token: i for i, token in enumerate(tokens)}
    pairs = []
    for rank, token in enumerate(tokens):
        if len(token) > 1:
            first, second = _split(token, ranks, rank)
            pairs.append((first, second))
    return pairs


def _split(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        candidates = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, i = min(candidates)
        assert rank < limit, f"{token!r} cannot be made from earlier tokens"
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
