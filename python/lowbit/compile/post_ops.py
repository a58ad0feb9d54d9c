# SPDX-License-Identifier: Apache-2.0
"""A pass over Inductor graphs that moves pointwise ops after `lowbit::linear` into its post-op chain.

    y = act(x @ w.T + bias) * mul + add

The activations are those of `ops/linear.py`. Each is traced with Inductor's own decompositions, once per dtype, and the
graph is searched for the resulting pattern. A node is folded only if no other node reads its inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lowbit import _C
from lowbit.autotune.kept_times import machine
from lowbit.autotune.rows import forced_row
from lowbit.compile import row_choice
from lowbit.compile.report import FoldedLinear, FoldReport
from lowbit.ops import linear as linear_op
from lowbit.ops.fakes import FLOATS
from lowbit.ops.registration import argument_names

_LINEAR = torch.ops.lowbit.linear.detached
_CAST = torch.ops.prims.convert_element_type.default
_ACTIVATIONS = tuple(_C.ACTIVATIONS)
_BINARY = {torch.ops.aten.mul.Tensor: "mul", torch.ops.aten.add.Tensor: "add"}


class FoldPostOps(CustomGraphPass):
    """The pass. ``report`` has a line for each linear op of the graphs it has seen.

    Args:
        max_autotune: whether calls of `lowbit::linear` prefer the kernel row that is fastest for their shape.
    """

    def __init__(self, max_autotune: bool = False) -> None:
        self.report = FoldReport()
        self.max_autotune = max_autotune
        self.rows = row_choice.RowChoice() if max_autotune else None

    def __call__(self, graph: fx.Graph) -> None:
        folded: dict[fx.Node, list[str]] = {node: [] for node in graph.nodes if node.target is _LINEAR}
        for node in list(graph.nodes):
            for fold in (_fold_activation, _fold_binary):
                name = fold(node, folded)
                if name:
                    break
        if self.max_autotune:
            self._choose_rows(list(folded))
        for node, names in folded.items():
            arguments = _arguments(node)
            self.report.append(
                FoldedLinear(
                    f"{arguments['n']} x {arguments['k']}", _dtype(node), ", ".join(names), _left(node, arguments)
                )
            )

    def _choose_rows(self, nodes: list[fx.Node]) -> None:
        weights = {node: _arguments(node)["weight"].meta["val"].nbytes for node in nodes}
        for node in nodes:
            arguments = _arguments(node)
            found = self.rows.best(arguments, sum(weights.values()) - weights[node])
            self.report.timed.append(found)
            if found.microseconds and found.taken != found.first:
                arguments["row"] = _C.row_number("linear", found.taken)
                node.args, node.kwargs = tuple(arguments.values()), {}
                _note_values(node)

    def uuid(self) -> bytes | None:
        """Return the cache key of the pass in Inductor's cache, or None to disable caching.

        A frozen weight is in the key of a graph only by its shape, so the cached graph of another model would come with
        the weight that lowbit packed for this one.
        """
        if self.max_autotune and config.freezing:
            return None
        state = repr((machine(), forced_row())) if self.max_autotune else ""
        return get_hash_for_files((__file__, linear_op.__file__, row_choice.__file__), torch.__version__ + state)


def _fold_activation(node: fx.Node, folded: dict[fx.Node, list[str]]) -> str:
    """Fold the activation that ends in ``node``; return its name, or an empty string."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or result.dtype not in FLOATS:
        return ""
    for number in range(1, len(_ACTIVATIONS)):
        start, end = _pattern(number, result.dtype)
        bound: dict[fx.Node, Any] = {}
        if node.target is not end.target or not _matches(end, node, bound):
            continue
        linear = bound.pop(start)
        if linear not in folded or not _only_within(linear, set(bound.values()), node):
            continue
        if linear.meta["val"].dtype is not result.dtype:  # casts around the activation that do not belong to it
            continue
        arguments = _arguments(linear)
        if not arguments["activation"] and arguments["mul"] is None and arguments["add"] is None:
            _replace(node, linear, {"activation": number}, folded, _ACTIVATIONS[number])
            return _ACTIVATIONS[number]
    return ""


def _fold_binary(node: fx.Node, folded: dict[fx.Node, list[str]]) -> str:
    """Fold a sum or product with a tensor of the result's shape, or the bias; return its name, or an empty string."""
    name = _BINARY.get(node.target)
    if name is None or len(node.args) != 2 or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
        return ""
    for linear, other in (node.args, reversed(node.args)):
        if linear not in folded or other is linear or len(linear.users) != 1:
            continue
        arguments, argument = _arguments(linear), _slot(name, linear, other, node)
        if argument and arguments[argument] is None and arguments["add"] is None:
            if argument == "bias" and (arguments["activation"] or arguments["mul"] is not None):
                continue
            _replace(node, linear, {argument: other}, folded, argument)
            return argument
    return ""


def _slot(name: str, linear: fx.Node, other: fx.Node, node: fx.Node) -> str:
    """Return the argument of the op that ``other`` can be: "mul", "add", "bias" or an empty string."""
    y, value, result = linear.meta["val"], other.meta.get("val"), node.meta["val"]
    if not isinstance(value, torch.Tensor) or result.dtype is not y.dtype or value.device != y.device:
        return ""
    if not value.is_contiguous():
        return ""
    if (
        value.dtype is y.dtype
        and value.dim() == y.dim()
        and all(statically_known_true(a == b) for a, b in zip(value.shape, y.shape, strict=True))
    ):
        return name
    whole = value.dim() == 1 and statically_known_true(value.shape[0] == y.shape[-1])
    return "bias" if name == "add" and whole and value.dtype in FLOATS else ""


def _replace(
    node: fx.Node, linear: fx.Node, changed: dict[str, Any], folded: dict[fx.Node, list[str]], name: str
) -> None:
    """Replace ``node`` by the op with more post-ops. Its tensors keep the strides they were traced with, because
    `_note_values` records them."""
    arguments = _arguments(linear) | changed
    graph = node.graph
    with graph.inserting_before(node):
        fused = graph.call_function(_LINEAR, tuple(arguments.values()))
    fused.meta.update(node.meta)
    _note_values(fused)
    node.replace_all_uses_with(fused)
    folded[fused] = [*folded.pop(linear), name]
    _erase(node)


def _note_values(node: fx.Node) -> None:
    """Record the traced arguments of a call, from which Inductor reads their strides."""
    node.meta["eager_input_vals"] = tuple(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args), {}


def _erase(node: fx.Node) -> None:
    """Remove a node that no other node reads, and inputs that only it reads."""
    inputs = node.all_input_nodes
    if node.users or node.op != "call_function":
        return
    node.graph.erase_node(node)
    for before in inputs:
        if not before._erased:
            _erase(before)


def _arguments(linear: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name, in the order of the schema, including defaults."""
    schema = _LINEAR._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given = dict(zip(argument_names("linear"), linear.args, strict=False)) | linear.kwargs
    return {argument.name: given.get(argument.name, defaults.get(argument.name)) for argument in schema}


@functools.cache
def _pattern(activation: int, dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
    """Return the input and result nodes of the activation as Inductor traces it."""
    function = linear_op.activation_functions[activation]
    with unset_fake_temporarily(), torch.no_grad():  # called while Inductor compiles
        x = torch.empty(2, 3, dtype=dtype, device="cpu")
        traced = make_fx(lambda y: function(y), select_decomp_table())(x)
    (start,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    return start, output.args[0]


def _matches(pattern: Any, node: Any, bound: dict[fx.Node, Any]) -> bool:
    """Whether ``node`` is computed as ``pattern`` is. ``bound`` maps nodes of the pattern to those of the graph."""
    if not isinstance(pattern, fx.Node):
        return type(node) in (int, float, bool, torch.dtype) and pattern == node
    if pattern in bound:
        return bound[pattern] is node
    if not isinstance(node, fx.Node):
        return False
    bound[pattern] = node
    if pattern.op == "placeholder":
        return True
    return (
        node.target is pattern.target
        and len(node.args) == len(pattern.args)
        and node.kwargs == pattern.kwargs
        and all(_matches(*pair, bound) for pair in zip(pattern.args, node.args, strict=True))
    )


def _only_within(linear: fx.Node, inside: set[fx.Node], end: fx.Node) -> bool:
    """Whether only ``end`` is read outside the part of the graph that begins with ``linear``."""
    return all(user in inside for node in (linear, *(inside - {end})) for user in node.users)


def _left(linear: fx.Node, arguments: dict[str, Any]) -> str:
    """Return why the op after ``linear`` was not folded, or an empty string if it is no post-op."""
    reasons = []
    for user in linear.users:
        name = _BINARY.get(user.target) or ("cast" if user.target is _CAST else "")
        if user.target is torch.ops.aten.relu.default:
            name = "relu"
        if not name:
            continue
        if arguments["add"] is not None:  # the end of the chain
            continue
        if name == "cast":
            reason = "the result has the dtype of x"
        elif len(linear.users) > 1:
            reason = "the result is read elsewhere too"
        elif arguments.get(name) is not None:
            reason = "the chain has one already"
        else:
            reason = "it is none of the chain, or the other tensor has another shape, dtype or layout"
        reasons.append(f"{name}: {reason}")
    return "; ".join(dict.fromkeys(reasons))


def _dtype(linear: fx.Node) -> str:
    return str(linear.meta["val"].dtype).removeprefix("torch.")
