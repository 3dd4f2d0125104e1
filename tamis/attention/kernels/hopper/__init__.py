"""Gluon: kernels for Hopper that several branches use, and what those of single branches share."""
