"""The language model: layers, NSA layer and its dense twin, decoder, caches, loss. Single-device code."""

from tamis.model.decoder import Decoder

__all__ = ["Decoder"]
