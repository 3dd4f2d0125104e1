"""Compile the model's own kernels as M7C launches them, without a GPU, and read the resources they need.

Run as a program in a process without TRITON_INTERPRET: `python -m tests.model.ahead_of_time 90 bfloat16`; the last line
is JSON.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.attention.compiled.ahead_of_time import record_launches

ROWS, VOCAB, PADDED, WIDTH, DIM = 64, 50257, 50304, 2240, 768


def launch_everything(dtype: torch.dtype) -> None:
    from tamis.attention.kernels.split_heads import join_heads_rows, split_heads_rows
    from tamis.attention.layer import ROTATED, heads_of_parts
    from tamis.model.loss import cross_entropy_rows_
    from tamis.model.norm import add_and_norm_rows, add_and_norm_rows_backward
    from tamis.model.swiglu import swiglu_rows, swiglu_rows_backward

    logits, targets = torch.empty(ROWS, PADDED, dtype=dtype), torch.empty(ROWS, dtype=torch.long)
    for write_gradient in (False, True):
        for soft_cap in (0.0, 15.0):
            cross_entropy_rows_(logits, targets, VOCAB, write_gradient, soft_cap)
    merged = torch.empty(ROWS, 2 * WIDTH, dtype=dtype)
    swiglu_rows_backward._init_fn(swiglu_rows(merged), merged)  # called as an operator, it would load the compiler
    stream, weight = torch.empty(ROWS, DIM, dtype=dtype), torch.empty(DIM)
    total, normed, inverse = add_and_norm_rows._init_fn(stream, stream, weight, 1e-5)
    for d_total in (None, total):
        add_and_norm_rows_backward._init_fn(d_total, normed, total, inverse, weight)
    table = torch.empty(ROWS, 32)
    nsa = heads_of_parts(12, 2, 64)
    for sizes, rotated, piece in (([12, 2, 2], [True, True, False], 0), (nsa, ROTATED, 0), (nsa, ROTATED, 16)):
        heads = torch.empty(1, ROWS, sum(sizes), 64, dtype=dtype)
        how = table, table, sizes, rotated, piece
        join_heads_rows(split_heads_rows(heads, *how), *how)


def write_all_caches(dtype: torch.dtype) -> None:
    """Write tiles and tokens of both kinds of layer to their caches."""
    from tamis.attention.kernels.cache_writes import write_dense, write_tile, write_token
    from tamis.config import load_config
    from tamis.model import Decoder

    for attention in ("nsa", "dense"):
        config = load_config(None, ["model.n_layers=1", f"model.attention={attention}", "data.tokenizer=byte"])
        model = Decoder(config, max_len=ROWS * 64).to(dtype).requires_grad_(False)
        layer, cache, positions = (
            model.blocks[0].attention,
            model.new_cache().layers[0],
            torch.zeros(1, dtype=torch.long),
        )
        tile, step = (
            torch.empty(1, n, layer.project.out_features // layer.dim, layer.dim, dtype=dtype) for n in (64, 1)
        )
        if attention == "nsa":
            write_tile(layer, tile, cache, ROWS)
            write_token(layer, step, cache, positions)
        else:
            write_dense(layer, tile, cache.cached_BT2GD, ROWS)
            write_dense(layer, step, cache.cached_BT2GD, positions)


def main() -> None:
    compiled = record_launches(int(sys.argv[1]))
    for dtype in (getattr(torch, name) for name in sys.argv[2:]):
        launch_everything(dtype)
        write_all_caches(dtype)
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
