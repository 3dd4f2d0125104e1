"""Everything around a run that needs no torch: its files, its heartbeats, who watches it, halts it and restarts it."""
