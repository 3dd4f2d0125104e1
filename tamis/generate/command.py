"""`tamis generate`: prompts in, text out as it is drawn, and how fast it was."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from tamis.config import Config
from tamis.generate.load import LoadedModel, load_model
from tamis.generate.sample import Sampling, generate_texts


def generate_command(
    checkpoint: str | Path,
    prompts: list[str] | None = None,
    prompt_file: str | Path | None = None,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1337,
    max_len: int | None = None,
    rope_scale: float | None = None,
    config: Config | None = None,
    device: str = "auto",
    precision: str | None = None,
    out: TextIO | None = None,
    notes: TextIO | None = None,
) -> None:
    """Continue every prompt from a checkpoint; text goes to `out`, facts and speed to `notes` (stdout and stderr)."""
    out, notes = out or sys.stdout, notes or sys.stderr
    sampling = Sampling(temperature, top_k, top_p, seed)
    texts = gather_prompts(prompts, prompt_file)
    loaded = load_model(
        checkpoint, expected=config, max_len=max_len, rope_scale=rope_scale, device=device, precision=precision
    )
    weight = loaded.model.embedding.weight
    print(f"{loaded.source}: step {loaded.step}, {weight.dtype} on {weight.device}", file=notes, flush=True)
    run = _stream if len(texts) == 1 else _collect
    started = time.perf_counter()
    _tell_speed(len(texts), started, run(loaded, texts, max_new_tokens, sampling, out), notes)


def gather_prompts(prompts: list[str] | None, prompt_file: str | Path | None) -> list[str]:
    """The prompts given, then those of the file, one a line; blank lines are no prompts."""
    texts = list(prompts or [])
    if prompt_file is not None:
        try:
            lines = Path(prompt_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"prompt file {prompt_file} cannot be read: {error}") from None
        texts += [line for line in lines if line.strip()]
    if not texts:
        raise ValueError("there is no prompt: give one with --prompt TEXT, or a file of them with --prompt-file")
    if not all(texts):
        raise ValueError("a prompt is empty: give at least one character to continue from")
    return texts


def _stream(loaded: LoadedModel, texts: list[str], max_new_tokens: int, sampling: Sampling, out: TextIO) -> list[float]:
    """Print one prompt and its continuation as it is drawn; when each token came."""
    came: list[float] = []
    for (piece,) in generate_texts(loaded.model, loaded.tokenizer, texts, max_new_tokens, sampling):
        out.write(piece if came else texts[0] + piece)  # a prompt that is refused is not printed
        came.append(time.perf_counter())
        out.flush()
    out.write("\n")
    return came[:-1]  # the last piece only closes an unfinished character


def _collect(
    loaded: LoadedModel, texts: list[str], max_new_tokens: int, sampling: Sampling, out: TextIO
) -> list[float]:
    """Continue all prompts together and print them in order when all are done; when each step's tokens came."""
    came, whole = [], list(texts)
    for pieces in generate_texts(loaded.model, loaded.tokenizer, texts, max_new_tokens, sampling):
        came.append(time.perf_counter())
        whole = [text + piece for text, piece in zip(whole, pieces, strict=True)]
    for number, text in enumerate(whole, 1):
        print(f"--- prompt {number} of {len(whole)}\n{text}", file=out)
    return came[:-1]


def _tell_speed(prompts: int, started: float, came: list[float], notes: TextIO) -> None:
    """The first step after the prompt also compiles and captures on a GPU: it is told apart from those that follow."""
    line = f"first token after {came[0] - started:.2f} s"
    if len(came) > 2:
        step_s = (came[-1] - came[1]) / (len(came) - 2)
        line += f", second after {came[1] - started:.2f} s, then {prompts / step_s:.1f} tokens/s"
        line += f" ({step_s * 1e3:.2f} ms a step, {prompts} prompts)"
    print(line, file=notes, flush=True)
