# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in one call: the half of a decoder layer that has a router, packed experts and, in some models,
shared experts, which every token passes.

    weights, index = router(x);   y = experts(x, index, weights) + sigmoid(shared_gate(x)) * shared(x)
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.models.fused_attention import IDLE
from lowbit.models.mlp_steps import MLP_STEPS
from lowbit.models.routers import Router, rounds, router_of, tensors_of
from lowbit.models.steps import Steps, Written
from lowbit.ops.fakes import FLOATS
from lowbit.ops.program import NONE, Program
from lowbit.ops.route import SCORINGS
from lowbit.ops.run_program import KeptProgram
from lowbit.quant.experts import DOWN
from lowbit.quant.fused import Fused, has_hooks, hooked, is_inference, probe_of
from lowbit.quant.quant_experts import QuantExperts
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Attributes

_TOLERANCE = 1e-6  # relative to the largest value: float32 sums
_READ_NOW = {"config", "facts", "training"}


class FusedMixture(Fused):
    """A mixture of experts that is one call of the op `run_program`, or a part of one. `lowbit.fuse` makes it in
    place."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        facts = self.facts
        x = hidden_states
        if args or kwargs or self.training or facts["returns_more"] or not is_inference(x) or x.dim() != 3:
            return super().forward(hidden_states, *args, **kwargs)
        program = facts["kept"]
        if program.run is None or program.dtype is not x.dtype or not program.holds():
            program = facts["kept"] = MixtureProgram(self, x.dtype)
        if program.run is None:
            return super().forward(hidden_states)
        return program.run([], [x if x.is_contiguous() else x.contiguous()], [])


class MixtureProgram(Steps):
    """The program of a mixture alone. ``run`` executes it, and is None if the mixture cannot be one now."""

    def __init__(self, mixture: FusedMixture | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(dtype)
        self.run = None
        if mixture is None:
            return
        written = mixture_steps(self, mixture, 0, 0, Program.input(0))
        if written is not None:
            self.run = KeptProgram(self.program)


def mixture_steps(steps: Steps, mixture: FusedMixture, i: int, kind: int, x: int) -> Written | None:
    """Write a mixture of experts; return its result."""
    facts, modules = mixture.facts, mixture._modules
    experts, parts = modules[facts["experts"]], [name for name, part in modules.items() if part is not None]
    if mixture.training or hooked(mixture, parts) or not facts["noted"].hold(mixture):
        return None
    routed = _routed(steps, mixture, x)
    if routed is None or type(experts) is not QuantExperts or experts.training:
        return None
    y = _experts(steps, experts, *routed, x)
    if y is None:
        return None
    steps.note_half(mixture)
    steps.note(mixture.__dict__, *facts["noted"].names)
    for idle in (part for part in mixture._modules.values() if type(part) in IDLE):
        steps.note_module(idle)
    if facts["shared"] is None:
        return y, None
    shared, gate = modules[facts["shared"]], modules.get(facts["gate"])
    written = MLP_STEPS[shared.piece](steps, shared, i, kind, x) if isinstance(shared, tuple(MLP_STEPS)) else None
    if written is None or (gate is not None and type(gate) is not QuantLinear):
        return None
    operand, down = written
    if gate is None:
        return steps.product(down, operand, add=y), None
    of_shared = steps.product(down, operand)
    return steps.program.scaled_add(of_shared, y, steps.product(gate, x)), None


def _routed(steps: Steps, mixture: FusedMixture, x: int) -> tuple[int, int] | None:
    """Write the router; return the operands of index and weights."""
    facts, constant = mixture.facts, steps.program.constant
    name, router = facts["router"], facts["route"]
    module = mixture._modules[name]
    if module.training or any(map(has_hooks, module.modules())) or not facts["of_router"].hold(module):
        return None
    tensors: dict[str, Tensor] = {}
    for path, (entries, key) in tensors_of(mixture, name).items():
        tensors[path] = tensor = entries[key]
        steps.note(entries, key)
        if tensor.dtype not in FLOATS or not tensor.is_cpu or not tensor.is_contiguous():
            return None
    weight = tensors[router.weight]
    rounded = facts["rounds"].get((steps.dtype, weight.dtype))
    if (steps.dtype, weight.dtype) not in facts["rounds"]:
        rounded = rounds(module, weight, steps.dtype, [tensors[path] for path in facts["extra"]])
        facts["rounds"][steps.dtype, weight.dtype] = rounded
    if rounded is None:
        return None
    steps.note_addresses([*tensors.values()])
    steps.note(module.__dict__, "training", *facts["of_router"].names)
    for part in module.modules():
        steps.note_module(part)

    def vector(path: str | None) -> int:
        return NONE if path is None else constant(tensors[path].detach().view(-1))

    weights, index = steps.program.route(
        x,
        router.k,
        SCORINGS[router.scoring],
        constant(weight),
        vector(router.bias),
        rounded,
        vector(router.correction),
        *router.groups,
        router.zero_outside,
        router.normalize,
        router.eps,
        router.least,
        router.scale,
        vector(router.expert_scale),
    )
    return index, weights


def _experts(steps: Steps, experts: QuantExperts, index: int, weights: int, x: int) -> int | None:
    """Write the experts; return their result."""
    form, parameters, constant = experts.form, experts._parameters, steps.program.constant
    act_fn = experts._modules.get("act_fn")
    if experts.op_gate is None or (act_fn is not None and has_hooks(act_fn)):
        return None
    names = [f"{form.first}_bias", f"{DOWN}_bias"]
    bias, down_bias = (parameters.get(name) for name in names)
    steps.note(parameters, form.first, DOWN, *names)
    steps.note(experts.__dict__, "op_args", "op_gate", "form", "training")
    steps.note_module(experts)
    if act_fn is not None:
        steps.note_module(act_fn)
    if form.interleaved and bias is not None:  # the packed rows of the gate come before those of up
        steps.note_contents(bias)
        bias = torch.cat([bias.detach()[:, ::2], bias.detach()[:, 1::2]], 1)
    of = [experts.op_args[key] for key in form.keys]
    held = [constant(parameters[key]) for key in form.keys]
    return steps.program.experts(x, *held, index, weights, *of, experts.op_gate, constant(bias), constant(down_bias))


def has_packed_experts(module: nn.Module) -> bool:
    """Whether a child of the module is a module of packed experts."""
    return any(isinstance(part, QuantExperts) for part in module._modules.values())


def _former_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it was fused."""
    return module.unfused if isinstance(module, Fused) else type(module)


def fuse_mixture(module: nn.Module) -> str:
    """Fuse ``module``, which has packed experts, or return the reason why it stays unchanged.

    A probe call, in which each child returns random tensors, shows how the module connects them; another one of the
    router alone, with random weights, shows what it computes (routers.py).
    """
    parts = {name: part for name, part in module._modules.items() if part is not None and type(part) not in IDLE}
    experts = [name for name, part in parts.items() if isinstance(part, QuantExperts)]
    shared = [name for name, part in parts.items() if isinstance(part, tuple(MLP_STEPS))]
    gates = [name for name, part in parts.items() if _is_gate(part)]
    routers = [name for name in parts if name not in (*experts, *shared, *gates)]
    if [len(experts), len(routers)] != [1, 1] or len(shared) > 1 or len(gates) > len(shared):
        others = ", ".join(f"{name} ({_former_class(part).__name__})" for name, part in parts.items() if name not in experts)
        return f"it has {others or 'nothing'} beside experts, instead of a router and shared experts that are fused"
    packed: Any = parts[experts[0]]
    if packed.op_gate is None:
        return "its experts are no single call of the op experts"
    if hook := hooked(module, parts):
        return f"hooks on {hook}"
    if not all(tensor.is_cpu for tensor in chain(module.parameters(), module.buffers())):
        return "it is not on the CPU, where the kernel rows are"
    facts: dict[str, Any] = {
        "experts": experts[0],
        "router": routers[0],
        "shared": shared[0] if shared else None,
        "gate": gates[0] if gates else None,
    }
    joined = _joins(module, facts)
    if joined is None:
        return "it does not join router and experts as a mixture does"
    hidden = packed.stored[packed.form.first].k
    found = router_of(module, routers[0], packed.form.experts, hidden, joined["extra"])
    if not isinstance(found, Router):
        return found
    facts |= joined | {
        "route": found,
        "rounds": {},
        "noted": Attributes(module, without=_READ_NOW),
        "of_router": Attributes(parts[routers[0]], without=_READ_NOW),
        "kept": MixtureProgram(),
    }
    FusedMixture.take(module, facts)
    return ""


def _is_gate(part: nn.Module) -> bool:
    return isinstance(part, (nn.Linear, QuantLinear)) and part.out_features == 1


@torch.no_grad()
def _joins(module: nn.Module, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Return whether the module has more results than one, and the tensors that it passes to the router behind x; or None
    if it does not join its children as a mixture does."""
    packed: Any = module._modules[facts["experts"]]
    hidden, experts, tokens = packed.stored[packed.form.first].k, packed.form.experts, 6
    generator = torch.Generator("cpu").manual_seed(0)
    x, of_experts, of_shared = torch.randn(3, tokens, hidden, generator=generator, device="cpu")
    of_gate, weights = torch.randn(2, tokens, 1, generator=generator, device="cpu")
    index = torch.randint(experts, (tokens, 1), generator=generator, device="cpu")
    logits = torch.randn(tokens, experts + 1, generator=generator, device="cpu")  # of no other result's shape
    results = {facts["experts"]: of_experts, facts["router"]: (logits, weights, index)}
    results |= {name: result for name, result in ((facts["shared"], of_shared), (facts["gate"], of_gate)) if name}
    given: dict[str, tuple[Any, ...]] = {}

    def stand_in(name: str) -> nn.Module:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given[name] = (*args, *kwargs.values())
            result = results[name]
            shape = given[name][0].shape[:-1]
            return result if isinstance(result, tuple) else result.view(*shape, -1)

        piece = probe_of(module._modules[name])
        piece.forward = forward
        return piece

    probe = probe_of(module, **{name: stand_in(name) for name in results})
    try:
        result = probe(x.view(2, tokens // 2, hidden))
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError, IndexError):  # another signature
        return None
    returns_more = isinstance(result, tuple)
    y = result[0] if returns_more else result
    wanted = of_experts
    if facts["shared"]:
        wanted = wanted + (of_shared * of_gate.sigmoid() if facts["gate"] else of_shared)
    if given.keys() != results.keys() or not isinstance(y, Tensor) or y.shape != (2, tokens // 2, hidden):
        return None
    if not all(isinstance(of[0], Tensor) and of[0].reshape(tokens, -1).equal(x) for of in given.values()):
        return None
    if len(given[facts["experts"]]) != 3 or not all(map(torch.equal, given[facts["experts"]][1:], (index, weights))):
        return None
    if (y.reshape(tokens, -1) - wanted).abs().max() > _TOLERANCE * wanted.abs().max():
        return None
    own = {id(value): name for entries in (module._parameters, module._buffers) for name, value in entries.items()}
    extra = [own.get(id(value)) for value in given[facts["router"]][1:]]
    return None if None in extra else {"returns_more": returns_more, "extra": extra}
