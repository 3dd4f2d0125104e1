"""Attention over the chosen blocks, forward and backward."""
