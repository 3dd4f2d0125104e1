"""Verbs that build the model without a run: estimate, profile, causality, verify."""
