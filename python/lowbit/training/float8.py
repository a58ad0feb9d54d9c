# SPDX-License-Identifier: Apache-2.0
"""convert_to_float8_training: switch the linear layers of a model to float8 products, until end_float8_training."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lowbit.ops.fakes import FLOATS
from lowbit.quant.adapters import adapter_modules
from lowbit.quant.kinds import is_packed, is_trained, kind_of
from lowbit.quant.load_check import guard
from lowbit.quant.quant_experts import EXPERTS
from lowbit.quant.select import reason_to_skip
from lowbit.training.experts import Float8Experts, prepare_in_place, restore_in_place
from lowbit.training.float8_config import Float8LinearConfig, float8_config_of
from lowbit.training.float8_linear import Float8Linear

_NAME = "convert_to_float8_training"


def convert_to_float8_training(
    model: nn.Module,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Make the linear layers and experts of ``model`` multiply in float8, in forward and backward, in place.

    Layers keep their identity, float weights, names and state dict, so optimizers and checkpoints of the model remain
    valid. peft adapters, subclasses of nn.Linear that compute anything else, the layers of nn.MultiheadAttention, and
    weights that are computed from other parameters are not converted.

    Args:
        model: a module with nn.Linear layers of float32, bfloat16 or float16, of any size; or such a layer.
        module_filter_fn: called with (module, qualified name) of every nn.Linear and every module of experts; True
            converts it. None converts all that can be converted.
        config: a `Float8LinearConfig` of lowbit or torchao; None is the recipe "tensorwise".

    Returns:
        ``model``.

    Raises:
        TypeError: an argument is of the wrong type, or the dtype of a weight is not one of the above.
        ValueError: a selected layer is quantized, converted already, in another kind of training, or cannot be
            converted; or no layer was selected. The model is not changed then.

    Example:
        >>> config = lowbit.training.Float8LinearConfig.from_recipe_name("rowwise")
        >>> keep_head = lambda module, name: name != "lm_head"
        >>> lowbit.training.convert_to_float8_training(model, module_filter_fn=keep_head, config=config)
    """
    config = float8_config_of(Float8LinearConfig() if config is None else config)
    if module_filter_fn is not None and not callable(module_filter_fn):
        got = type(module_filter_fn).__name__
        raise TypeError(f"{_NAME}: module_filter_fn must be a function of (module, name), True converts; got {got}")
    adapters = adapter_modules(model)
    layers = []
    for name, module in model.named_modules():
        experts = kind_of(module) is EXPERTS and not is_packed(module) and not is_trained(module)
        if not (isinstance(module, nn.Linear) or experts) or id(module) in adapters:
            continue
        if module_filter_fn is not None and not module_filter_fn(module, name):
            continue
        label = name or "the model itself"
        if type(module).__module__.startswith("lowbit."):
            raise ValueError(f"{_NAME}: {label} must be an nn.Linear with a float weight, got {module}")
        reason = reason_to_skip(module)
        if reason and module_filter_fn is not None:
            raise ValueError(f"{_NAME}: {label} cannot be converted: {reason}")
        if reason:
            continue
        if not experts and module.weight.dtype not in FLOATS:
            got = module.weight.dtype
            raise TypeError(f"{_NAME}: weight of {label} must be float32, bfloat16 or float16, got {got}")
        layers.append(module)
    if not layers:
        wanted = "the model must have" if module_filter_fn is None else "module_filter_fn must select"
        raise ValueError(f"{_NAME}: {wanted} an nn.Linear that can be converted, got none")
    for module in layers:
        if isinstance(module, nn.Linear):
            module.__class__, module.config = Float8Linear, config
        else:
            prepare_in_place(module, Float8Experts, float8_config=config)
    guard(model)
    return model


def end_float8_training(model: nn.Module) -> nn.Module:
    """Turn the layers that `convert_to_float8_training` converted back into nn.Linear, in place, and return ``model``.

    Raises:
        ValueError: the model has no such layer.
    """
    layers = [module for module in model.modules() if isinstance(module, (Float8Linear, Float8Experts))]
    if not layers:
        raise ValueError("end_float8_training: the model must have layers of convert_to_float8_training, got none")
    for module in layers:
        if isinstance(module, Float8Experts):
            restore_in_place(module)
            continue
        module.__class__ = nn.Linear
        del module.config
    return model
