# SPDX-License-Identifier: Apache-2.0
"""peft: adapters over packed layers, made, or refused by name before anything has changed.

`SERVED` lists the methods that are known to compute over a packed layer what they compute over the decoded one
(quant/adapter_layers.py has their merging), and `REFUSED` the others, with reasons. A method in neither is refused too:
it may read packed bytes for numbers. Methods that read the weight when they are made find it decoded. Three functions
of peft that make adapters are wrapped, once, when peft is imported (when_imported.py); models without packed layers pass
through unchanged.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, _maybe_include_all_linear_layers
from torch import nn

from lowbit.ops.fakes import FLOATS
from lowbit.quant.adapters import adopt_adapters, adopt_tuner
from lowbit.quant.kinds import is_packed, kind_of, weights_of
from lowbit.quant.lent_weight import lending, lending_shapes

SERVED = frozenset(
    (
        "ADALORA", "ADAMSS", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "GRALORA", "HIRA", "HRA",
        "IA3", "LILY", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "POLY", "PSOFT", "PVERA", "RANDLORA",
        "ROAD", "SHIRA", "SUPERTUNING", "TINYLORA", "UNILORA", "VBLORA", "VERA", "WAVEFT", "XLORA",
    )
)  # fmt: skip
"""Methods of peft 0.21 that train and merge over packed layers."""
READ_WHEN_MADE = frozenset(
    ("ADAMSS", "DEFT", "DELORA", "LILY", "LOHA", "LOKR", "OSF", "PEANUT", "PSOFT", "SHIRA", "SUPERTUNING")
    + ("TINYLORA", "UNILORA")
)
"""Those that read the weight, its shape or its dtype when an adapter is made."""
REFUSED = {
    "FROD": "replaces the weight by float factors of its size",
    "GLORA": "takes plain nn.Linear layers only",
    "LN_TUNING": "trains a copy of the layer",
    "TRAINABLE_TOKENS": "reads the whole table in every call",
}
"""Methods that no packed layer serves, and why."""
_FIRST_DTYPE = ("SHADOW", "XLORA")  # make float modules of the dtype of the first parameter
_DECOMPOSED_FIRST = ("FROD",)  # all weights, before the first target is named
NO_LAYERS = frozenset(
    ("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "PROMPT_TUNING")
    + ("SHADOW",)
)
"""Methods that put prompts or modules beside linear layers, and nothing around them."""
_LORA_READS = ("corda", "loftq", "lora_ga", "mica", "olora", "orthogonal", "pissa")  # how init_lora_weights begins


def serve_packed_layers() -> None:
    """Wrap the functions of peft that make adapters; once."""
    make, inject = BaseTuner.__init__, BaseTuner.inject_adapter
    check_target = BaseTuner._check_target_module_compatiblity
    if hasattr(inject, "_before_lowbit"):
        return

    @functools.wraps(make)
    def made(self: Any, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = peft_config.get(adapter_name) if isinstance(peft_config, dict) else peft_config
        if _method(config) in _DECOMPOSED_FIRST and any(map(is_packed, model.modules())):
            config = self._prepare_adapter_config(config, self.get_model_config(model))
            _check(self, _maybe_include_all_linear_layers(config, model), model)
        make(self, model, peft_config, adapter_name, *args, **kwargs)

    @functools.wraps(check_target)
    def checked_target(self: Any, peft_config: Any, model: nn.Module, target_name: str) -> None:
        check_target(self, peft_config, model, target_name)
        _check(self, peft_config, model, target_name)

    @functools.wraps(inject)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        packed = {name: module for name, module in model.named_modules() if is_packed(module)}
        config = self.peft_config[adapter_name]
        for name, module in packed.items():
            if (trainer := _trainer(config, model, name, module)) is not None:
                _refuse(f"{trainer} trains float weights", name, module)
        if _method(config) in _FIRST_DTYPE and (first := _owner_of_first(model)) in packed:
            _refuse(f"{_method(config)} takes the dtype of the first parameter", first, packed[first])
        others = next((one.dtype for one in model.parameters() if one.dtype in FLOATS), torch.float32)
        reads = packed and (_method(config) in READ_WHEN_MADE or getattr(config, "use_bdlora", None))
        with contextlib.ExitStack() as lent:
            if reads:
                lent.enter_context(lending(packed.values(), others))
            if getattr(config, "target_parameters", None):
                lent.enter_context(lending_shapes(packed.values()))
            inject(self, model, adapter_name, *args, **kwargs)
        if packed:
            adopt_adapters(model)
            adopt_tuner(self)

    inject_adapter._before_lowbit = inject  # type: ignore[attr-defined]
    BaseTuner.__init__, BaseTuner.inject_adapter = made, inject_adapter
    BaseTuner._check_target_module_compatiblity = checked_target


def _check(tuner: BaseTuner, config: Any, model: nn.Module, target_name: str = "") -> None:
    """Refuse the first packed layer that an adapter cannot be put around: all targets at the first of them."""
    for name, module in model.named_modules():
        if is_packed(module) and (reason := _reason(config, module)) is not None:
            last = name.rpartition(".")[2]
            if last == target_name or tuner._check_target_module_exists(config, name):
                _refuse(reason, name, module)


def _owner_of_first(model: nn.Module) -> str:
    """Return the name of the layer that has the first parameter."""
    return next((name for name, _ in model.named_parameters()), "").rpartition(".")[0]


def _refuse(reason: str, name: str, module: nn.Module) -> None:
    raise ValueError(
        f"get_peft_model: {reason}, got {name} as {module.spec.name}; take plain LoRA, or leave the layer float: "
        "filter_fn of quantize_, modules_to_not_convert of LowbitConfig, or its head=None"
    )


def _method(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _trainer(config: Any, model: nn.Module, name: str, module: nn.Module) -> str | None:
    """Return the field of the configuration that would train this layer itself, or None."""
    if any(name.endswith(saved) for saved in getattr(config, "modules_to_save", None) or ()):
        return "modules_to_save"
    kept = (weight for weight in weights_of(module) if weight.experts is None or _method(config) != "LORA")
    parameters = [f"{name}.{weight.key}" for weight in kept]
    if any(one.endswith(named) for named in getattr(config, "target_parameters", None) or () for one in parameters):
        return "target_parameters"
    tokens = getattr(config, "trainable_token_indices", None)
    if isinstance(tokens, dict):
        trained = any(name.endswith(table) for table in tokens)
    else:
        find = getattr(model, "get_input_embeddings", None)
        trained = tokens is not None and callable(find) and find() is module
    return "trainable_token_indices" if trained else None


def _reason(config: Any, module: nn.Module) -> str | None:
    """Say why an adapter of this configuration cannot be put around this layer, or return None."""
    method = _method(config)
    if method in REFUSED:
        return f"{method} {REFUSED[method]}"
    if method not in SERVED:
        return f"{method} is a method of peft that lowbit does not know"
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.lower().startswith(_LORA_READS):
        return f"init_lora_weights={start!r} reads float weights"
    if getattr(config, "kasa_config", None) is not None:
        return "kasa_config reads float weights"
    kind = kind_of(module)
    if not kind.multiplies and getattr(config, "use_dora", False):
        return f"use_dora on an {kind.name} reads float weights"
    return None


serve_packed_layers()
