"""Vector building blocks of the CPU kernel, as Numba intrinsics. No attention here.

Numba vectorises plain loops well but keeps no block of a matrix product in registers; ``multiply`` does.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

_FEATURES = binding.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4
ROWS = 4 if LANES == 8 else 8  # 2 * ROWS accumulators must fit the registers: 16 with AVX2, 32 elsewhere
BLOCK = 2 * LANES  # columns that one call of ``multiply`` computes


def _multiply(accumulate: bool):
    @intrinsic
    def product(typingctx, one, a, a_row, a_depth, b, b_depth, c, c_row, depth):
        if not isinstance(one, types.Float):
            return None
        signature = types.void(one, *[types.intp] * 8)

        def codegen(context, builder, signature, args):
            element = context.get_value_type(signature.args[0])
            vector = ir.VectorType(element, LANES)
            size = context.get_abi_sizeof(element)
            word, lane = ir.IntType(64), ir.IntType(32)
            zero = ir.Constant(vector, [0.0] * LANES)
            undefined = ir.Constant(vector, ir.Undefined)
            spread = ir.Constant(ir.VectorType(lane, LANES), [0] * LANES)
            _, a, a_row, a_depth, b, b_depth, c, c_row, depth = args

            def pointer(base, offset, kind):
                address = builder.add(base, builder.mul(offset, word(size)))
                return builder.inttoptr(address, kind.as_pointer())

            sums = []
            for row in range(ROWS):
                for column in range(2):
                    offset = builder.add(builder.mul(c_row, word(row)), word(column * LANES))
                    target = pointer(c, offset, vector)
                    start = builder.load(target, align=size) if accumulate else zero
                    sums.append((target, cgutils.alloca_once(builder, vector)))
                    builder.store(start, sums[-1][1])
            with cgutils.for_range(builder, depth) as loop:
                step = builder.mul(loop.index, b_depth)
                columns = [
                    builder.load(pointer(b, builder.add(step, word(column * LANES)), vector), align=size)
                    for column in range(2)
                ]
                for row in range(ROWS):
                    offset = builder.add(builder.mul(a_row, word(row)), builder.mul(loop.index, a_depth))
                    scalar = builder.load(pointer(a, offset, element), align=size)
                    factor = builder.insert_element(undefined, scalar, lane(0))
                    factor = builder.shuffle_vector(factor, undefined, spread)
                    for column in range(2):
                        slot = sums[2 * row + column][1]
                        term = builder.fmul(factor, columns[column], flags=("contract",))
                        builder.store(builder.fadd(term, builder.load(slot), flags=("contract",)), slot)
            for target, slot in sums:
                builder.store(builder.load(slot), target, align=size)
            return context.get_dummy_value()

        return signature, codegen

    return product


# C[ROWS, BLOCK] = sum over depth of A[ROWS, depth] B[depth, BLOCK], for the element type of ``one``.
# a, b, c: byte addresses; a_row, a_depth, b_depth, c_row: strides in elements. ``multiply_add`` adds to C.
multiply = _multiply(False)
multiply_add = _multiply(True)


@intrinsic
def fetch_add(typingctx, address, amount):
    """Adds to the int64 at a byte address, atomically; returns what was there before."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def _bits_to_float(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


# 2**f on [-1/2, 1/2], interpolated at Chebyshev nodes: relative error below 1e-8 in exact arithmetic.
_EXP2 = tuple(
    np.float32(c)
    for c in np.polynomial.chebyshev.Chebyshev.interpolate(np.exp2, 6, (-0.5, 0.5))
    .convert(kind=np.polynomial.Polynomial)
    .coef
)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = _EXP2


def exp2(x):
    """2**x for x <= 0 or a little above, in the type of x; float32 is written so that loops over it vectorise."""
    raise NotImplementedError("called from compiled code only")


@overload(exp2, inline="always")
def _exp2(x):
    if x == types.float32:

        def implementation(x):
            t = np.float32(-126.0) if x < np.float32(-126.0) else x  # a NaN passes
            whole = np.floor(t + np.float32(0.5))
            f = t - whole
            p = f * _C6 + _C5
            p = p * f + _C4
            p = p * f + _C3
            p = p * f + _C2
            p = p * f + _C1
            p = p * f + _C0
            return p * _bits_to_float((np.int32(whole) + np.int32(127)) << np.int32(23))

        return implementation

    return lambda x: math.exp(x * 0.6931471805599453)


@njit(nogil=True, cache=True)
def address(array, index):
    """Byte address of an element of a flat array."""
    return array.ctypes.data + index * array.itemsize
