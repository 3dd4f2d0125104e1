"""Names and formats of every file in a run directory."""
