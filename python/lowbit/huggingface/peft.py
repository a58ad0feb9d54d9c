# SPDX-License-Identifier: Apache-2.0
"""peft: adapters that read or train the float weight of a layer refuse a packed one by name.

LoRA and other methods that add to what a layer computes serve any layer (quant/adapters.py has the merging of LoRA).
Some read numbers from its weight, which would be packed bytes here: they would fail somewhere inside torch, or scale by
0. Two checks that peft makes itself before it changes a layer are extended, once, when peft is imported
(when_imported.py); models without packed layers pass through unchanged.
"""

from __future__ import annotations

import functools
from typing import Any

from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from lowbit.quant.kinds import is_packed, kind_of, weights_of

READS_WEIGHT = frozenset(
    (
        "ADAMSS", "DEFT", "DELORA", "FROD", "GLORA", "HIRA", "HRA", "LOHA", "LOKR", "OSF", "PEANUT", "PSOFT", "SHIRA",
        "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA",
    )
)  # fmt: skip
"""Methods of peft 0.21 that read it when they are made, or in every forward."""
_LORA_READS = ("corda", "loftq", "olora", "orthogonal", "pissa")  # how init_lora_weights begins


def refuse_packed_weights() -> None:
    """Extend peft's checks; once."""
    check_target, check_tied = BaseTuner._check_target_module_compatiblity, BaseTuner._check_tied_modules
    if hasattr(check_target, "_before_lowbit"):
        return

    @functools.wraps(check_target)
    def checked_target(self: Any, peft_config: Any, model: nn.Module, target_name: str) -> None:
        check_target(self, peft_config, model, target_name)
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == target_name and is_packed(module):
                _refuse(_reader(peft_config, module), "reads", name, module)

    @functools.wraps(check_tied)
    def checked_before_all(self: Any, model: nn.Module, peft_config: Any) -> None:
        check_tied(self, model, peft_config)
        for name, module in model.named_modules():
            if is_packed(module):
                _refuse(_trainer(peft_config, model, name, module), "trains", name, module)

    checked_target._before_lowbit = check_target  # type: ignore[attr-defined]
    BaseTuner._check_target_module_compatiblity, BaseTuner._check_tied_modules = checked_target, checked_before_all


def _refuse(what: str | None, does: str, name: str, module: nn.Module) -> None:
    if what is not None:
        raise ValueError(
            f"get_peft_model: {what} {does} float weights, got {name} as {module.spec.name}; take plain LoRA, or leave "
            "the layer float: filter_fn of quantize_, modules_to_not_convert of LowbitConfig, or its head=None"
        )


def _trainer(config: Any, model: nn.Module, name: str, module: nn.Module) -> str | None:
    """Say what of the configuration trains this layer itself, or return None."""
    if any(name.endswith(saved) for saved in getattr(config, "modules_to_save", None) or ()):
        return "modules_to_save"
    parameters = [f"{name}.{weight.key}" for weight in weights_of(module)]
    if any(one.endswith(named) for named in getattr(config, "target_parameters", None) or () for one in parameters):
        return "target_parameters"
    tokens = getattr(config, "trainable_token_indices", None)
    if isinstance(tokens, dict):
        trained = any(name.endswith(table) for table in tokens)
    else:
        find = getattr(model, "get_input_embeddings", None)
        trained = tokens is not None and callable(find) and find() is module
    return "trainable_token_indices" if trained else None


def _reader(config: Any, module: nn.Module) -> str | None:
    """Say what of the configuration reads the weight of this layer, or return None."""
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if method in READS_WEIGHT:
        return method
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.startswith(_LORA_READS):
        return f"init_lora_weights={start!r}"
    kind = kind_of(module)
    return f"use_dora on an {kind.name}" if not kind.multiplies and getattr(config, "use_dora", False) else None


refuse_packed_weights()
