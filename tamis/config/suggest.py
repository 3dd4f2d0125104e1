"""The nearest known word for one that was mistyped. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The most similar known word, or None if none is similar: no suggestion is better than a wrong one."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(word: str | None) -> str:
    """The end of an error message that names a suggestion, if there is one."""
    return f"; did you mean {word}?" if word else ""
