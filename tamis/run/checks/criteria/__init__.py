"""Success criteria by subject. Each takes the Evidence of a run and returns a Finding, from the run's files alone.

Limits come from the run's own config and run.info.
"""
