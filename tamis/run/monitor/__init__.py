"""Read-only views of a run: snapshot, alerts, text, screen."""
