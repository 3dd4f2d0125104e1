"""Attention over one contiguous range of keys per query: the compressed and the window branch."""
