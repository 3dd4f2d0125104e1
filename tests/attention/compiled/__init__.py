"""Attention kernels compiled without a GPU: which registers, spills and shared memory they need."""
