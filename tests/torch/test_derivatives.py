# SPDX-License-Identifier: Apache-2.0
"""Derivatives of calls that are not a layer's: of our ops by hand, and of exported programs that are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
import lowbit.ops.optim  # noqa: F401  registers its op
import lowbit.training.int8_product  # noqa: F401  registers its op
from lowbit import _C, testing
from lowbit.ops.experts import experts as experts_of_numbers
from lowbit.ops.experts import gate_of
from lowbit.ops.gather_linear import gather_linear as gather_linear_of_numbers
from lowbit.ops.linear import linear as linear_of_numbers

NAMES = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("lowbit::"))
LINEAR = torch.ops.lowbit.linear
VALUES: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: torch.randn(2, 2, requires_grad=True),
    "List[Tensor]": lambda: [torch.randn(2, 2, requires_grad=True)],
    "int": lambda: 0,
    "float": lambda: 1.0,
    "bool": lambda: False,
    "List[int]": list,
    "List[bool]": list,
    "List[float]": list,
}


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, entry = name.removeprefix("lowbit::").partition(".")
    return getattr(getattr(torch.ops.lowbit, packet), entry or "default")


def refused(name: str) -> list[Any]:
    """Arguments by the types of the schema; each tensor requires a gradient."""
    types = [str(argument.type) for argument in overload(name)._schema.arguments]
    return [VALUES[text[9:-1] if text.startswith("Optional[") else text]() for text in types]


def with_a_gradient() -> dict[str, tuple[list[Any], list[Tensor], Callable[[], Any]]]:
    """By op: arguments, leaves of which it gives the gradient, and the function of layers with the same result."""
    packed, numbers = testing.pack_weight(torch.randn(20, 64), "int8"), (20, 64, _C.FORMATS["int8"], 0, False, 0)
    x, bias, mul, add = (torch.randn(*shape, requires_grad=True) for shape in ((3, 64), (20,), (3, 20), (3, 20)))
    experts, index = torch.stack([packed, packed.flip(0)]), torch.tensor([[0], [1], [0]])
    biases, router = torch.randn(2, 20, requires_grad=True), torch.rand(3, 1, requires_grad=True)
    down = testing.pack_weight(torch.randn(20, 10), "int8").expand(2, -1, -1)
    pair = [20, 64, *map(int, numbers[2:])], [20, 10, *map(int, numbers[2:])]
    q, k, v = (torch.randn(2, heads, 5, 32, requires_grad=True) for heads in (4, 2, 2))
    mask, sink = torch.randn(2, 1, 5, 5, requires_grad=True), torch.randn(4, requires_grad=True)
    attention = [q, k, v, 0.3, True, mask, 0.0, None, [], [], [], [], [], [128, 128], sink]
    weight, scale = torch.randn(4, 64, requires_grad=True), (torch.rand(4, 2) + 0.1).requires_grad_()
    int4 = _C.FORMATS["int4"], 32, _C.MAPPINGS["symmetric"]
    blocks = torch.randn(4, 32, 32, requires_grad=True)
    where = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    from lowbit.ops.attention import attention as attend
    from lowbit.ops.block_sparse_linear import block_sparse_linear
    from lowbit.ops.fake_quantize import fake_quantize_activations, fake_quantize_weight

    row = _C.X_FORMATS["int8_row"], 0
    softmax, experts_scale = (5, _C.SCORINGS["softmax"]), torch.rand(64, requires_grad=True)
    groups = torch.randn(64), 4, 2, 2, False
    u, taps = (torch.randn(shape, requires_grad=True) for shape in ((1, 9, 16), (16, 4)))
    rule = [(sign * torch.rand(shape)).requires_grad_() for sign, shape in ((1, (1, 9, 2, 8)), (1, (1, 9, 2, 8)), (1, (1, 9, 2, 16)), (-1, (1, 9, 2)), (1, (1, 9, 2)))]
    scan = [(sign * torch.rand(shape)).requires_grad_() for sign, shape in ((1, (1, 9, 2, 8)), (1, (1, 9, 2)), (-1, (2,)), (1, (1, 9, 1, 16)), (1, (1, 9, 1, 16)))]
    mamba = [(sign * torch.rand(shape)).requires_grad_() for sign, shape in ((1, (1, 9, 16)), (1, (1, 9, 16)), (-1, (16, 8)), (1, (1, 9, 1, 8)), (1, (1, 9, 1, 8)))]
    return {
        "linear": ([x, packed, *numbers, bias, 2, mul, add], [x, bias, mul, add], lambda: linear_of_numbers(x, packed, numbers, bias, 2, mul, add)),
        "gather_linear": ([x, experts, index, *numbers, biases], [x, biases], lambda: gather_linear_of_numbers(x, experts, index, numbers, biases)),
        "experts": ([x, experts, down, index, router, *pair, 4, True, False, 1.0, 0.0, 0.0, biases], [x, router, biases], lambda: experts_of_numbers(x, experts, down, index, router, *pair, gate_of(), biases)),
        "route": (
            [x, *softmax, *groups, True, 0.1, 0.0, 2.5, experts_scale],
            [x, experts_scale],
            lambda: lowbit.route(x, 5, correction=groups[0], groups=4, groups_kept=2, group_top=2, normalize=True, eps=0.1, scale=2.5, expert_scale=experts_scale),
        ),
        "attention_forward": (attention, [q, k, v, mask, sink], lambda: attend(q, k, v, scale=0.3, causal=True, mask=mask, sink=sink)),
        "causal_conv1d": ([u, taps, None, None, True], [u, taps], lambda: lowbit.causal_conv1d(u, taps, activation="silu")),
        "gated_delta_rule": ([*rule, None, True, 0.5], rule, lambda: lowbit.gated_delta_rule(*rule, l2norm=True, scale=0.5)),
        "ssd": ([*scan, 0.0, 1.0], scan, lambda: lowbit.ssd(*scan, dt_limit=(0.0, 1.0))),
        "selective_scan": ([*mamba, 0.0, 1.0], mamba, lambda: lowbit.selective_scan(*mamba, dt_limit=(0.0, 1.0))),
        "fake_quantize": ([weight, *int4, scale, None], [weight, scale], lambda: fake_quantize_weight(weight, int4, scale)),
        "fake_quantize_activations": ([x, *row], [x], lambda: fake_quantize_activations(x, *row)),
        "block_sparse_linear": ([x, blocks, *where, bias[:0].new_zeros(64).requires_grad_()], [x, blocks], lambda: block_sparse_linear(x, blocks, *where)),
    }


@pytest.mark.parametrize("name", NAMES)
def test_each_op_has_its_gradient_or_refuses_one(name: str) -> None:
    op, stem = overload(name), name.removeprefix("lowbit::")
    if stem == "int8_product":  # of torch.library.custom_op
        product = op(*[torch.randn(2, 32, requires_grad=True) for _ in range(2)])
        with pytest.raises(RuntimeError, match="no autograd formula"):
            product.sum().backward()
    elif stem.partition(".")[0] in ("dequantize", "embedding"):  # the dtype of `like` is read, and none of its numbers
        packed, like = testing.pack_weight(torch.randn(20, 64), "int8"), torch.empty(0, requires_grad=True)
        numbers = 20, 64, _C.FORMATS["int8"], 0, False
        read = (packed, torch.arange(3), like, *numbers, 0) if "embedding" in stem else (packed, *numbers, like)
        assert not op(*read).requires_grad
    elif stem not in (cases := with_a_gradient()):
        with pytest.raises(NotImplementedError, match="require a gradient"):
            op(*refused(name))
    else:
        arguments, leaves, layer = cases[stem]
        results = [result[0] if isinstance(result, tuple) else result for result in (op(*arguments), layer())]
        grad = torch.randn(results[0].shape)
        found, wanted = (torch.autograd.grad(result, leaves, grad) for result in results)
        torch.testing.assert_close(results[0], results[1])
        torch.testing.assert_close(found, wanted)


def exported() -> tuple[nn.Module, nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    lowbit.quantize_(model, lowbit.int8_weight_only())
    x = torch.randn(4, 64, requires_grad=True)
    return model, torch.export.export(model, (x.detach(),)).module(), x


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_program_gives_the_gradient_of_the_model(backend: str) -> None:
    model, program, x = exported()
    torch._dynamo.reset()
    wanted, found = (
        torch.autograd.grad(run(x).square().sum(), x)[0] for run in (model, torch.compile(program, backend=backend))
    )
    torch.testing.assert_close(found, wanted)


def test_other_paths_beside_an_op_get_their_gradient_too() -> None:
    model, program, x = exported()
    wanted, found = (torch.autograd.grad((run(x) * x[:, :8]).sum(), x)[0] for run in (model, program))
    torch.testing.assert_close(found, wanted)


def test_a_second_derivative_and_one_in_forward_mode() -> None:
    model, program, x = exported()
    seconds = []
    for run in (model, program):
        (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*seconds)
    tangent = torch.randn(4, 64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), tangent)
        found, wanted = (torch.autograd.forward_ad.unpack_dual(run(dual)).tangent for run in (program, model))
    torch.testing.assert_close(found, wanted)


def test_torch_func_is_told_to_take_a_layer() -> None:
    packed, numbers = testing.pack_weight(torch.randn(20, 64), "int8"), (20, 64, _C.FORMATS["int8"], 0, False, 0)
    with pytest.raises(NotImplementedError, match="linear: torch.func takes derivatives of lowbit's layers"):
        torch.func.grad(lambda x: LINEAR(x, packed, *numbers).sum())(torch.randn(3, 64))


def test_without_gradients_an_op_runs_whatever_requires_one() -> None:
    packed, numbers = testing.pack_weight(torch.randn(20, 64), "int8"), (20, 64, _C.FORMATS["int8"], 0, False, 0)
    x = torch.randn(3, 64, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(LINEAR.detached(x, packed, *numbers), LINEAR(x, packed, *numbers))
