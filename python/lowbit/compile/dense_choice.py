# SPDX-License-Identifier: Apache-2.0
"""max_autotune of float layers: lowbit's packed kernels as one more choice in Inductor's autotuning on a CPU.

Freezing makes weights constants. Inductor then has two kinds of choices for ``act(x @ w.T + bias)``: a call of oneDNN,
MKL or ATen, and its own C++ templates. It passes the list through its preprocessing functions, times the result and
takes the fastest. The preprocessing function here appends `DenseChoice`; a feedback function receives the times. Both
do nothing in compilations without `compile_options(max_autotune=True)`.

A weight is packed when its call is timed, and when lowbit's choice is taken, into a constant that replaces Inductor's
own.

Inductor times repeated calls, so the weight is in a cache. For the 128 x 576 by 576 x 1536 products of a float32 model
on one thread of a Xeon with AMX, lowbit then takes 0.96 of MKL's time. From memory, where the other layers leave the
weight, it takes 1.03. So lowbit's choice is timed from memory and taken only if it still wins.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config, ir, select_algorithm
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.select_algorithm import ChoiceCaller, ExternKernelCaller
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes

from lowbit import _C
from lowbit.autotune.kept_times import machine
from lowbit.autotune.rows import forced_row
from lowbit.compile.post_ops import FoldPostOps
from lowbit.compile.report import FoldReport, TimedProduct, microseconds
from lowbit.formats.float import FLOAT_FORMATS
from lowbit.formats.spec import LinearSpec
from lowbit.ops.fakes import name_of
from lowbit.ops.registration import argument_names
from lowbit.quant.packing import all_finite, pack_weight

_LINEAR = torch.ops.lowbit.linear.detached
_MOST_COPIES, _MOST_BYTES = 16, 2**28  # max copies and max bytes of a weight that is timed
_NAME = "lowbit_linear"
_ACTIVATIONS = {("none", ""): "none", ("relu", ""): "relu", ("gelu", "none"): "gelu", ("gelu", "tanh"): "gelu_tanh",
                ("swish", ""): "silu"}  # fmt: skip
"""lowbit's activation by oneDNN's post-op and its algorithm."""
_log = logging.getLogger("lowbit.compile")


@dataclass(frozen=True, slots=True)
class Product:
    """The positions of the tensors of ``act(x @ w.T + bias) + add`` among the inputs of a choice.

    ``transposed`` means that the weight is ``[k, n]``, and ``vector`` that the bias is a constant vector, broadcast to
    all rows.
    """

    x: int
    weight: int
    bias: int | None = None
    add: int | None = None
    activation: int = 0
    transposed: bool = False
    vector: bool = False


class DenseChoice(ExternKernelCaller):
    """A choice that calls `lowbit::linear` with the packed weight of another choice."""

    def __init__(self, product: Product, like: ExternKernelCaller) -> None:
        ChoiceCaller.__init__(self, _NAME, like.input_nodes, like.layout, description="")
        self.choice, self.kwargs, self.bmreq, self.has_out_variant = like.choice, {}, None, False
        self.product, self.refusal = product, ""
        constants = V.graph.constants.values()
        self._bytes = sum(constant.numel() * constant.element_size() for constant in constants)
        self._state = machine(), forced_row(), f"{self._bytes >> 20} MiB of constants"

    def __str__(self) -> str:
        return f"DenseChoice({self.product})"

    def call_name(self) -> str:
        return "torch.ops.lowbit.linear.detached"

    def hash_key(self) -> str:
        """Return all that the time depends on besides the inputs. Inductor caches times by this key."""
        return repr((_NAME, self.product, self._state))

    def info_dict(self) -> dict[str, Any]:
        return {"backend": "lowbit", "kernel_call_name": self.call_name()}

    def autoheuristic_id(self) -> str:
        return _NAME

    def benchmark(self, *args: Tensor, out: Tensor) -> float:
        """Return the milliseconds of a call, measured as for Inductor's own choices, except that the weight is in a
        cache only if all weights of the model fit. Return infinity if no kernel row supports the call."""
        product = self.product
        bias = None if product.bias is None else args[product.bias]
        if bias is not None and product.vector:
            bias = bias.reshape(-1, bias.shape[-1])[0].contiguous()
        packed, numbers = _packed(args[product.weight], product.transposed)
        add = None if product.add is None else args[product.add].contiguous()

        copies = min(_MOST_COPIES, self._bytes // packed.nbytes, _MOST_BYTES // packed.nbytes)
        weights = itertools.cycle([packed, *(packed.clone() for _ in range(copies - 1))])

        def call() -> Tensor:
            return _LINEAR(args[product.x].contiguous(), next(weights), *numbers, bias, product.activation, add=add)

        try:
            out.copy_(call())
        except NotImplementedError as error:  # the forced kernel row does not support it
            self.refusal = str(error).partition("\n")[0]
            return float("inf")
        return benchmarker.benchmark_cpu(call)

    def output_node(self) -> ir.TensorBox:
        from torch._inductor.codegen.cpp_gemm_template import prune_tensors  # cannot be imported before Inductor runs

        product, inputs = self.product, self.input_nodes
        packed, numbers = _packed(_constant(inputs[product.weight]), product.transposed)
        values: dict[str, Any] = dict.fromkeys(argument_names("linear"))
        values |= dict(zip(argument_names("linear")[2:], numbers, strict=False))
        values |= {"activation": product.activation, "row": 0}
        values["x"] = ir.ExternKernel.require_contiguous(inputs[product.x])
        values["weight"] = V.graph.add_tensor_constant(packed)
        if product.bias is not None:
            bias = inputs[product.bias]
            values["bias"] = V.graph.add_tensor_constant(V.graph.constants[bias.get_name()]) if product.vector else bias
        if product.add is not None:
            values["add"] = ir.ExternKernel.require_contiguous(inputs[product.add])
        made = ir.TensorBox.create(ir.FallbackKernel.create(_LINEAR, *values.values()))
        prune_tensors(inputs, [value for value in values.values() if isinstance(value, ir.IRNode)])
        return made


def offer() -> None:
    """Offer lowbit's choice in every compilation with `compile_options(max_autotune=True)`. Further calls do
    nothing."""
    selector = select_algorithm.get_algorithm_selector_cache()
    if _with_ours not in selector.preprocessing_fns:
        selector.add_preprocessing_fn(_with_ours)
    if _note not in selector.feedback_saver_fns:
        selector.add_feedback_saver(_note)


def _report() -> FoldReport | None:
    """Return the report of the current compilation, or None if lowbit's max_autotune is not part of it."""
    owner = config.post_grad_custom_pre_pass
    return owner.report if isinstance(owner, FoldPostOps) and owner.max_autotune else None


def _with_ours(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    """Return the choices, with lowbit's added if it can compute the same."""
    report = _report()
    like = next((choice for choice in choices if isinstance(choice, ExternKernelCaller)), None)
    if report is None or like is None or like.choice.name not in _PRODUCTS:
        return choices
    product = _PRODUCTS[like.choice.name](like)
    problem = product if isinstance(product, str) else _problem(product, like)
    if not problem:
        return [*choices, DenseChoice(product, like)]
    if isinstance(product, Product):
        report.timed.append(TimedProduct(*_named(product, like), left=problem))
    else:
        n = like.layout.size[-1]
        report.timed.append(TimedProduct(f"n={n}", str(like.layout.size[0]), name_of(like.layout.dtype), left=product))
    return choices


def _note(
    timings: dict[ChoiceCaller, float], name: str, inputs: list[Any], choices: list[ChoiceCaller], *_: Any
) -> None:
    """Record the choice that was taken and the milliseconds of each."""
    report, ours = _report(), next((choice for choice in timings if isinstance(choice, DenseChoice)), None)
    if report is None or ours is None:
        return
    taken = min(timings, key=timings.__getitem__)
    seconds = {choice.name: time / 1e3 for choice, time in timings.items() if time != float("inf")}
    left = ours.refusal or ("" if _NAME in seconds else "no kernel row serves it")
    report.timed.append(TimedProduct(*_named(ours.product, ours), taken.name, microseconds(seconds), left))
    _log.info("max_autotune: %s of %s", taken.name, report.timed[-1])


def _named(product: Product, choice: ChoiceCaller) -> tuple[str, str, str]:
    """Return ``n x k``, m and the dtype, as the report shows them."""
    m, n = choice.layout.size
    k = choice.input_nodes[product.x].get_size()[-1]
    hint = V.graph.sizevars.optimization_hint(m)
    known = isinstance(m, int) or m.is_number
    return f"{n} x {k}", str(m) if known else f"{hint} (any)", name_of(choice.layout.dtype)


def _mkldnn(choice: ExternKernelCaller) -> Product | str:
    attr, count = choice.kwargs["attr"], len(choice.input_nodes)
    if attr == "add":  # x, what is added, weight and perhaps a bias
        return Product(0, 2, 3 if count == 4 else None, 1)
    name = _ACTIVATIONS.get((attr, choice.kwargs.get("algorithm") or ""))
    if name is None:
        return f"its post-op {attr} is none of ours"
    return Product(0, 1, 2 if count == 3 else None, activation=_C.ACTIVATIONS[name])


def _addmm(choice: ExternKernelCaller) -> Product | str:
    if choice.kwargs.get("alpha", 1) != 1 or choice.kwargs.get("beta", 1) != 1:
        return "alpha or beta is not 1"
    return Product(1, 2, bias=0, transposed=True, vector=True)


_PRODUCTS = {
    "_linear_pointwise": _mkldnn,
    "_linear_pointwise.binary": _mkldnn,
    "_mkl_linear": lambda choice: Product(0, 2),  # x, the weight in MKL's layout, the weight
    "mm": lambda choice: Product(0, 1, transposed=True),
    "addmm": _addmm,
    "bias_addmm": _addmm,
}


def _problem(product: Product, choice: ExternKernelCaller) -> str:
    """Return why `lowbit::linear` cannot be a choice, or an empty string."""
    x, weight, layout = choice.input_nodes[product.x], choice.input_nodes[product.weight], choice.layout
    if layout.device.type != "cpu":
        return f"on {layout.device.type}: only products on a CPU are timed"
    if x.get_dtype() not in FLOAT_FORMATS or not x.get_dtype() == weight.get_dtype() == layout.dtype:
        return "x, weight and result must have one dtype, float32, bfloat16 or float16"
    if not _is_constant(weight):
        return "its weight is no constant: torch._inductor.config.freezing = True, under torch.no_grad(), makes it one"
    if product.vector and not _is_constant_vector(choice.input_nodes[product.bias], layout.size[-1]):
        return "its bias is no constant vector"
    add = None if product.add is None else choice.input_nodes[product.add]
    if add is not None and (list(add.get_size()) != list(layout.size) or add.get_dtype() is not layout.dtype):
        return "the tensor that is added has another shape or dtype"
    with _disable_current_modes():
        return "" if all_finite(_dense(_constant(weight))) else "its weight holds inf or nan"


def _is_constant(node: Any) -> bool:
    try:
        return node.get_name() in V.graph.constants
    except (AttributeError, NotImplementedError):  # a node without a buffer
        return False


def _is_constant_vector(node: Any, n: Any) -> bool:
    """Whether a node is a constant vector that is the same for all rows."""
    return _is_constant(node) and V.graph.constants[node.get_name()].shape == (n,)


def _constant(node: Any) -> Tensor:
    """Return the constant tensor behind a node, in the node's view of it."""
    tensor = V.graph.constants[node.get_name()]
    if tensor.is_mkldnn:
        return tensor
    layout = node.get_layout()
    sizes, strides = ([int(number) for number in numbers] for numbers in (layout.size, layout.stride))
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + int(layout.offset))


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_mkldnn else tensor


def _packed(weight: Tensor, transposed: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Return the packed weight ``[n, k]`` (``[k, n]`` if ``transposed``), and its numbers for the op."""
    with _disable_current_modes(), torch.no_grad():
        dense = _dense(weight).T if transposed else _dense(weight)
        spec = LinearSpec(FLOAT_FORMATS[dense.dtype])
        return pack_weight(dense.contiguous(), spec)[0].detach(), spec.op_args(*dense.shape)
