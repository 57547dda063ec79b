"""Prompts that ask a model to fetch from afar, and the attention mass that goes to what is to be fetched.

Which heads are then called good is decided in ``retrieval``. A mass is computed for a few query rows, so that memory
grows linearly with the prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_poslsh.evaluation import Question, passkey_prompt
from hf_poslsh.evaluation.documents import begins_with
from hf_poslsh.models.attention import host_limits

_ROWS = 1024  # query rows for which the mask of a layer with a window or chunk is built at a time
_MOST_ROWS = 64  # of a repeated passage: enough for a mean, and few enough for any length


@dataclass(frozen=True)
class Probe:
    """A prompt, and which keys each of some rows should attend to.

    Args:
        ids: int64 ``(N,)``, token ids.
        rows: int64 ``(R,)``, query positions.
        targets: int64 ``(R, T)``, key positions, each before its row.
    """

    ids: np.ndarray
    rows: np.ndarray
    targets: np.ndarray


def planted_probes(tokenizer: Any, length: int, prompts: int, seed: int) -> list[Probe]:
    """Passkey prompts: from the positions that predict the answer's digits to the digits that were planted.

    The depths are the middles of ``prompts`` equal parts of the text, the keys random numbers of five digits. Tokens
    of the answer without a digit, such as a space, do not count, neither as rows nor as targets.

    Args:
        tokenizer: of transformers.
        length: tokens of prompt and answer; the last one is not fed to the model.
        prompts: how many.
        seed: of the keys.

    Raises:
        ValueError: ``length`` leaves no room for text around the key.
    """
    keys = np.random.default_rng(seed).integers(10_000, 100_000, prompts)
    depths = (np.arange(prompts) + 0.5) / prompts
    return [
        _planted(tokenizer, passkey_prompt(tokenizer, str(key), length, float(depth)))
        for key, depth in zip(keys, depths, strict=True)
    ]


def _planted(tokenizer: Any, passkey: Question) -> Probe:
    prompt, answer = passkey.prompt, passkey.answer
    runs = np.lib.stride_tricks.sliding_window_view(prompt, len(answer))
    start = int((runs == answer).all(1).argmax())  # the filler has no digits: it is there once
    digits = [k for k, token in enumerate(answer) if any(map(str.isdigit, tokenizer.decode([int(token)])))]
    where = np.array(digits or range(len(answer)), np.int64)
    targets = np.broadcast_to(start + where, (len(where), len(where)))
    return Probe(np.concatenate([prompt, answer[:-1]]), len(prompt) - 1 + where, targets)


def natural_probes(
    tokenizer: Any, length: int, prompts: int, seed: int, texts: Sequence[str] | None = None
) -> list[Probe]:
    """A passage at the start of a text that comes again at its end: from the second copy to what the first says next.

    The passage has an eighth of the ``length`` tokens. Up to 64 positions, evenly spread over the second copy, are
    rows; the target of each, which an induction head attends to, is the token after its counterpart in the first
    copy, about seven eighths of the prompt away.

    Args:
        tokenizer: of transformers.
        length: tokens of a prompt.
        prompts: how many.
        seed: of random tokens.
        texts: what prompts are cut from, joined in this order and cut at evenly spread places; random tokens, special
            ones excepted, if None.

    Raises:
        ValueError: ``texts`` have too few tokens for one prompt.
    """
    bos = begins_with(tokenizer)
    start = np.array([] if bos is None else [bos], np.int64)
    passage = length // 8
    room = length - len(start) - passage
    if texts is None:
        ordinary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        bodies = list(np.random.default_rng(seed).choice(ordinary, (prompts, room)))
    else:
        encoded = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
        stream = np.array([token for ids in encoded for token in ids], np.int64)
        if len(stream) < room:
            raise ValueError(
                f"the texts have {len(stream)} tokens; prompts of length {length} need at least {room}: give more "
                "text or a smaller length."
            )
        places = np.linspace(0, len(stream) - room, prompts).round().astype(int)
        bodies = [stream[place : place + room] for place in places]
    steps = np.unique(np.linspace(0, passage - 2, min(passage - 1, _MOST_ROWS)).round().astype(np.int64))
    rows, targets = length - passage + steps, len(start) + steps + 1
    return [Probe(np.concatenate([start, body, body[:passage]]), rows, targets[:, None]) for body in bodies]


def probe_masses(base: Any, probe: Probe) -> np.ndarray:
    """The attention mass from a probe's rows to their targets, by KV head.

    The model's attention is replaced for one pass by one that computes the same output with SDPA and the rows'
    softmax beside it, under the layer's own scaling, window and chunk. Nothing of it is left behind.

    Args:
        base: an unpatched base model of a known family, in evaluation mode.
        probe: ``N`` tokens.

    Returns:
        float64 ``(layers, kv_heads)``: mean over the rows, the largest of the query heads that share the KV head.
    """
    masses = np.full((base.config.num_hidden_layers, base.config.num_key_value_heads), np.nan)

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        limits = host_limits(module.config, module.layer_idx)
        masses[module.layer_idx] = _masses(query[0], key[0], probe, scaling, *limits)
        return _attend(module, query, key, value, scaling, *limits), None

    ids = torch.from_numpy(probe.ids)[None].to(base.get_input_embeddings().weight.device)
    with _attention_of(base, attention), torch.no_grad():
        base(input_ids=ids, use_cache=False)
    return masses


@contextlib.contextmanager
def _attention_of(base: Any, function: Any) -> Iterator[None]:
    """Lets the layers of ``base`` call ``function``.

    An attention without a mask function of its name gets no ready-made mask, which would be n x n in some layers.
    """
    name = f"retrieval_{id(function):x}"
    holders: list[nn.Module] = [base, *(layer.self_attn for layer in base.layers)]
    configs: dict[int, Any] = {id(holder.config): holder.config for holder in holders}
    before = {key: config._attn_implementation for key, config in configs.items()}
    ALL_ATTENTION_FUNCTIONS[name] = function
    try:
        for config in configs.values():
            config._attn_implementation = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
        del ALL_ATTENTION_FUNCTIONS[name]


def _first_keys(rows: torch.Tensor, window: int | None, chunk: int | None) -> torch.Tensor:
    """The first key that each row may see, ``(R,)``; the last is the row itself."""
    first = torch.zeros_like(rows)
    if window is not None:
        first = (rows - window + 1).clamp(min=0)
    return first if chunk is None else torch.maximum(first, rows // chunk * chunk)


def _masses(
    query: torch.Tensor, key: torch.Tensor, probe: Probe, scaling: float | None, window: int | None, chunk: int | None
) -> list[float]:
    """Masses of one layer: query ``(H, N, D)``, key ``(H_kv, N, D)``, one KV head at a time."""
    rows, targets = (
        torch.from_numpy(np.ascontiguousarray(part)).to(key.device) for part in (probe.rows, probe.targets)
    )
    positions = torch.arange(key.shape[1], device=key.device)
    hidden = (positions > rows[:, None]) | (positions < _first_keys(rows, window, chunk)[:, None])
    groups = query[:, rows].float().unflatten(0, (key.shape[0], -1))  # (H_kv, G, R, D)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = []
    for group, keys in zip(groups, key, strict=True):
        scores = (group @ keys.float().T) * factor
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        picked = weights.gather(-1, targets.expand(len(weights), -1, -1)).double()
        found.append(picked.sum(-1).mean(-1).max().item())
    return found


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    chunk: int | None,
) -> torch.Tensor:
    """The host's SDPA of ``(1, H, N, D)``, as ``(1, N, H, D)``; under a window or chunk a few rows at a time."""
    n = query.shape[2]
    if min(window or n, chunk or n) >= n:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling)[0]
    outs = []
    for start in range(0, n, _ROWS):
        rows = torch.arange(start, min(start + _ROWS, n), device=query.device)
        firsts, stop = _first_keys(rows, window, chunk), start + len(rows)
        seen = slice(int(firsts[0]), stop)
        keys = torch.arange(seen.start, stop, device=query.device)
        mask = (keys <= rows[:, None]) & (keys >= firsts[:, None])
        out, _ = sdpa_attention_forward(
            module, query[:, :, start:stop], key[:, :, seen], value[:, :, seen], mask[None, None], scaling=scaling
        )
        outs.append(out)
    return torch.cat(outs, 1)
