"""Text from a trained model: loading, sampling, export, and the long-context demonstration."""

from tamis.generate.sample import Sampling, generate, generate_text, generate_texts

__all__ = ["Sampling", "generate", "generate_text", "generate_texts"]
