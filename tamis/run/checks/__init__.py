"""Preflight, criteria and runbooks: findings about a machine or a run."""
