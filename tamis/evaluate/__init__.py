"""How good a trained model is: `tamis eval` scores it on tasks in JSONL files and on held-out text."""
