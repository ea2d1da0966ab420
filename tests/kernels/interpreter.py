"""Triton's interpreter, made to treat bfloat16 as hardware does.

Triton 3.6 interprets kernels with numpy, which has no bfloat16: conversions from float32 truncate where hardware rounds
to nearest even, and dots multiply the raw bits. `mend` corrects both.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter


def mend() -> None:
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before anything imports Triton")
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_rounding(value, from_type, to_type, rounding):
        if from_type == tl.float32 and to_type == tl.bfloat16:
            return _round_to_bfloat16(value)
        return convert(value, from_type, to_type, rounding)

    def dot_widened(self, left, right, accumulator, *rest):
        return dot(self, _widen(left), _widen(right), accumulator, *rest)

    interpreter._convert_float = convert_rounding
    interpreter.InterpreterBuilder.create_dot = dot_widened


def _round_to_bfloat16(value: np.ndarray) -> np.ndarray:
    """The upper 16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FC0), rounded)


def _widen(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
