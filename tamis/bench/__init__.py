"""Benches beside the code they measure: a table for people first, then one line of JSON."""
