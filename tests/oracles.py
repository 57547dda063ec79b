"""What a patched model must compute, said by the unpatched model under a dense additive mask."""

import numpy as np
import torch

from hf_poslsh import PositionalHash
from hf_poslsh.slopes import resolve_sigma

SIGMA = (1.5, 4.0, 9.0, 40.0)


class NoRotation(torch.nn.Module):
    """Stands in for a host's rotary embedding: no rotation at all."""

    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary

    def forward(self, x, position_ids):
        rotation = self.rotary(x, position_ids)
        if isinstance(rotation, tuple):
            return torch.ones_like(rotation[0]), torch.zeros_like(rotation[1])
        return torch.ones_like(rotation)


def dense_logits(model, ids, weights, **kwargs):
    """Logits of an unpatched model whose layer l multiplies the attention weights by ``weights[l]``.

    ``weights[l]`` is ``(heads or 1, n, n)``, 0 where a key is hidden; every query must see some key.
    """

    def mask_of(layer):
        def replace(module, args, kwargs):
            kwargs["attention_mask"] = torch.as_tensor(weights[layer]).log().float()[None]
            return args, kwargs

        return replace

    layers = model.model.layers
    hooks = [
        layer.self_attn.register_forward_pre_hook(mask_of(index), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    try:
        with torch.no_grad():
            return model(ids, use_cache=False, **kwargs).logits
    finally:
        for hook in hooks:
            hook.remove()


def bounded_logits(model, ids, weights, far_keys, max_distance):
    """As ``dense_logits``, where keys of ``far_keys`` stand at the rotary distance min(i - j, max_distance).

    Every query is computed on its own, with all keys rotated by the host itself for that one query: key j at
    i - min(i - j, max_distance). Nothing of the package takes part.
    """
    base, n = model.model, ids.shape[1]

    def one_query_at_a_time(layer, forward):
        mask = torch.as_tensor(weights[layer]).log().float()[None]

        def attention(hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
            rows = []
            for query in range(n):
                places = torch.arange(n)
                near = torch.maximum(places, torch.tensor(query - max_distance))
                places = torch.where(far_keys, near, places)
                rotation = base.rotary_emb(hidden_states, places[None])
                kwargs["position_embeddings"] = rotation
                rows.append(forward(hidden_states, attention_mask=mask, **kwargs)[0][:, query])
            return torch.stack(rows, 1), None

        return attention

    for index, layer in enumerate(base.layers):
        layer.self_attn.forward = one_query_at_a_time(index, layer.self_attn.forward)
    try:
        with torch.no_grad():
            return model(ids, use_cache=False).logits
    finally:
        for layer in base.layers:
            del layer.self_attn.forward


def split_logits(model, ids, weights, sinks, max_distance, full):
    """As ``bounded_logits``, with other heads that see everything: those of the KV heads ``full[layer]``.

    A layer is computed once for each kind of head, with the columns of the other kind in its output projection 0.
    ``max_distance`` is None for true distances.
    """
    base, n = model.model, ids.shape[1]
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads

    def two_kinds_of_heads(layer, module, forward):
        weight = module.o_proj.weight.data
        is_full = torch.tensor([h // group in full[layer] for h in range(config.num_attention_heads)])
        is_full = is_full.repeat_interleave(config.head_dim)
        kinds = [(~is_full, weights[layer], sinks), (is_full, causal(n), torch.ones(n, dtype=torch.bool))]

        def attention(hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
            total = 0
            for columns, mask, far_keys in kinds:
                module.o_proj.weight.data = weight * columns
                rows = []
                for query in range(n):
                    places = torch.arange(n)
                    if max_distance is not None:
                        near = torch.maximum(places, torch.tensor(query - max_distance))
                        places = torch.where(far_keys, near, places)
                    kwargs["position_embeddings"] = base.rotary_emb(hidden_states, places[None])
                    dense = torch.as_tensor(mask).log().float()[None]
                    rows.append(forward(hidden_states, attention_mask=dense, **kwargs)[0][:, query])
                total = total + torch.stack(rows, 1)
            module.o_proj.weight.data = weight
            return total, None

        return attention

    for index, layer in enumerate(base.layers):
        layer.self_attn.forward = two_kinds_of_heads(index, layer.self_attn, layer.self_attn.forward)
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def causal(n):
    return np.tril(np.ones((1, n, n)))


def lsh_weights(config, n, heads=4, layers=2):
    """The mean masks of a config, from PositionalHash alone, causal, one ``(heads, n, n)`` per layer."""
    sigma = resolve_sigma(config.sigma, heads)
    fields = {"seed": config.seed, "sampler": config.sampler, "scope": config.scope}
    hashes = [PositionalHash.sample(sigma, config.num_samples, layer=layer, **fields) for layer in range(layers)]
    weights = [hash_.mask_mean(n) for hash_ in hashes]
    for weight in weights:
        weight[:, :, : config.sink_tokens] = 1.0
    return [weight * causal(n) for weight in weights]
