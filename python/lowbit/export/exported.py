# SPDX-License-Identifier: Apache-2.0
"""A rewritten model as a program of torch.export without ops of lowbit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional

from lowbit.ops import attention_formulas
from lowbit.ops.registration import argument_names

_ATTENTION = torch.ops.lowbit.attention_forward.default


@torch.no_grad()
def exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, dynamic_shapes: Any, runtime: str
) -> ExportedProgram:
    """Export a model made by `rewritten`.

    Attention becomes torch's own op. With a mask or a sink it becomes lowbit's formula in torch's ops, because only
    lowbit returns 0 for rows that see nothing.

    Raises:
        NotImplementedError: the program has another op of lowbit, which ``runtime`` does not have. The message names
            the layer.
    """
    program = torch.export.export(model, tuple(args), kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    for node in program.graph.nodes:
        if getattr(node.target, "namespace", "") == "lowbit" and (node.target is not _ATTENTION or _has_mods(node)):
            names = [name for name, _ in node.meta.get("nn_module_stack", {}).values() if name]
            caller = names[-1] if names else "the model"
            mods = " with a score_mod, a mask_mod or a block mask" if node.target is _ATTENTION else ""
            raise NotImplementedError(f"export: {caller} calls {node.target}{mods}, which {runtime} does not have")
    if any(node.target is _ATTENTION for node in program.graph.nodes):
        program = program.run_decompositions({_ATTENTION: _attention})
    return program


def _has_mods(node: torch.fx.Node) -> bool:
    call = _by_name(node.args, node.kwargs)
    return bool(call["score_mod"] or call["mask_mod"] or call["blocks"])


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    defaults = {argument.name: argument.default_value for argument in _ATTENTION._schema.arguments}
    return defaults | dict(zip(argument_names("attention_forward"), args, strict=False)) | kwargs


def _attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _by_name(args, kwargs)
    out, lse, largest = attention_formulas.forward(call)  # unused results are removed from the graph
    if call["mask"] is None and call["sink"] is None:
        q, k, v = call["q"], call["k"], call["v"]
        out = functional.scaled_dot_product_attention(
            q, k, v, None, call["dropout_p"], call["causal"], scale=call["scale"], enable_gqa=q.shape[1] != k.shape[1]
        )
    return out, lse, largest
