"""Verbs for models and data: generate, eval, export, convert, data prepare, data check."""

from __future__ import annotations

import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from tamis.cli.common import (
    USE,
    Resolved,
    Tokenizer,
    Verb,
    Verbs,
    Words,
    loading_torch,
    resolve,
    split,
    tokenizer_override,
)
from tamis.config import Config, load_config
from tamis.run.files.console import announced, print_line
from tamis.run.locate import existing_model

app = typer.Typer()
verb = partial(app.command, cls=Verb, rich_help_panel=USE)

DATA_HELP = """Prepare token shards, or check the data.

Examples:

  tamis data prepare shards/ data.dataset=local data.local_path=my_texts

  tamis data check configs/m7c_125m_80g.yaml --batches 8
"""
data_app = typer.Typer(cls=Verbs, no_args_is_help=True, help=DATA_HELP)
app.add_typer(data_app, name="data", rich_help_panel=USE)
data_verb = partial(data_app.command, cls=Verb)

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="checkpoint_step{N}.pt, a run's directory, or an exported folder")
]


@verb()
def generate(
    checkpoint: Checkpoint,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="texts to continue; by default what stdin holds")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="the same; may be given several times")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="a file with one prompt a line")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="tokens to generate")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.8,
    top_k: Annotated[int, typer.Option(help="sample from the k likeliest tokens; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="sample from the likeliest tokens up to this probability")] = 1.0,
    seed: Annotated[int, typer.Option(help="seed of the sampling")] = 1337,
    max_len: Annotated[int | None, typer.Option(min=1, help="longest sequence; by default the trained one")] = None,
    rope_scale: Annotated[
        float | None, typer.Option(help="divide positions by this, beyond the trained length")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Continue a prompt from a checkpoint; text streams to stdout, speed to stderr.

    Examples:

      tamis generate artifacts/train_showcase "Fellow citizens" --max-new-tokens 100

      tamis generate artifacts/train_showcase < opening.txt
    """
    existing_model(checkpoint)
    loading_torch(sys.stderr)
    from tamis.generate.sample import generate_command

    generate_command(
        checkpoint,
        [*(prompts or []), *(prompt or [])],
        prompt_file,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_len=max_len,
        rope_scale=rope_scale,
        device=device,
    )


@verb()
def serve(
    checkpoint: Checkpoint,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: a free one")] = 8000,
    host: Annotated[
        str, typer.Option(help="address to listen on; beyond loopback TAMIS_API_KEY must be set")
    ] = "127.0.0.1",
    rows: Annotated[
        int | None, typer.Option(min=1, max=4096, help="completions at a time; by default what the memory holds")
    ] = None,
    max_len: Annotated[int | None, typer.Option(min=1, help="longest sequence; by default the trained one")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="a Jinja file that turns messages into a prompt")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Serve a model over OpenAI's HTTP interface, with a page at / to try it.

    Examples:

      tamis serve artifacts/train_showcase

      TAMIS_API_KEY=… tamis serve artifacts/m7c_125m --host 0.0.0.0 --port 8080
    """
    existing_model(checkpoint)
    loading_torch(sys.stderr)
    from tamis.serve.command import serve_model

    serve_model(
        checkpoint, host=host, port=port, rows=rows, max_len=max_len, device=device, chat_template=chat_template
    )


@verb("eval")
def evaluate(
    checkpoint: Checkpoint,
    tasks: Annotated[Path | None, typer.Option(metavar="FOLDER", help="a folder with one JSONL file per task")] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, max=100, help="solved examples before each question; by default as tasks.yaml")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="take only so many examples of each task")] = None,
    text: Annotated[Path | None, typer.Option(help="a file for bits per byte, not the held-out text")] = None,
    max_len: Annotated[int | None, typer.Option(min=1, help="longest sequence; by default the trained one")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Measure a model: bits per byte on held-out text, accuracy on tasks. A table, and eval.json in the run.

    Examples:

      tamis eval artifacts/m7c_125m

      tamis eval artifacts/m7c_125m --tasks tasks/ --shots 5
    """
    existing_model(checkpoint)
    loading_torch(sys.stderr)
    from tamis.evaluate.command import evaluate_model

    evaluate_model(checkpoint, tasks, shots=shots, limit=limit, text=text, max_len=max_len, device=device)


@verb()
def export(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="a new folder")],
    precision: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="of the weights")] = "fp32",
    upload: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="then upload it to the Hugging Face hub, privately")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="a new repository on the hub is public")] = False,
) -> None:
    """Write a Hugging Face folder: safetensors, config, tokenizer, model card and our modelling code.

    Examples:

      tamis export artifacts/m7c_125m exported/m7c --precision bf16

      tamis export artifacts/m7c_125m exported/m7c --upload me/m7c
    """
    existing_model(checkpoint)
    loading_torch(sys.stderr)
    from tamis.generate.export import export_command
    from tamis.generate.upload import require_upload, upload_folder

    if upload is not None:
        require_upload(upload)
    elif public:
        raise ValueError("--public is for a repository on the hub: give --upload OWNER/NAME with it")
    with announced(f"exporting {checkpoint}"):
        export_command(checkpoint, folder, precision=precision)
    if upload is not None:
        with announced(f"uploading {folder} to {upload}"):
            page = upload_folder(folder, upload, public=public)
        print(f"uploaded: {page}")


@verb()
def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="the file of DDP, the folder of FSDP, or a run's directory for its newest"
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="where to write; must not exist")],
    kind: Annotated[Literal["file", "folder", "safetensors"], typer.Option(help="what to write")] = "safetensors",
    redact: Annotated[
        bool, typer.Option("--redact", help="remove secrets of this environment from the configuration inside")
    ] = False,
) -> None:
    """Turn a checkpoint into the other kind, or into plain safetensors weights.

    Example: tamis convert artifacts/m7c_125m/checkpoint_step5000.pt m7c.safetensors
    """
    existing_model(checkpoint)
    loading_torch(sys.stderr)
    from tamis.checkpoint.convert import convert_checkpoint
    from tamis.run.files.manifest import newest_or_itself
    from tamis.run.handover.redaction import redactor

    rewrite = redactor(os.environ) if redact else None
    with announced(f"converting {checkpoint}"):
        written = convert_checkpoint(newest_or_itself(checkpoint), target, kind, rewrite)
    print_line(f"written: {written}")


@data_verb("prepare")
def data_prepare(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder for the shards")],
    words: Words = None,
    tokenizer: Tokenizer = None,
    workers: Annotated[int | None, typer.Option(min=1, help="threads; by default one per core")] = None,
) -> None:
    """Tokenise a source once into memory-mapped shards. After an interruption the same command continues.

    Examples:

      tamis data prepare shards/ configs/m7c_125m_80g.yaml

      tamis data prepare shards/ data.dataset=local data.local_path=parquet/ --tokenizer gpt2
    """
    from tamis.data.prepare import prepare

    words = [*(words or []), *tokenizer_override(tokenizer)]
    config = resolve(words)
    with announced(f"tokenising {config.data.dataset} into {out}") as tell:
        made = prepare(config, out, workers=workers, report=tell)
    print_line(f"done: {made.summary}; train on it: tamis run --data {shlex.quote(str(out))}")


@data_verb("check")
def data_check(
    words: Words = None,
    batches: Annotated[int, typer.Option(min=1, help="how many batches to fetch")] = 4,
    resolved: Resolved = False,
) -> None:
    """Check the data: a few batches as training gets them, with text, speed, the ranks' shares and validation.

    Example: tamis data check configs/m7c_125m_80g.yaml --batches 8
    """
    config = load_config(split(words)[0]) if resolved else resolve(words)
    raise typer.Exit(check_data(config, batches))


def check_data(config: Config, batches: int, show_text: bool = True) -> int:
    """Check the data for the verb and the two scripts. Announced, because a stream may keep it waiting."""
    from tamis.data.check import run_data_check

    with announced(f"reading {config.data.dataset}, waiting {config.data.loader_timeout_s:g} s at most for a batch"):
        return run_data_check(config, batches, show_text=show_text, say=print_line)
