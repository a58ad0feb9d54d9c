# SPDX-License-Identifier: Apache-2.0
"""torch.func, both vmaps of torch, batched gradients and second derivatives through attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit import AuxRequest, create_block_mask, flex_attention, scaled_dot_product_attention
from lowbit.ops.attention import attention


def qkv(*leading: int) -> list[Tensor]:
    return [torch.randn(*leading, 2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def biased(bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5)
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i, j], mask)


class Calls(TorchDispatchMode):
    """Counts the calls of our ops that arrive at the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {"attention_forward": 0, "attention_backward": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("lowbit::"):
            self.count[name.removeprefix("lowbit::")] += 1
        return func(*args, **(kwargs or {}))


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, mask)


MASK = torch.randn(3, 2, 3, 5, 5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "more", "in_dims", "forward", "backward"),
    [
        (ours, (), 0, 1, 1),
        (ours, (), (1, 2, 3), 1, 1),
        (masked, (MASK,), 0, 1, 1),
        (masked, (MASK[:, :, :1, :, :1],), 0, 1, 1),
        (masked, (MASK[0, :1] > 0,), (0, 0, 0, None), 1, 1),
        (masked, (MASK[0, :1],), (0, 0, 0, None), 1, 3),    # its gradient is a sum over the entries
        (masked, (MASK[:, :1],), 0, 3, 3),                  # it would have to be copied for each of the batch
        (masked, (MASK[0],), (0, 0, 0, None), 3, 3),
        (ours, (), (0, None, None), 3, 3),
    ],
)  # fmt: skip
def test_vmap_joins_the_batch_where_it_can(function: Callable[..., Tensor], more: tuple[Tensor, ...], in_dims: Any, forward: int, backward: int) -> None:
    dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * (3 + len(more))
    entries = [*qkv(3), *(x.detach().requires_grad_(x.is_floating_point()) for x in more)]
    wrt = [x for x in entries if x.requires_grad]
    shared = [x[0] if dim is None and x.dim() == 5 and i < 3 else x for i, (x, dim) in enumerate(zip(entries, dims, strict=True))]
    inputs = [x if not dim else x.movedim(0, dim) for x, dim in zip(shared, dims, strict=True)]
    with Calls() as calls:
        found = torch.vmap(function, in_dims=in_dims)(*inputs)
        grads = torch.autograd.grad(found.square().sum(), wrt, materialize_grads=True)
    assert calls.count == {"attention_forward": forward, "attention_backward": backward}
    wanted = torch.stack([function(*(x if dim is None else x[i] for x, dim in zip(shared, dims, strict=True))) for i in range(3)])
    torch.testing.assert_close(found, wanted)
    for a, b in zip(grads, torch.autograd.grad(wanted.square().sum(), wrt, materialize_grads=True), strict=True):
        torch.testing.assert_close(a, b)


def test_vmap_of_dropout_and_of_mods_keeps_entries_apart() -> None:
    """Both count batches: joined to the batch, entry 1 would drop other probabilities than entry 0, and read another bias."""
    q = torch.randn(1, 2, 3, 5, 4).expand(3, 2, 3, 5, 4).contiguous()
    dropped = torch.vmap(lambda q: scaled_dot_product_attention(q, q, q, dropout_p=0.5), randomness="same")(q)
    assert torch.equal(dropped[0], dropped[1])
    per_batch = torch.randn(2)
    biased = torch.vmap(lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: s * per_batch[b]))(q)
    assert torch.equal(biased[0], biased[2])


def test_vmap_of_lse_and_largest_score() -> None:
    inputs = [x.detach() for x in qkv(3)]

    def both(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        aux = flex_attention(*tensors, return_aux=AuxRequest(lse=True, max_scores=True))[1]
        return aux.lse, aux.max_scores

    for found, wanted in zip(torch.vmap(both)(*inputs), zip(*map(both, *inputs), strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(wanted))


@pytest.mark.parametrize("function", [ours, theirs])
def test_gradients_per_sample(function: Callable[..., Tensor]) -> None:
    inputs = qkv(3)
    per_sample = torch.vmap(torch.func.grad(lambda *tensors: function(*tensors).square().sum(), argnums=(0, 1, 2)))(*inputs)
    for found, wanted in zip(per_sample, torch.autograd.grad(theirs(*inputs).square().sum(), inputs), strict=True):
        torch.testing.assert_close(found, wanted)


def test_gradients_per_sample_of_a_captured_bias() -> None:
    inputs, bias = qkv(), torch.randn(4, 3, 5, 5, dtype=torch.float64)
    gradient = torch.func.grad(lambda one: biased(one, *inputs).sin().sum())
    torch.testing.assert_close(torch.vmap(gradient)(bias), torch.stack([gradient(one) for one in bias]))


def test_jacobians() -> None:
    """jacrev differentiates the backward too: by formulas, as its tensors belong to no graph that autograd could be asked for."""
    q, k, v = (tensor.detach() for tensor in qkv())
    wanted = torch.autograd.functional.jacobian(lambda x: theirs(x, k, v), q)
    torch.testing.assert_close(torch.func.jacrev(lambda x: ours(x, k, v))(q), wanted)
    torch.testing.assert_close(torch.autograd.functional.jacobian(lambda x: ours(x, k, v), q, vectorize=True), wanted)


def test_gradients_for_a_batch_of_output_gradients() -> None:
    inputs, bias = qkv(), torch.randn(3, 5, 5, dtype=torch.float64, requires_grad=True)
    out = biased(bias, *inputs)
    gradients = torch.randn(4, *out.shape, dtype=torch.float64)
    wrt = (*inputs, bias)
    found = torch.autograd.grad(out, wrt, gradients, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(out, wrt, gradient, retain_graph=True) for gradient in gradients]
    for i, tensor in enumerate(found):
        torch.testing.assert_close(tensor, torch.stack([each[i] for each in wanted]))


def test_second_derivative_also_batched() -> None:
    inputs = tuple(tensor[:, :2, :3, :2].detach().requires_grad_() for tensor in qkv())
    assert torch.autograd.gradcheck(ours, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(ours, inputs, check_batched_grad=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_second_derivative_with_a_mod_is_refused_where_it_is_asked_for(dropout_p: float) -> None:
    q, k, v = qkv()
    mod = None if dropout_p else (lambda s, b, h, i, j: s * 2)
    out = flex_attention(q, k, v, mod, dropout_p=dropout_p)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(out.square().sum(), q, retain_graph=True)[0])
    with pytest.raises(NotImplementedError, match="attention: a second derivative must be without score_mod"):
        first.sum().backward()


def test_second_derivative_through_sink_and_lse() -> None:
    q, k, v = (tensor[:1, :2, :3].detach().requires_grad_() for tensor in qkv())
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def both(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k[:, :1], v[:, :1], scale=0.4, causal=True, sink=sink)[:2]

    assert torch.autograd.gradgradcheck(both, (q, k, v, sink))


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_causality_and_a_mask_hold_together_in_every_derivative(kind: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.randn(1, 1, 6, 6, dtype=torch.float64)
    mask = mask > -1 if kind == torch.bool else mask

    def call(*inputs: Tensor) -> Tensor:
        return attention(*inputs, scale=0.5, causal=True, mask=mask)[0]

    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    both = mask & causal if kind == torch.bool else mask.masked_fill(~causal, -torch.inf)
    wanted = torch.autograd.grad(functional.scaled_dot_product_attention(q, k, v, both, scale=0.5).pow(2).sum(), (q, k, v))
    for create_graph in (False, True):
        grads = torch.autograd.grad(call(q, k, v).pow(2).sum(), (q, k, v), create_graph=create_graph)
        for a, w in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a, w)
    transformed = torch.func.grad(lambda *inputs: call(*inputs).pow(2).sum(), argnums=(0, 1, 2))(*(x.detach() for x in (q, k, v)))
    for a, w in zip(transformed, wanted, strict=True):
        torch.testing.assert_close(a, w)
    assert torch.autograd.gradgradcheck(call, (q, k, v))
