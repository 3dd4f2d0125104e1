"""Triton's interpreter without work that it repeats for every operation, which takes three quarters of its time."""

from __future__ import annotations

from functools import cache
from typing import Any

import triton.runtime.interpreter as interpreter
from triton._utils import validate_block_shape
from triton.language import core


def repeat_nothing() -> None:
    """Change the interpreter in this process; what it computes stays the same."""
    _patch_the_language_once()
    _find_numpy_dtypes_once()
    _describe_shapes_once()
    # Whole numbers are added a second time in 64 bits, for an assertion that only a debug build makes.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _patch_the_language_once() -> None:
    """Each launch and call of a function patches triton.language. It stays patched: this process compiles nothing."""
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in patched:
            patched.add(module)
            patch(function)
        return interpreter._LangPatchScope()  # without changes to undo

    interpreter._patch_lang = patch_once


def _find_numpy_dtypes_once() -> None:
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = look_up


def _describe_shapes_once() -> None:
    """Every result describes its shape by a dozen new objects, although few shapes occur."""

    @cache
    def describe(shape: tuple[int, ...]) -> tuple[Any, str, int, Any, Any]:
        sizes, numel = core.tuple(shape), validate_block_shape(shape)
        constants = core.tuple([core.constexpr(size) for size in shape])
        return sizes, str(sizes), numel, constants, core.constexpr(numel)

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, text, self.numel, self.constant_shape, self.constant_numel = describe(sizes)
        self.name = f"<{text}, {element_ty}>"

    scalar_shape, scalar_numel = core.tuple([]), core.constexpr(1)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.shape, self.numel = type.constant_shape, type.constant_numel
        else:
            self.shape, self.numel = scalar_shape, scalar_numel

    core.block_type.__init__ = make_type
    core.tensor.__init__ = make_tensor
    core.tuple.__eq__ = lambda self, other: core.constexpr(self.values == list(other))
