"""Benchmarks: each prints a table first, then one line of JSON."""
