"""`tamis bench positions`: measures perplexity of held-out text by position, beyond the trained length.

`model.rope_scale` divides every position, in every branch: a scale of 2 maps twice the trained length to the range of
positions seen in training, but distances become finer than those trained on. The table shows both effects.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tamis.bench.document import begin_document
from tamis.config import Config, build_config
from tamis.data import validation_batches
from tamis.generate.load import device_for, load_model
from tamis.model import Decoder
from tamis.run.files.records import optional_write, write_json_atomic


def measure_positions(
    checkpoint: str | Path,
    scales: Sequence[float] = (1.0, 2.0, 4.0),
    reach: int = 4,
    sequences: int = 16,
    *,
    device: str = "auto",
    precision: str | None = None,
    out_dir: str | Path = "artifacts/bench",
) -> dict[str, Any]:
    """Measure perplexity over `reach` trained lengths; write positions.json; print the table and the document."""
    if reach < 1:
        raise ValueError(f"reach must be at least 1 trained length, got {reach}")
    document = begin_document("positions", device_for(device))
    plain = load_model(checkpoint, device="cpu")
    trained = plain.config.train.seq_len
    tokens = held_out(plain.config, reach * trained, sequences)
    print(f"{plain.source}: step {plain.step}, trained on {trained} tokens; {len(tokens)} held-out sequences")
    spans = [f"{i * trained}–{(i + 1) * trained - 1}" for i in range(reach)]
    print(f"{'rope_scale':>10}" + "".join(f"{span:>14}" for span in spans))
    rows = {}
    for scale in scales:
        model = load_model(
            checkpoint, max_len=reach * trained, rope_scale=scale, device=device, precision=precision
        ).model
        losses = loss_by_position(model, tokens).unflatten(0, (reach, trained)).mean(dim=1)
        rows[f"{scale:g}"] = [round(math.exp(loss), 4) for loss in losses.tolist()]
        print(f"{scale:10g}" + "".join(f"{value:14.3f}" for value in rows[f"{scale:g}"]), flush=True)
    document |= {
        "trained_length": trained,
        "step": plain.step,
        "sequences": len(tokens),
        "positions": spans,
        "perplexity": rows,
    }
    folder = Path(out_dir)
    with optional_write():
        folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(folder / "positions.json", document)
    print(json.dumps(document))
    return document


def held_out(config: Config, length: int, sequences: int) -> Tensor:
    """Return `[sequences, length + 1]` tokens of held-out documents."""
    tree = config.model_dump()
    lengths = {"seq_len": length, "length_schedule": [], "batch_tokens": None}
    tree["train"] |= {**lengths, "batch_size": 1, "eval_batches": sequences}
    batches = validation_batches(build_config(tree))
    if not batches:
        raise ValueError("the run held out no text: name one that was trained with data.val_fraction above 0")
    return torch.cat([torch.from_numpy(batch) for batch in batches]).long()


@torch.no_grad()
def loss_by_position(model: Decoder, tokens_BT: Tensor) -> Tensor:
    """Return the mean loss in nats at each position, over the sequences."""
    device = model.embedding.weight.device
    total = torch.zeros(tokens_BT.shape[1] - 1, dtype=torch.float64)
    for row in tokens_BT:
        hidden, _ = model(row[None, :-1].to(device))
        logits = model.logits(hidden[0]).float()
        total += F.cross_entropy(logits, row[1:].to(device), reduction="none").double().cpu()
    return total / len(tokens_BT)
