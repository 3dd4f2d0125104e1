"""The language model: decoder, dense attention, norm, feed-forward and loss. Single-device code."""

from tamis.model.decoder import Decoder

__all__ = ["Decoder"]
