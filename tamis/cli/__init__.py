"""The `tamis` command line: one module per group of verbs. No torch."""
