"""Triton's interpreter without work that it repeats for every operation, which takes nine tenths of its time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton._utils import validate_block_shape
from triton.language import core


def repeat_nothing() -> None:
    """Change the interpreter in this process; what it computes stays the same."""
    _patch_the_language_once()
    _pass_the_semantic_once()
    _find_numpy_dtypes_once()
    _describe_shapes_once()
    # Whole numbers are added a second time in 64 bits, for an assertion that only a debug build makes.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._patch_lang(repeat_nothing)  # this module names triton.language, as one with kernels does
    _compute_usual_operands_directly()


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


def _pass_the_semantic_once() -> None:
    """Every call of the language goes through three functions that hand on one argument."""

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, function = interpreter.TritonSemantic(builder), getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        setattr(owner, name, call)

    interpreter._patch_attr = patch_attribute


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


# The dtype in which operands of two dtypes, or of a dtype and a Python number, are computed. Others take Triton's way,
# which finds the same after many more steps.
WHOLE = {("int32", "int32"): tl.int32, ("int64", "int64"): tl.int64}
MIXED = {("int32", "int64"): tl.int64, ("int64", "int32"): tl.int64}
COMPARED = WHOLE | MIXED | {("fp32", "fp32"): tl.float32, ("int32", int): tl.int32, ("int64", int): tl.int64}
COMPUTED = COMPARED | {("fp32", float): tl.float32, ("fp32", int): tl.float32}
DIVIDED = {pair: dtype for pair, dtype in COMPUTED.items() if dtype is tl.float32}
BITS = WHOLE | {("int1", "int1"): tl.int1}
OFFSETS = ("int32", "int64")


def _compute_usual_operands_directly() -> None:
    """Apply the numpy function at once to operands of the dtypes above; numpy broadcasts as Triton does."""

    def divide(a: Any, b: Any) -> Any:
        return (a - np.fmod(a, b)) // b  # towards zero

    for name, function, dtypes in (
        ("add", np.add, COMPUTED),
        ("sub", np.subtract, COMPUTED),
        ("mul", np.multiply, COMPUTED),
        ("truediv", np.divide, DIVIDED),
        ("floordiv", divide, {pair: dtype for pair, dtype in COMPARED.items() if dtype is not tl.float32}),
        ("mod", np.fmod, COMPUTED),
        ("and", np.bitwise_and, BITS),
        ("or", np.bitwise_or, BITS),
        ("xor", np.bitwise_xor, BITS),
    ):
        _replace(f"__{name}__", function, dtypes)
        _replace(f"__r{name}__", lambda a, b, function=function: function(b, a), dtypes)
    for name, function in (
        ("lt", np.less),
        ("le", np.less_equal),
        ("gt", np.greater),
        ("ge", np.greater_equal),
        ("eq", np.equal),
        ("ne", np.not_equal),
    ):
        _replace(f"__{name}__", function, COMPARED, tl.int1)
    core.tensor.__add__ = _pointers_or(core.tensor.__add__)
    core.tensor.__getitem__ = _new_axes_or(core.tensor.__getitem__)
    _skip_what_changes_nothing(interpreter.TritonSemantic)


def _replace(name: str, function: Callable[..., Any], dtypes: dict[Any, Any], result: Any = None) -> None:
    """Let an operator apply `function` where the pair of dtypes is listed; the result has that dtype, or `result`."""
    other_way, tensor = getattr(core.tensor, name), core.tensor

    def apply(self: Any, other: Any) -> Any:
        kind = type(other)
        if kind is tensor:
            dtype = dtypes.get((self.dtype.name, other.dtype.name))
            if dtype is None:
                return other_way(self, other)
            data, is_scalar = function(self.handle.data, other.handle.data), other.type is other.dtype
        else:
            dtype = dtypes.get((self.dtype.name, kind))
            if dtype is None:
                return other_way(self, other)
            data, is_scalar = function(self.handle.data, other), True
        return _make(data, dtype, result or dtype, is_scalar and self.type is self.dtype)

    setattr(core.tensor, name, apply)


def _make(data: np.ndarray, held: Any, dtype: Any, is_scalar: bool) -> Any:
    handle = object.__new__(interpreter.TensorHandle)  # whose check of the item's size these dtypes pass
    handle.data, handle.dtype, handle.attr = data, held, {}
    return core.tensor(handle, dtype if is_scalar else _block_type(dtype, data.shape))


_block_types: dict[tuple[str, tuple[int, ...]], Any] = {}


def _block_type(dtype: Any, shape: tuple[int, ...]) -> Any:
    key = (dtype.name, shape)
    if key not in _block_types:
        _block_types[key] = core.block_type(dtype, shape)
    return _block_types[key]


def _pointers_or(add: Callable[..., Any]) -> Callable[..., Any]:
    def add_offsets(self: Any, other: Any) -> Any:
        dtype = self.dtype
        if type(dtype) is not core.pointer_type or type(other) is not core.tensor or other.dtype.name not in OFFSETS:
            return add(self, other)
        width = np.uint64(max(1, dtype.element_ty.primitive_bitwidth // 8))
        data = self.handle.data + width * other.handle.data.astype(np.uint64)
        return _make(data, self.handle.dtype, dtype, self.type is dtype and other.type is other.dtype)

    return add_offsets


def _new_axes_or(get: Callable[..., Any]) -> Callable[..., Any]:
    """Views like x[:, None]."""
    whole = slice(None)

    def index(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or self.type is self.dtype or any(s is not None and s != whole for s in slices):
            return get(self, slices)
        return _make(self.handle.data[slices], self.handle.dtype, self.dtype, False)

    return index


def _skip_what_changes_nothing(semantic: Any) -> None:
    """Most values are tensors already, most tensors have the dtype and the shape that is asked for."""
    to_tensor, cast, tensor = semantic.to_tensor, semantic.cast, core.tensor

    def convert(self: Any, x: Any, check_type: bool = True) -> Any:  # of every assignment in a kernel
        return x if type(x) is tensor else to_tensor(self, x, check_type)

    def cast_others(self: Any, x: Any, dtype: Any, rounding: str | None = None) -> Any:
        return x if x.dtype.name == dtype.scalar.name else cast(self, x, dtype, rounding)

    def broadcast(self: Any, a: Any, b: Any) -> tuple[Any, Any]:
        if a.type.is_block() or b.type.is_block():
            shape = _broadcast_shape(a.handle.data.shape, b.handle.data.shape)
            return _expand(a, shape), _expand(b, shape)
        return a, b

    semantic.to_tensor, semantic.cast, semantic.broadcast_impl_value = convert, cast_others, broadcast


_broadcast_shape = cache(np.broadcast_shapes)


def _expand(x: Any, shape: tuple[int, ...]) -> Any:
    if x.type.is_block() and x.handle.data.shape == shape:
        return x
    return _make(np.broadcast_to(x.handle.data, shape), x.handle.dtype, x.dtype, False)
