"""The model card of an exported folder, README.md: what the model is, what it was trained on, and how to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tamis import __version__
from tamis.config import Config
from tamis.config.size import parameter_count
from tamis.generate.load import LoadedModel
from tamis.run.files.directory import RunDirectory
from tamis.run.files.reading import read_json, read_last_lines

VAL_TAIL_BYTES = 1 << 20

LOADING = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)
ids = tokenizer("The history of", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))
```"""


def model_card(loaded: LoadedModel, precision: str) -> str:
    """Return the text of the card; it holds no path."""
    config, run = loaded.config, _run_of(loaded)
    facts = {
        "parameters": f"{parameter_count(config):,}",
        "attention": _attention(config),
        "context": f"{loaded.model.max_len:,} tokens",
        "tokenizer": f"{loaded.tokenizer.name}, {config.vocab_size:,} tokens",
        "weights": precision,
    }
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags: [tamis, sparse-attention]"]
    return "\n".join(
        [
            *front,
            "---",
            f"# {config.model.name}",
            "",
            f"A language model with {_attention(config)}, trained with Tamis {__version__}, step {loaded.step:,}.",
            *_table("", facts),
            *_table("Training", _training(config, loaded.step, run)),
            *_evaluation(run, loaded.step),
            "",
            "## Use",
            "",
            LOADING,
            "",
            "With the `tamis` package installed, attention runs on its kernels; without it, in plain PyTorch.",
            "",
        ]
    )


def _run_of(loaded: LoadedModel) -> RunDirectory:
    is_folder = loaded.source.is_dir() and loaded.source.suffix != ".pt"
    return RunDirectory(loaded.source if is_folder else loaded.source.parent)


def _attention(config: Config) -> str:
    kinds = set(config.layer_kinds)
    return (
        "Native Sparse Attention (arXiv 2502.11089)" if "nsa" in kinds else " and ".join(sorted(kinds)) + " attention"
    )


def _training(config: Config, step: int, run: RunDirectory) -> dict[str, str]:
    """Return what the run's files and configuration tell of the training; keys without a known value are left out."""
    train, metrics = config.train, _object(run.metrics_json)
    ended_here = metrics.get("steps_done") == step
    tokens, loss = metrics.get("tokens_seen") if ended_here else None, _validation_loss(run, step)
    facts = {
        "data": _data(config),
        "tokens": f"{tokens:,}" if isinstance(tokens, int) else None,
        "validation loss": None if loss is None else f"{loss:.4f} nats per token",
        "steps": f"{step:,} of {train.steps:,}",
        "sequence length": f"{train.seq_len:,}",
        "learning rate": f"{train.lr:g} after {train.warmup_steps:,} steps of warm-up",
        "recipe": f"{train.recipe} ({train.optimizer}, {train.schedule} schedule)",
        "weight decay": f"{train.weight_decay:g}",
        "compute precision": config.runtime.precision,
        "seed": str(train.seed),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _data(config: Config) -> str:
    data = config.data
    if data.dataset == "fineweb_edu" and not Path(data.hub_name).exists():
        return f"{data.hub_name}, {data.hub_subset}"
    names = {"sample": "State of the Union addresses", "synthetic": "random tokens", "fineweb_edu": "a hub dataset"}
    return names.get(data.dataset, "local files")


def _validation_loss(run: RunDirectory, step: int) -> float | None:
    for line in reversed(read_last_lines(run.val_csv, VAL_TAIL_BYTES)):
        cells = line.split(b",")
        try:
            if int(cells[0]) == step:
                return float(cells[1])
        except (ValueError, IndexError):
            continue
    return None


def _evaluation(run: RunDirectory, step: int) -> list[str]:
    """Return the section with the figures of `tamis eval`, if it measured this step."""
    results = _object(run.eval_json)
    rows = {**_own_figures(results, step), **_other_texts(results, step)}
    return _table("Evaluation", rows) if rows else []


def _own_figures(results: dict[str, Any], step: int) -> dict[str, str]:
    """Return the accuracy of each task, and bits per byte on the text that the run held out."""
    tasks = results.get("tasks")
    if results.get("step") != step or not isinstance(tasks, dict):
        return {}
    figures = {name: task for name, task in tasks.items() if isinstance(task, dict) and "accuracy" in task}
    rows = {name: f"{task['accuracy']} ± {task.get('standard_error', '?')}" for name, task in figures.items()}
    if isinstance(bits := results.get("bits_per_byte"), float):
        rows["bits per byte, held-out text"] = f"{bits:.4f}"
    return rows


def _other_texts(results: dict[str, Any], step: int) -> dict[str, str]:
    """Return bits per byte on each text that `--text` named."""
    texts = results.get("texts")
    found = texts.items() if isinstance(texts, dict) else ()
    figures = {name: text for name, text in found if isinstance(text, dict) and text.get("step") == step}
    return {
        f"bits per byte, the text {name}": f"{bits:.4f}"
        for name, text in figures.items()
        if isinstance(bits := text.get("bits_per_byte"), float)
    }


def _table(title: str, rows: dict[str, str]) -> list[str]:
    heading = ["", f"## {title}"] if title else []
    cells = [f"| {_cell(key)} | {_cell(value)} |" for key, value in rows.items()]
    return [*heading, "", "| | |", "|---|---|", *cells]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _object(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
