"""Triton kernels of NSA and their launch tables. `tamis.attention.functional` is the way in."""
