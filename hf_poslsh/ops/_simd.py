"""Vector building blocks of the CPU kernel, as Numba intrinsics. No attention here.

Numba vectorises plain loops well but keeps no block of a matrix product in registers; ``multiply`` does.
"""

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES = binding.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4
ROWS = 4 if LANES == 8 else 8  # 2 * ROWS accumulators must fit the registers: 16 with AVX2, 32 elsewhere
BLOCK = 2 * LANES  # columns that one call of ``multiply`` computes


class _Vectors:
    """Emits code on vectors of LANES numbers of the type of ``one``."""

    def __init__(self, context, builder, one) -> None:
        self.builder = builder
        self.element = context.get_value_type(one)
        self.size = context.get_abi_sizeof(self.element)
        self.type = ir.VectorType(self.element, LANES)
        self.name = f"v{LANES}{'f32' if self.size == 4 else 'f64'}"

    def constant(self, number: float):
        return ir.Constant(self.type, [number] * LANES)

    def spread(self, scalar):
        undefined = ir.Constant(self.type, ir.Undefined)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self.builder.shuffle_vector(
            self.builder.insert_element(undefined, scalar, ir.IntType(32)(0)), undefined, zeros
        )

    def pointer(self, base, offset, kind=None):
        """Pointer to a vector (or ``kind``), ``offset`` elements behind the byte address ``base``."""
        address = self.builder.add(base, self.builder.mul(offset, ir.IntType(64)(self.size)))
        return self.builder.inttoptr(address, (kind or self.type).as_pointer())

    def load(self, base, offset, kind=None):
        return self.builder.load(self.pointer(base, offset, kind), align=self.size)

    def add_product(self, a, b, c):
        """Sum a * b + c, fused where the machine can."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def call(self, name: str, argument):
        kind = ir.FunctionType(self.type, [self.type])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [argument])

    def reduce(self, name: str, arguments, flags):
        kind = ir.FunctionType(self.element, [argument.type for argument in arguments])
        name = f"llvm.vector.reduce.{name}.{self.name}"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments, fastmath=flags)

    def exp2(self, x):
        """2**x for x of at most about 0. float32: relative error 1e-7, and 2**-126 below -126; a NaN passes."""
        if self.size == 8:
            return self.call(f"llvm.exp2.{self.name}", x)
        b, floor = self.builder, self.constant(-126.0)
        x = b.select(b.fcmp_ordered("<", x, floor), floor, x)
        whole = self.call(f"llvm.floor.{self.name}", b.fadd(x, self.constant(0.5)))
        rest = b.fsub(x, whole)
        result = self.constant(_EXP2[-1])
        for coefficient in _EXP2[-2::-1]:
            result = self.add_product(result, rest, self.constant(coefficient))
        words = ir.VectorType(ir.IntType(32), LANES)
        bits = b.add(b.fptosi(whole, words), ir.Constant(words, [127] * LANES))
        return b.fmul(result, b.bitcast(b.shl(bits, ir.Constant(words, [23] * LANES)), self.type))


# 2**f on [-1/2, 1/2], interpolated at Chebyshev nodes: relative error below 1e-8 in exact arithmetic.
_EXP2 = [
    float(np.float32(c))
    for c in np.polynomial.chebyshev.Chebyshev.interpolate(np.exp2, 6, (-0.5, 0.5))
    .convert(kind=np.polynomial.Polynomial)
    .coef
]


@intrinsic
def largest(typingctx, one, values, vectors):
    """Largest of ``vectors`` * LANES numbers of the type of ``one`` from a byte address on; ``vectors`` >= 1."""

    def codegen(context, builder, signature, args):
        v = _Vectors(context, builder, signature.args[0])
        _, values, vectors = args
        top = cgutils.alloca_once_value(builder, v.load(values, ir.IntType(64)(0)))
        with cgutils.for_range(builder, vectors) as loop:
            block = v.load(values, builder.mul(loop.index, ir.IntType(64)(LANES)))
            before = builder.load(top)
            builder.store(builder.select(builder.fcmp_ordered(">", block, before), block, before), top)
        return v.reduce("fmax", [builder.load(top)], ("nnan",))

    return one(one, types.intp, types.intp), codegen


@intrinsic
def weigh(typingctx, one, scores, counts, vectors, shift):
    """scores[j] = counts[j] * 2**(scores[j] - shift) over ``vectors`` * LANES numbers; their sum.

    ``scores`` and ``counts`` are byte addresses; ``shift`` is of the type of ``one``.
    """

    def codegen(context, builder, signature, args):
        v = _Vectors(context, builder, signature.args[0])
        _, scores, counts, vectors, shift = args
        shift = v.spread(shift)
        total = cgutils.alloca_once_value(builder, v.constant(0.0))
        with cgutils.for_range(builder, vectors) as loop:
            at = builder.mul(loop.index, ir.IntType(64)(LANES))
            weight = builder.fmul(v.exp2(builder.fsub(v.load(scores, at), shift)), v.load(counts, at))
            builder.store(weight, v.pointer(scores, at), align=v.size)
            builder.store(builder.fadd(builder.load(total), weight), total)
        return v.reduce("fadd", [ir.Constant(v.element, 0.0), builder.load(total)], ("reassoc",))

    return one(one, types.intp, types.intp, types.intp, one), codegen


def _multiply(accumulate: bool):
    @intrinsic
    def product(typingctx, one, a, a_row, a_depth, b, b_depth, c, c_row, depth):
        def codegen(context, builder, signature, args):
            v = _Vectors(context, builder, signature.args[0])
            word = ir.IntType(64)
            _, a, a_row, a_depth, b, b_depth, c, c_row, depth = args
            cells = [(row, column) for row in range(ROWS) for column in range(2)]
            target = {
                (row, column): builder.add(builder.mul(c_row, word(row)), word(column * LANES))
                for row, column in cells
            }
            sums = {cell: cgutils.alloca_once(builder, v.type) for cell in cells}
            for cell in cells:
                builder.store(v.load(c, target[cell]) if accumulate else v.constant(0.0), sums[cell])
            with cgutils.for_range(builder, depth) as loop:
                step = builder.mul(loop.index, b_depth)
                columns = [v.load(b, builder.add(step, word(column * LANES))) for column in range(2)]
                step = builder.mul(loop.index, a_depth)
                for row in range(ROWS):
                    offset = builder.add(builder.mul(a_row, word(row)), step)
                    factor = v.spread(v.load(a, offset, v.element))
                    for column in range(2):
                        slot = sums[row, column]
                        builder.store(v.add_product(factor, columns[column], builder.load(slot)), slot)
            for cell in cells:
                builder.store(builder.load(sums[cell]), v.pointer(c, target[cell]), align=v.size)
            return context.get_dummy_value()

        return types.void(one, *[types.intp] * 8), codegen

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
def unowned(typingctx, array):
    """The same array without an owner: no reference is counted for it, so the caller must keep it alive."""

    def codegen(context, builder, signature, args):
        struct = context.make_array(signature.args[0])(context, builder, value=args[0])
        struct.meminfo = cgutils.get_null_value(struct.meminfo.type)
        struct.parent = cgutils.get_null_value(struct.parent.type)
        return struct._getvalue()

    return array(array), codegen


@njit(nogil=True, cache=True)
def address(array, index):
    """Byte address of an element of a flat array."""
    return array.ctypes.data + index * array.itemsize
