"""Data: tokenizers, document sources, packing, loader, prepared shards, the embedded sample. No torch."""

from tamis.data.errors import DataError, EndOfData
from tamis.data.loader import Batch, Loader, document_offsets, stacked_offsets
from tamis.data.opening import merge_states, open_loader, validation_batches
from tamis.data.tokenizer import Tokenizer, tokenizer_for

__all__ = [
    "Batch",
    "DataError",
    "EndOfData",
    "Loader",
    "Tokenizer",
    "document_offsets",
    "merge_states",
    "open_loader",
    "stacked_offsets",
    "tokenizer_for",
    "validation_batches",
]
