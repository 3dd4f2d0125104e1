"""Triton's interpreter without two repeated searches, which take a third of its time."""

from __future__ import annotations

from typing import Any

import triton.runtime.interpreter as interpreter


def search_once() -> None:
    """Change the interpreter in this process; what it computes stays the same."""
    _patch_the_language_once_a_launch()
    _find_numpy_dtypes_once()


def _patch_the_language_once_a_launch() -> None:
    """A kernel that calls a function patches triton.language again for each call, although it is patched already."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None  # a call; a launch starts with an empty set, and needs the answer to undo the patches
        patched.add(module)
        return patch(function)

    def start(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        launch(self, *arguments, **options)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = start


def _find_numpy_dtypes_once() -> None:
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = look_up
