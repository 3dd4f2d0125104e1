"""Copies of a run away from its machine: stores, uploads while it trains, and `tamis run --from`."""
