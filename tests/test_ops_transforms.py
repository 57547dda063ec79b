"""torch.func and higher derivatives: right, or refused by a message of ours, on the fast operator."""

import pytest
import torch
from test_models import patched
from test_ops import F64, inputs

from hf_poslsh import PositionalHash, positional_lsh_attention
from hf_poslsh.ops.full import full_attention
from hf_poslsh.ops.functional import make_layout
from hf_poslsh.ops.rotary import Rotary

HASHES = PositionalHash.sample([1.0, 2.0, 4.0, 9.0], 6)
ROTARY = Rotary(10.0 ** -torch.linspace(0, 2, 8, dtype=torch.float64))
LAYOUTS = {
    "plain": {},
    "padded": {"key_positions": torch.stack([torch.arange(30), torch.arange(30) - 11])},
    "bounded distances": {"max_distance": 7, "rotary": ROTARY},
}


def loss(impl, **options):
    def compute(q, k, v):
        out, lse = positional_lsh_attention(q, k, v, HASHES, sink_tokens=2, impl=impl, return_lse=True, **options)
        return (out * torch.arange(out.numel()).reshape(out.shape).cos()).sum() + lse.where(
            lse > -1e9, 0.0
        ).square().sum()

    return compute


def many(amount=3):
    """Tensors ``(amount, 2, heads, 30, 16)``."""
    sets = [inputs(queries=30, seed=seed) for seed in range(amount)]
    return [torch.stack(tensors) for tensors in zip(*sets, strict=True)]


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_of_each_sample(options):
    tensors = many()
    arguments = (0, 1, 2)
    each = torch.func.vmap(torch.func.grad(loss("banded", **options), arguments))(*tensors)
    for index in range(3):
        leaves = [tensor[index].clone().requires_grad_() for tensor in tensors]
        expected = torch.autograd.grad(loss("reference", **options)(*leaves), leaves)
        alone = torch.func.grad(loss("banded", **options), arguments)(*(tensor[index] for tensor in tensors))
        torch.testing.assert_close([grad[index] for grad in each], list(expected), **F64)
        torch.testing.assert_close(list(alone), list(expected), **F64)


def test_vmap_over_some_of_the_tensors_and_over_another_dimension():
    q, k, v = many()
    out = torch.func.vmap(
        lambda q: positional_lsh_attention(q, k[0], v[0], HASHES), in_dims=1, out_dims=1
    )(q.movedim(0, 1))  # fmt: skip
    for index in range(3):
        expected = positional_lsh_attention(q[index], k[0], v[0], HASHES, impl="reference")
        torch.testing.assert_close(out[:, index], expected, **F64)


def test_vmap_goes_through_the_operator_once(recwarn):
    torch.func.vmap(loss("banded"))(*many())
    assert not [warning for warning in recwarn if "batching rule" in str(warning.message)]


def test_second_derivatives():
    leaves = [tensor[0].clone().requires_grad_() for tensor in many(1)]
    for impl in ("banded", "reference"):
        (grad,) = torch.autograd.grad(loss(impl)(*leaves), leaves[0], create_graph=True)
        if impl == "reference":
            grad.square().sum().backward()
            assert leaves[0].grad.abs().max() > 0
        else:
            with pytest.raises(ValueError, match=r"no second derivatives.*impl='reference'"):
                grad.square().sum().backward()
    with pytest.raises(ValueError, match="no second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(loss("banded"))(q, *leaves[1:]).square().sum())(leaves[0])


def test_forward_mode_is_never_silently_0():
    q, k, v = (tensor[0] for tensor in many(1))
    tangent = torch.func.jvp(loss("reference"), (q, k, v), (q, k, v))[1]
    step = 1e-6
    ahead, behind = (loss("reference")(*(t * (1 + s) for t in (q, k, v))) for s in (step, -step))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"no forward-mode derivatives.*impl='reference'"):
        torch.func.jvp(loss("banded"), (q, k, v), (q, k, v))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="no forward-mode derivatives"):
        loss("banded")(torch.autograd.forward_ad.make_dual(q, q), k, v)


def test_full_heads_too():
    q, k, v = many()
    layout = make_layout(q[0], k[0])

    def compute(q, k, v, impl="auto"):
        return full_attention(q, k, v, layout, 0.25, impl=impl, plain=True).square().sum()

    each = torch.func.vmap(torch.func.grad(compute))(q, k, v)
    for index in range(3):
        expected = torch.func.grad(lambda q, i=index: compute(q, k[i], v[i], "reference"))(q[index])
        torch.testing.assert_close(each[index], expected, **F64)
    with pytest.raises(ValueError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda q: compute(q, k[0], v[0]), (q[0],), (q[0],))


@pytest.mark.parametrize("fields", [{}, {"sink_tokens": 1, "max_distance": 5, "full_heads": [[1], [0]]}])
def test_gradients_of_each_row_through_a_model(family, ids, fields):
    model = patched(family, **fields)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def of_row(parameters, row):
        return torch.func.functional_call(
            model, parameters, (row[None],), {"labels": row[None], "use_cache": False}
        ).loss

    each = torch.func.vmap(torch.func.grad(of_row), in_dims=(None, 0))(parameters, ids)
    for index in range(2):
        model.zero_grad()
        model(ids[index : index + 1], labels=ids[index : index + 1], use_cache=False).loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(each[name][index], parameter.grad, atol=1e-5, rtol=1e-3)
