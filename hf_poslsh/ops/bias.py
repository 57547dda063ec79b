"""What an implementation is told besides q, k and v: the positional bias and the layout of the tokens.

``PositionBias`` says how much weight a key gets from a query some positions away; ``Layout`` says where the
tokens stand and which pairs the host model allows at all. Both are plain data: no attention here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch

from hf_poslsh.config import PosLSHConfig
from hf_poslsh.hashing import MAX_WIDTH, PositionalHash
from hf_poslsh.slopes import resolve_sigma

UNLIMITED = 2**62  # positions; a reach that excludes nothing


@dataclasses.dataclass(eq=False)  # not frozen: torch.compile reads the attributes of plain objects only
class PositionBias:
    """Weight of a pair (query position i, key position j) of head h, before the scores.

    ``weight = M~_h[i, j] * exp(-slope_h |i - j|)`` where ``|i - j| < reach_h``, else 0, with M~ the mean mask of
    ``hashes``; the first ``sink_tokens`` positions of a document have weight 1 for all its later queries.

    Args:
        hashes: the mean mask of every head. One bin of ``MAX_WIDTH`` means weight 1 everywhere.
        slopes: float64 ``(heads,)``, in 1 / positions; 0 where the hashes carry the whole bias.
        reach: int64 ``(heads,)``, in positions.
        sink_tokens: positions below this are sinks.
        tolerance: where not None, ``reach`` may be cut so far that the keys dropped from a row carry at most
            this share of its weight.
    """

    hashes: PositionalHash
    slopes: np.ndarray
    reach: np.ndarray
    sink_tokens: int = 0
    tolerance: float | None = None

    def __post_init__(self) -> None:
        self.num_heads = self.hashes.num_heads
        arrays = (self.hashes.widths, self.hashes.shifts, self.slopes, self.reach)
        # Widths, shifts, slopes and reach as the operators take them. On the CPU, whatever the ambient device:
        # from_pretrained builds models under the device "meta", and a bias is kept for the whole process.
        self.tensors = tuple(torch.tensor(array, device="cpu") for array in arrays)

    @classmethod
    def from_hashes(cls, hashes: PositionalHash, sink_tokens: int = 0) -> PositionBias:
        """The method's own bias (also ``fixed_blocks``)."""
        return cls(hashes, np.zeros(hashes.num_heads), hashes.reach, sink_tokens)

    @classmethod
    def alibi(cls, sigma: np.ndarray, tolerance: float | None = None, sink_tokens: int = 0) -> PositionBias:
        """Exact ALiBi, e^{-|i-j|/sigma}, of which a cut may drop the share ``tolerance``."""
        reach = np.full(len(sigma), UNLIMITED)
        return cls(_one_bin(len(sigma)), 1.0 / np.asarray(sigma), reach, sink_tokens, tolerance)

    @classmethod
    def window(cls, num_heads: int, window: int | None, sink_tokens: int = 0) -> PositionBias:
        """Weight 1 for keys less than ``window`` positions away (all of them where None)."""
        reach = np.full(num_heads, UNLIMITED if window is None else window, dtype=np.int64)
        return cls(_one_bin(num_heads), np.zeros(num_heads), reach, sink_tokens)

    def cut(self, reach: np.ndarray) -> PositionBias:
        """The same bias, not beyond ``reach`` (int64 ``(heads,)``)."""
        return dataclasses.replace(self, reach=np.minimum(self.reach, reach), tolerance=None)

    def of_heads(self, heads: slice | Sequence[int]) -> PositionBias:
        """The bias of some of the heads."""
        heads = heads if isinstance(heads, slice) else list(heads)
        hashes = PositionalHash(self.hashes.widths[heads], self.hashes.shifts[heads])
        return dataclasses.replace(self, hashes=hashes, slopes=self.slopes[heads], reach=self.reach[heads])


@torch.compiler.assume_constant_result  # a config's bias never changes, so a compiled model may keep it
def bias_from_config(config: PosLSHConfig, num_heads: int, layer: int = 0, step: int | None = None) -> PositionBias:
    """The bias of one layer's global query heads, as ``config`` describes it.

    Args:
        config: the method and its knobs.
        num_heads: number of global query heads.
        layer: layer index.
        step: training step where ``config.resample == "step"``; None for the fixed draws (evaluation).

    Raises:
        ValueError: ``config.sigma`` has another number of heads.
    """
    return _bias_from_config(config, num_heads, layer, step)


@functools.lru_cache(maxsize=1024)
def _bias_from_config(config: PosLSHConfig, num_heads: int, layer: int, step: int | None) -> PositionBias:
    if config.bias in ("window", "none"):
        return PositionBias.window(num_heads, config.window, config.sink_tokens)
    sigma = resolve_sigma(config.sigma, num_heads)
    if config.bias == "alibi":
        return PositionBias.alibi(sigma, config.tolerance, config.sink_tokens)
    if config.bias == "fixed_blocks":
        return PositionBias.from_hashes(PositionalHash.fixed_blocks(sigma), config.sink_tokens)
    hashes = PositionalHash.sample(
        sigma,
        config.num_samples,
        seed=config.seed,
        layer=layer,
        sampler=config.sampler,
        scope=config.scope,
        step=step if config.resample == "step" else None,
    )
    return PositionBias.from_hashes(hashes, config.sink_tokens)


def _one_bin(num_heads: int) -> PositionalHash:
    return PositionalHash(np.full((num_heads, 1), MAX_WIDTH), np.zeros((num_heads, 1)))


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where queries and keys stand, and which pairs the host model lets through.

    A pair is allowed when both tokens exist (position >= 0), lie in the same segment, the key is not later than
    the query (if ``is_causal``), is less than ``window`` positions away, and lies in the same chunk of ``chunk``
    positions. Along a row, segments never fall, and in a segment the positions of existing tokens rise.

    Args:
        query_positions: int64 ``(B or 1, Q)``; negative marks padding.
        key_positions: int64 ``(B or 1, K)``; negative marks a masked key, whatever it holds.
        query_segments: int64 ``(B or 1, Q)`` or None: the document of each query.
        key_segments: int64 ``(B or 1, K)`` or None.
        is_causal: keys later than the query are hidden.
        window: the host's own sliding window in positions, or None. Limits sinks too.
        chunk: the host's own attention chunk in positions, or None. Limits sinks too.
    """

    query_positions: torch.Tensor
    key_positions: torch.Tensor
    query_segments: torch.Tensor | None = None
    key_segments: torch.Tensor | None = None
    is_causal: bool = True
    window: int | None = None
    chunk: int | None = None
