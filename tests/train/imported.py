"""Imports for the server that ranks are forked from; no garbage collection in a rank visits what is imported here."""

import gc
import importlib

gc.disable()  # imports make no garbage
for name in (
    "tamis.train.main",
    "torch.distributed.fsdp",
    "tamis.checkpoint.sharded",
    "torch._dynamo",
    "torch._inductor",
    "pyarrow.compute",
    "pyarrow.parquet",
    "tests.train.processes",
):
    importlib.import_module(name)
gc.freeze()
gc.enable()
