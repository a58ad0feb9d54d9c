# SPDX-License-Identifier: Apache-2.0
"""QuantExperts, a module of experts (experts.py) with packed weights, and the kind of experts.

The parameters gate_up_proj (or up_proj) and down_proj are uint8 [E, panels, panel_bytes] and frozen; biases are
unchanged. For each weight, a buffer such as gate_up_proj_layout (int64[9]) describes its bytes (formats/spec.py). All
are plain tensors, and FSDP2 shards whole experts. If the rows of gate and up are interleaved in the float weight, the
rows of the gate are packed before those of up; the bias keeps its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import _C, devices
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.ops.experts import Gate, experts
from lowbit.ops.fakes import FLOATS
from lowbit.ops.gather_linear import gather_linear
from lowbit.ops.linear import LinearArgs
from lowbit.quant.expert_gates import known_gate
from lowbit.quant.experts import (
    DOWN,
    Form,
    attribute_of_class,
    call_of,
    check_call,
    dense_product,
    inputs_of_experts,
    may_be_experts,
    refuses,
    run,
)
from lowbit.quant.kinds import (
    Kind,
    LayerWeight,
    become_float,
    become_packed,
    layout_name,
    register,
    twin_of,
)
from lowbit.quant.layout import PackedModule
from lowbit.quant.mapped_file import read_ahead
from lowbit.quant.quant_linear import LINEAR

_OPS = "experts", "gather_linear"


class QuantExperts(PackedModule):
    """A module of experts with packed weights, of which a router selects some for each token.

    It computes ``y[t] = sum over j of top_k_weights[t, j] * down(gate(gate_up(x[t])))``, with the weights of expert
    ``top_k_index[t, j]``. ``quantize_``, `lowbit.load` and ``from_pretrained`` turn a float module of experts into one
    in place; it keeps that module's activation, limits and biases. The weights are frozen; ``hidden_states``,
    ``top_k_weights`` and the biases get gradients.
    """

    form: Form
    stored: dict[str, StoredWeight]
    """How each packed weight is stored, by key. A weight without an entry is float."""
    op_args: dict[str, LinearArgs]
    op_gate: Gate | None
    """The gate between the products, if one call of the op `experts` computes the whole module; otherwise None."""
    added: dict[str, Callable[[Tensor, Tensor], Tensor]]
    """What adapters add to a product of x and index, by the key of its weight; only in their calls
    (expert_adapters.py)."""
    reads_ahead: bool
    """Whether the pages of the selected experts are asked for before they are multiplied. `lowbit.load` sets it if a
    mapped model does not fit into memory."""
    float_class: type[nn.Module]
    """The class before packing, which implements the gate, and which ``dequantize_`` restores."""

    def __init__(self) -> None:
        raise TypeError("QuantExperts: made of a float module of experts, by quantize_, lowbit.load or from_pretrained")

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the float class too, since its gate may use them."""
        try:
            return nn.Module.__getattr__(self, name)  # super() fails if another thread dequantized the module
        except AttributeError:
            return attribute_of_class(self, self.__dict__.get("float_class"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and identify the gate again, since a new activation or limit changes it."""
        nn.Module.__setattr__(self, name, value)  # super() fails if another thread dequantized the module
        if "op_gate" in self.__dict__ and name[0] != "_" and name != "training" and not isinstance(value, Tensor):
            self.__dict__["op_gate"] = _op_gate(self, self.float_class)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the selected experts, ``[T, H]``, with the dtype of ``hidden_states``.

        This is one call of `lowbit.experts`, which adds the results of a token in float32 in the order of the experts.
        If that op does not have the gate of the float class, two calls of `gather_linear` are made instead, with the
        float class's gate in between, and results are added in the order of ``top_k_index``.

        Args:
            hidden_states: ``[T, H]``; float32, bfloat16 or float16.
            top_k_index: ``[T, J]``, int32 or int64: 0 to E - 1, or E for no expert, which adds nothing.
            top_k_weights: ``[T, J]``, any float dtype.

        Raises:
            ValueError: a shape does not fit, or an index is out of range.
            TypeError: a dtype is not one of the above.
        """
        inside = self.__dict__
        form = inside.get("form")
        if form is None:
            return _float_forward(self, hidden_states, top_k_index, top_k_weights)
        check_call("QuantExperts", hidden_states, top_k_index, top_k_weights)
        if inside.get("reads_ahead") and not torch.compiler.is_compiling():
            read_ahead((inside["_parameters"][key] for key in inside["stored"]), top_k_index)
        op_gate = inside.get("op_gate")  # missing in pickles of earlier versions
        added = inside.get("added", {})
        if op_gate is not None and not added and not _is_hooked(inside["_modules"].get("act_fn")):
            return _in_one_call(inside, op_gate, hidden_states, top_k_index, top_k_weights)

        def product(key: str, x: Tensor, index: Tensor, bias: Tensor | None) -> Tensor:
            weight = inside["_parameters"][key]
            if key in inside["op_args"]:
                y = gather_linear(x, weight, index, inside["op_args"][key], bias)
            else:
                y = dense_product(form.float_weight(self, key), weight, x, index, bias)
            return y + added[key](x, index).to(y.dtype) if key in added else y

        return run(self, inside["float_class"], form, product, hidden_states, top_k_index, top_k_weights)

    def dequantize(self, key: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the packed weight of this name as float ``[E, n, k]``. Interleaved rows are in the packed order: the
        rows of the gate before those of up."""
        stored, packed = self.stored[key], self._parameters[key]
        args = stored.spec.weight_args(stored.n, stored.k)
        matrices = packed.new_empty(len(packed), stored.n, stored.k, dtype=dtype)
        for matrix, of_expert in zip(matrices, packed, strict=True):
            matrix.copy_(torch.ops.lowbit.dequantize(of_expert, *args))
        return matrices

    def extra_repr(self) -> str:
        sizes = (f"{key} {stored}" for key, stored in self.stored.items())
        return f"{self.float_class.__name__}, {', '.join(sizes)}"


def _in_one_call(inside: dict[str, Any], gate: Gate, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    form, parameters, op_args = inside["form"], inside["_parameters"], inside["op_args"]
    bias = parameters.get(f"{form.first}_bias")
    if form.interleaved and bias is not None:  # the bias is in the order of the float weight
        bias = torch.cat([bias[:, ::2], bias[:, 1::2]], 1)
    y = experts(
        x,
        parameters[form.first],
        parameters[DOWN],
        index,
        weights if weights.dtype in FLOATS else weights.float(),
        op_args[form.first],
        op_args[DOWN],
        gate,
        bias,
        parameters.get(f"{DOWN}_bias"),
    )
    return y.to(x.dtype)  # under autocast, y has another dtype


def _is_hooked(activation: Any) -> bool:
    """Return whether an activation has hooks that a call would run."""
    return isinstance(activation, nn.Module) and bool(
        activation._forward_hooks
        or activation._forward_pre_hooks
        or activation._backward_hooks
        or activation._backward_pre_hooks
    )


def _op_gate(module: Any, float_class: type[nn.Module]) -> Gate | None:
    """Return the gate of a module in the form that the op `experts` takes, or None if the op cannot compute the whole
    module or a weight is still float."""
    form, stored = module.form, module.stored
    specs = [stored[key].spec for key in form.keys if key in stored]
    if len(specs) < len(form.keys) or not _has_one_call(form, specs):
        return None
    return known_gate(module, float_class, form, stored[form.first].n)


def _has_one_call(form: Form, specs: list[LinearSpec]) -> bool:
    """Return whether the op `experts` can compute both products: either both have int8 activations, or neither has."""
    return not form.normed and len({spec.x_format.startswith("int8") for spec in specs}) == 1


def _float_forward(module: nn.Module, *args: Tensor) -> Any:
    """Return the result of a module that is called while it is being packed or dequantized (see kinds.py)."""
    cls = module.__dict__.get("float_class") or type(module)
    return cls.forward(module, *args)


class _ExpertsKind(Kind):
    """The experts of transformers, and other modules with the same arguments and parameters."""

    name, float_name, packed_class = "module of experts", "experts", QuantExperts
    tells_inputs_packed = False

    def has(self, cls: type[nn.Module]) -> bool:
        return issubclass(cls, QuantExperts) or may_be_experts(cls)

    def includes(self, module: nn.Module) -> bool:
        return isinstance(module, QuantExperts) or Form.of(module) is not None

    def weights(self, module: Any) -> tuple[LayerWeight, ...]:
        form, stored = module.__dict__.get("form") or Form.of(module), module.__dict__.get("stored", {})
        return tuple(
            form.weight(module, key, stored[key].n, stored[key].k) if key in stored else form.float_weight(module, key)
            for key in form.keys
        )

    def refuses(self, module: nn.Module) -> str:
        form = Form.of(module)
        if "forward" in module.__dict__:
            return "its forward was replaced on the instance"
        for key in form.keys:
            value = module._parameters[key]
            if type(value) is not nn.Parameter or value.dtype not in FLOATS:
                return f"its {key} is a {type(value).__name__} of {value.dtype}"
            for op in _OPS if not value.is_meta else ():
                if not devices.places.has_rows(op, value.device):
                    return f"{op} has no kernels for {value.device.type}"
        return refuses(module, form, QuantExperts)

    def inputs(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[LayerWeight, int, Tensor, Tensor | None]]:
        """Yield the inputs of each expert; nothing for a module that is packed or cannot be packed."""
        if isinstance(module, QuantExperts) or self.refuses(module):
            return
        x, index, _ = call_of(module, args, kwargs)
        yield from inputs_of_experts(module, Form.of(module), x, index)

    def kernel(self, module: Any, weight: LayerWeight, spec: LinearSpec, like: Tensor) -> str:
        """Return the kernel row of the op `experts` if it can compute the whole module, assuming that a weight that is
        still float gets the same format. Otherwise return gather_linear's row for many rows of x, which also serves
        few."""
        stored, form = module.__dict__.get("stored", {}), module.__dict__.get("form") or Form.of(module)
        specs = {of.key: stored[of.key].spec if of.key in stored else spec for of in self.weights(module)}
        specs[weight.key] = spec
        first, down = self.weights(module)
        float_class = module.__dict__.get("float_class", type(module))
        if _has_one_call(form, [*specs.values()]) and known_gate(module, float_class, form, first.n) is not None:
            dtype = str(like.dtype).removeprefix("torch.")
            device = devices.places.type_of_rows(like.device, "experts")
            return _C.select_experts(*(specs[of.key].op_args(of.n, of.k) for of in (first, down)), dtype, device)
        return f"gather_{LINEAR.kernel(module, weight, spec, like).rpartition(' ')[2]}"

    def hold(self, module: Any, key: str, packed: nn.Parameter, stored: StoredWeight, dtype: Any = None) -> None:
        """Replace a weight in place. Until the second weight is packed too, one product is packed and one is float."""
        twin = twin_of(module, QuantExperts)
        inside, float_class = twin.__dict__, module.__dict__.get("float_class", type(module))
        inside["form"] = inside.get("form") or Form.of(module)
        inside["stored"] = inside.get("stored", {}) | {key: stored}
        inside["op_args"] = inside.get("op_args", {}) | {key: stored.spec.op_args(stored.n, stored.k)}
        inside["spec"] = stored.spec
        inside["_parameters"][key] = packed
        twin.register_buffer(layout_name(key), torch.tensor(stored.numbers, dtype=torch.int64, device=packed.device))
        inside["op_gate"] = _op_gate(twin, float_class)
        become_packed(module, twin)

    def spec_of(self, module: Any, weight: LayerWeight) -> LinearSpec:
        return module.stored[weight.key].spec

    def dtype_of(self, module: Any, others: torch.dtype) -> torch.dtype:
        bias = module._parameters.get(f"{DOWN}_bias")
        return others if bias is None else bias.dtype

    def dequantize(self, module: Any, weight: LayerWeight, dtype: torch.dtype) -> Tensor:
        if weight.key not in module.stored:
            return module._parameters[weight.key].detach().to(dtype)
        return weight.value(module.dequantize(weight.key, dtype))

    def give_back(self, module: Any, weights: dict[str, nn.Parameter]) -> None:
        twin = twin_of(module, module.float_class)
        twin._parameters |= weights
        for key in module.stored:
            del twin._buffers[layout_name(key)]
        for name in ("form", "stored", "op_args", "op_gate", "spec", "reads_ahead"):
            twin.__dict__.pop(name, None)
        become_float(module, twin)


EXPERTS = register(_ExpertsKind())
