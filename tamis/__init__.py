"""Tamis trains language models with Native Sparse Attention, hands off."""

__version__ = "0.1.0"
