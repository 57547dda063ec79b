"""The banded pass under torch's function transforms: ``torch.func.grad`` and ``vmap`` work, the others say what does.

A custom operator alone would be wrong there without a word: forward-mode derivatives of it are 0. Outside of
transforms nothing here takes part, so that compiled graphs see the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

_REMEDY = "; use impl='reference', which has them"
SECOND = (
    f"the fast attention operator has no second derivatives (create_graph=True, gradients of gradients){_REMEDY}."
)
FORWARD = (
    f"the fast attention operator has no forward-mode derivatives (torch.func.jvp, jacfwd, forward_ad){_REMEDY}."
)


def transforms_active() -> bool:
    """Whether a function transform or forward-mode differentiation is at work; never in a compiled graph."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def transformable(
    forward_op: Callable[..., Any], backward_op: Callable[..., Any], saved_tables: int
) -> type[torch.autograd.Function]:
    """An operator as a function that transforms understand, its backward pass too.

    Args:
        forward_op: ``(query, key, value, *tables, *numbers) -> (out, lse)``.
        backward_op: ``(out_grad, lse_grad, query, key, value, out, lse, *tables, *numbers)``, the three gradients.
        saved_tables: how many of what follows query, key and value are tensors or None.

    Returns:
        A function with the arguments of ``forward_op``.
    """

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return backward_op(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError(SECOND)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise ValueError(FORWARD)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
            batch = _rows(inputs[2], in_dims[2])
            outs = Backward.apply(*_folded(info.batch_size, batch, in_dims, inputs, 7))
            return _unfolded(outs, info.batch_size), (0, 0, 0)

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return forward_op(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs[:3], *output, *inputs[3 : 3 + saved_tables])
            ctx.numbers = inputs[3 + saved_tables :]

        @staticmethod
        def backward(ctx: Any, out_grad: Any, lse_grad: Any) -> Any:
            grads = Backward.apply(out_grad, lse_grad, *ctx.saved_tensors, *ctx.numbers)
            return (*grads, *[None] * (saved_tables + len(ctx.numbers)))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise ValueError(FORWARD)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
            batch = _rows(inputs[0], in_dims[0])
            outs = Forward.apply(*_folded(info.batch_size, batch, in_dims, inputs, 3))
            return _unfolded(outs, info.batch_size), (0, 0)

    return Forward


def _rows(tensor: torch.Tensor, in_dim: int | None) -> int:
    """Batch size of an input ``(B, ...)`` apart from the mapped dimension."""
    return (tensor if in_dim is None else tensor.movedim(in_dim, 0)[0]).shape[0]


def _folded(size: int, batch: int, in_dims: Any, inputs: Any, data: int) -> list[Any]:
    """Inputs with the mapped dimension folded into the batch: ``data`` tensors ``(B, ...)``, then tables."""
    folded = []
    for index, (tensor, dim) in enumerate(zip(inputs, in_dims, strict=True)):
        if not isinstance(tensor, torch.Tensor):
            folded.append(tensor)
        elif dim is not None:
            rows = tensor.movedim(dim, 0)
            folded.append(rows.expand(size, batch, *rows.shape[2:]).flatten(0, 1))
        elif index < data or (tensor.shape[0] == batch and batch > 1 and _has_rows(index - data)):
            folded.append(tensor.expand(size, *tensor.shape).flatten(0, 1))
        else:
            folded.append(tensor)
    return folded


def _has_rows(table: int) -> bool:
    # Widths, shifts, slopes and reach belong to heads, the last table to sinks; those between have a row a batch row.
    return 4 <= table < 9


def _unfolded(outs: Any, size: int) -> tuple[torch.Tensor, ...]:
    return tuple(out.unflatten(0, (size, -1)) for out in outs)
