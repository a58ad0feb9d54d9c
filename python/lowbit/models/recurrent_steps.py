# SPDX-License-Identifier: Apache-2.0
"""The functions that write recurrent layers as steps of a program: gated delta nets, Mamba-1 and 2 mixers and short
convolutions. As those of half_steps.py, they leave the last linear layer to the residual stream.

A program is the same for each call, so that packed sequences are left to the modules. Mamba-2 limits its steps of time in
prompts alone; so there is a program for prompts and one for tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from lowbit.formats.float import float_weight
from lowbit.models.decay_gates import channel_gate_of
from lowbit.models.delta_net_forms import CONV, is_of_whole_panels
from lowbit.models.fused_delta_net import FusedDeltaNet
from lowbit.models.fused_mamba import NORMS, STEP, FusedMamba
from lowbit.models.fused_mamba2 import NO_LIMIT, NORM, FusedMamba2
from lowbit.models.fused_short_conv import FusedShortConv
from lowbit.models.latent_steps import of_heads
from lowbit.models.layer_memory import RecurrentStates
from lowbit.models.ordered_projections import cannot_be_ordered, note_copied
from lowbit.models.products import projected
from lowbit.models.steps import Steps, Written
from lowbit.ops.program import NONE, Program
from lowbit.quant.fused import Fused, hooked, not_packed
from lowbit.quant.fused_gated_norm import FusedGatedNorm
from lowbit.quant.fused_norm import EPS, FusedRMSNorm, eps_of
from lowbit.quant.merged import MergedLinear, split_parts
from lowbit.quant.quant_linear import QuantLinear


def delta_net_steps(steps: Steps, net: Any, i: int, kind: int, x: int) -> Written | None:
    """Write a gated delta net."""
    form, sizes = net.facts["form"], net.facts["sizes"]
    norm, conv = _begun(steps, net, form.norm), net._modules[CONV]
    if norm is None:
        return None
    keys, state = steps.keep(_states_of(conv, (sizes.heads, sizes.dk, sizes.dv)), kind, net)
    program, parameters = steps.program, net._parameters
    program.mask_rows(x, Program.input(3 + 3 * kind))
    (qkv, _), z, b, *a = _of_net(steps, net, x)
    if form.behind_z:
        z = _product(steps, net._modules[form.behind_z], _alone(steps, z, net._modules[form.behind_z].in_features)), 0
    if form.decay:
        gate = net._modules[form.decay]
        parameters, decay = gate._parameters, (_made_by(steps, gate, x), 0)
    else:
        (decay,) = a
    mixed = program.causal_conv1d(qkv, *_taps(steps, conv, keys), silu=True)
    steps.note(parameters, "A_log", "dt_bias")
    speeds = parameters["A_log"].detach().view(-1)
    steps.note_addresses([speeds])
    o = program.gated_delta_rule(
        mixed, decay[0], b[0], state, (sizes.key_heads, sizes.dk, sizes.heads, sizes.dv), sizes.dk**-0.5, True,
        program.constant(speeds), program.constant(parameters["dt_bias"]), decay[1], b[1], net.facts["beta"],
        per_channel=bool(form.decay),
    )  # fmt: skip
    return _normed(steps, norm, o, *z), net._modules[form.out]


def _of_net(steps: Steps, net: Any, x: int) -> list[tuple[int, int]]:
    """Write the projections of a gated delta net; return operand and first column of qkv, z, b and a."""
    form, sizes = net.facts["form"], net.facts["sizes"]
    layers = [net._modules[name] for name in form.readers]
    if not form.in_groups:
        return _products(steps, net.facts["merged"], layers, len(form.of_qkv), x)
    note_copied(steps, layers)
    ordered = net.facts["ordered"]
    (qkvz, _), (ba, first) = _products(steps, ordered.merged, ordered.of(layers, sizes), 1, x)
    return [(qkvz, 0), (qkvz, sum(sizes.columns)), (ba, first), (ba, first + sizes.heads)]


def _made_by(steps: Steps, gate: Any, x: int) -> int:
    """Write the linear layers of a gate that makes a decay for each channel."""
    steps.note_half(gate)
    for layer in channel_gate_of(gate):
        x = _product(steps, layer, x)
    return x


def mamba_steps(steps: Steps, mixer: Any, i: int, kind: int, x: int) -> Written | None:
    """Write a Mamba-1 mixer. The steps of time are made by a float layer, of which the step has a copy."""
    modules, parameters, s = mixer._modules, mixer._parameters, mixer.ssm_state_size
    norms = [modules[name] for name in NORMS] if mixer.facts["norms"] else []
    if not all(steps.takes_norm(norm) for norm in norms if isinstance(norm, FusedRMSNorm)):
        return None
    if _begun(steps, mixer, None) is None:
        return None
    conv, of_time = modules[CONV], modules[STEP]
    channels, rank = conv.weight.shape[0], of_time.in_features
    last, state = steps.keep(_states_of(conv, (channels, s)), kind, mixer)
    program, mask = steps.program, Program.input(3 + 3 * kind)
    program.mask_rows(x, mask)
    made = steps.product(modules["in_proj"], x)  # x and the gate z
    mixed = program.causal_conv1d(made, *_taps(steps, conv, last), silu=True)
    program.mask_rows(mixed, mask)  # whose bias made something of padding
    of_token = steps.product(modules["x_proj"], mixed)
    options = [_of_heads(steps, norm, size) for norm, size in zip(norms, (rank, s, s), strict=True)] if norms else 3 * [{}]
    time = program.heads(of_token, 1, rank, 0, rank, **options[0])
    b, c = (of_token, rank), (of_token, rank + s)
    if norms:
        b, c = ((program.heads(at, 1, s, column, s, **of), 0) for (at, column), of in zip((b, c), options[1:], strict=True))
    steps.note(parameters, "A_log", "D")
    steps.note_contents(parameters["A_log"])
    steps.note(of_time._parameters, "weight", "bias")
    y = program.selective_scan(
        mixed, _float_product(steps, of_time, None, time), program.constant(-parameters["A_log"].detach().float().exp()),
        b, c, state, s, NO_LIMIT, program.constant(parameters["D"]), program.constant(of_time.bias), (made, channels),
        softplus=True,
    )  # fmt: skip
    return y, modules["out_proj"]


def _of_heads(steps: Steps, norm: Any, size: int) -> dict[str, Any]:
    """Return a norm of a Mamba-1 mixer, with or without weights, as arguments of a step of heads."""
    if isinstance(norm, FusedRMSNorm):
        return of_heads(steps, norm)
    steps.note(norm.__dict__, *EPS)
    return dict(weight=steps.program.constant(torch.ones(size, device="cpu")), eps=eps_of(norm))


def mamba2_steps(steps: Steps, mixer: Any, i: int, kind: int, x: int) -> Written | None:
    """Write a Mamba-2 mixer."""
    facts, modules, parameters = mixer.facts, mixer._modules, mixer._parameters
    sizes, has_norm, conv = facts["sizes"], type(modules[NORM]) is not nn.Identity, modules[CONV]
    norm = _begun(steps, mixer, NORM if has_norm else None)
    if norm is None:
        return None
    last, state = steps.keep(_states_of(conv, (sizes.heads, sizes.p, sizes.s)), kind, mixer)
    program, mask = steps.program, Program.input(3 + 3 * kind)
    program.mask_rows(x, mask)
    made = steps.product(modules["in_proj"], x if facts["factor"] == 1 else program.scaled_add(x, scale=facts["factor"]))
    factors, inner = mixer._buffers.get("mup_vector"), sizes.columns[0]
    if factors is not None:
        steps.note(mixer._buffers, "mup_vector")
        steps.note_contents(factors)
        program.scale_columns(made, program.constant(factors.detach().float().flatten()))
    mixed = program.causal_conv1d(made, *_taps(steps, conv, last), column=inner, silu=True)
    program.mask_rows(mixed, mask)  # whose bias made something of padding
    steps.note(parameters, "A_log", "dt_bias", "D")
    steps.note_contents(parameters["A_log"])
    y = program.ssd(
        mixed, made, program.constant(-parameters["A_log"].detach().float().exp()), state,
        (sizes.heads, sizes.p, sizes.groups, sizes.s), NO_LIMIT if steps.of_token else facts["limit"], program.constant(parameters["D"]),
        program.constant(parameters["dt_bias"]), softplus=True, dt_column=inner + sum(sizes.columns),
    )  # fmt: skip
    if not has_norm:
        return program.gated_heads(y, made, inner, column=0, step=inner, silu=True), modules["out_proj"]
    return _normed(steps, norm, y, made, 0), modules["out_proj"]


def short_conv_steps(steps: Steps, layer: Any, i: int, kind: int, x: int) -> Written | None:
    """Write a short convolution. Its three projections are thirds of one weight, whose products are factors of the
    products behind them."""
    modules = layer._modules
    if _begun(steps, layer, None) is None:
        return None
    reader, conv = modules["in_proj"], modules["conv"]
    (last,) = steps.keep(_states_of(conv, ()), kind, layer)
    steps.program.mask_rows(x, Program.input(3 + 3 * kind))
    steps.note_linear(reader)
    steps.note_addresses([each for each in (reader.weight, reader.bias) if each is not None])
    b, c, value = split_parts(reader, 3)
    row = reader.row_number
    given = steps.linear(*value, row, x, mul=steps.linear(*b, row, x))
    mixed = steps.program.causal_conv1d(given, *_taps(steps, conv, last))
    return steps.linear(*c, row, x, mul=mixed), modules["out_proj"]


def why_no_steps(layer: Any) -> str:
    """Return why a fused recurrent layer cannot be steps of a program, or an empty string."""
    modules, facts = layer._modules, layer.facts
    name = "a gated delta net" if isinstance(layer, FusedDeltaNet) else "a recurrent layer"
    if isinstance(layer, FusedDeltaNet):
        form, heads = facts["form"], facts["sizes"].heads * (2 if facts["form"].in_groups else 1)
        linear = [each for each in (*form.readers, form.out) if not _is_small(modules[each], heads)]
        norm = form.norm
        if form.in_groups and any(cannot_be_ordered(modules[each]) for each in form.readers):
            return f"{name} whose projections lie head by head, with 2:4 sparse weights, is no step of a program"
        if form.decay and (reason := _why_no_gate(modules[form.decay])):
            return f"{name} {reason}"
        if form.behind_z:
            linear.append(form.behind_z)
    else:
        gated = isinstance(layer, FusedMamba2) and type(modules[NORM]) is not nn.Identity
        linear, norm = ["in_proj", "out_proj"], NORM if gated else None
        if isinstance(layer, FusedMamba):
            linear.append("x_proj")
            if type(modules[STEP]) is not nn.Linear:
                return f"its {STEP} is {type(modules[STEP]).__name__}, no torch.nn.Linear"
            norms = {each for each in NORMS if facts["norms"] and not isinstance(modules[each], FusedRMSNorm)}
            if not norms.issubset(facts["weightless"]):
                return "its norms of step, B and C are no RMSNorms"
    if unpacked := [each for each in linear if type(modules[each]) is not QuantLinear]:
        return not_packed(unpacked[0], modules[unpacked[0]])
    if norm is not None and not isinstance(modules[norm], FusedGatedNorm):
        return f"its {norm} is no gated norm that is fused"
    if isinstance(layer, FusedShortConv) and split_parts(modules["in_proj"], 3) is None:
        return "its in_proj has panels with outputs of two parts"
    return ""


def _why_no_gate(gate: nn.Module) -> str:
    """Return why a module that makes decays cannot be steps of a program, or an empty string."""
    layers = channel_gate_of(gate)
    if layers is None:
        return "whose decays are not those of A_log, dt_bias and linear layers is no step of a program"
    return next((f"in which a gate has a {type(each).__name__}" for each in layers if type(each) is not QuantLinear), "")


def _begun(steps: Steps, layer: Any, norm: str | None) -> Any:
    """Record a recurrent layer, if it can be steps in its current state, and return its gated norm, or True if it has
    none; None if it cannot."""
    modules, noted = layer._modules, layer.facts["noted"]
    if layer.training or hooked(layer, modules) or not noted.hold(layer) or why_no_steps(layer):
        return None
    steps.note_half(layer)
    steps.note(layer.__dict__, *noted.names)
    for child in modules.values():
        if isinstance(child, nn.Module) and type(child) is not QuantLinear:
            steps.note_module(child)
    if norm is None:
        return True
    of_norm = modules[norm]
    if not of_norm.facts["noted"].hold(of_norm) or not of_norm.weight.is_contiguous():
        return None
    steps.note(of_norm._parameters, "weight")
    steps.note(of_norm.__dict__, "facts", *of_norm.facts["noted"].names)
    return of_norm


def _states_of(conv: Any, shape: tuple[int, ...]) -> RecurrentStates:
    return RecurrentStates(conv.weight.shape[0], conv.weight.shape[-1], shape)


def _taps(steps: Steps, conv: Any, state: int) -> tuple[int, int, int]:
    """Return the operands of a convolution: its taps ``[D, K]``, its state and its bias."""
    steps.note(conv._parameters, "weight", "bias")
    steps.note_addresses([conv.weight])
    constant = steps.program.constant
    return constant(conv.weight.detach().squeeze(1)), state, NONE if conv.bias is None else constant(conv.bias)


def _normed(steps: Steps, norm: Any, x: int, gate: int, column: int) -> int:
    options = norm.facts["options"]
    of_gate = options["activation"] == "sigmoid", options["gate_first"]
    weight = steps.program.constant(norm.weight)
    return steps.program.gated_rms_norm(x, gate, weight, options["eps"], options["group_size"], *of_gate, column)


def _products(
    steps: Steps, merged: MergedLinear, layers: Sequence[Any], first: int, x: int
) -> list[tuple[int, int]]:
    """Write the products of the layers, of the ``first`` of them side by side, and return operand and first column of
    these and of each other layer. Leading layers of one format are one product."""
    packed = list(takewhile(is_of_whole_panels, layers))
    joined = packed if len(packed) >= first and merged.holds(packed) else list(layers[:first])
    operand, column = projected(steps, merged, joined, x), sum(layer.out_features for layer in layers[:first])
    places = [(operand, 0)]
    for layer in joined[first:]:
        places.append((operand, column))
        column += layer.out_features
    return places + [(_product(steps, layer, x), 0) for layer in layers[len(joined) :]]


def _is_small(layer: Any, heads: int) -> bool:
    """Whether this is a float layer with an output for each head, which `quantize_` leaves float where heads are few."""
    return type(layer) is nn.Linear and layer.out_features == heads


def _alone(steps: Steps, place: tuple[int, int], count: int) -> int:
    """Write a copy of so many columns of an operand."""
    return steps.program.heads(place[0], 1, count, place[1], count)


def _product(steps: Steps, layer: Any, x: int) -> int:
    """Write a packed layer applied to x, or a small float one, of which the step has a copy."""
    if type(layer) is QuantLinear:
        return steps.product(layer, x)
    steps.note(layer._parameters, "weight", "bias")
    return _float_product(steps, layer, layer.bias, x)


def _float_product(steps: Steps, layer: Any, bias: Any, x: int) -> int:
    """Write a float layer applied to x, of which the step has a copy, with this bias."""
    steps.note_contents(layer.weight)
    packed = QuantLinear.from_linear(layer, float_weight().spec(layer.weight.dtype))
    return steps.linear(packed.weight, bias, packed.op_args, packed.row_number, x)


RECURRENT_STEPS: dict[type[Fused], Callable[..., Written | None]] = {
    FusedDeltaNet: delta_net_steps,
    FusedMamba: mamba_steps,
    FusedMamba2: mamba2_steps,
    FusedShortConv: short_conv_steps,
}
"""The function that writes the steps of each class of recurrent layers, as `HALF_STEPS`."""
