"""Verbs that build the model without training it: probe, estimate, profile, causality, self-check."""
