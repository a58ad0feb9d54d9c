# SPDX-License-Identifier: Apache-2.0
"""convert_to_float8_training: the linear layers of a model compute in float8 from the next step
on, until end_float8_training."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lowbit.ops.fakes import FLOATS
from lowbit.quant.adapters import adapter_modules
from lowbit.quant.load_check import guard
from lowbit.quant.select import reason_to_skip
from lowbit.training.float8_config import Float8LinearConfig, float8_config_of
from lowbit.training.float8_linear import Float8Linear

_NAME = "convert_to_float8_training"


def convert_to_float8_training(
    model: nn.Module,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Let the linear layers of ``model`` multiply float8 numbers, forward and backward, in place.

    Layers stay the objects that they are, with their float weights, names and state dict, so optimizers and
    checkpoints of the model fit. Left as they are: adapters of peft, subclasses of nn.Linear, the layers of
    nn.MultiheadAttention, and weights that are computed from others.

    Args:
        model: a module with nn.Linear layers of float32, bfloat16 or float16, of any size; or such a layer.
        module_filter_fn: a function that is called with every nn.Linear and its name; True converts the layer.
        config: a `Float8LinearConfig`, or torchao's own; None: the recipe "tensorwise".

    Returns:
        ``model``.

    Raises:
        TypeError: an argument or a weight is of another type.
        ValueError: a selected layer is quantized, is converted already or is trained otherwise, or cannot be converted,
            or none was selected; nothing has changed then.

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
        if not isinstance(module, nn.Linear) or id(module) in adapters:
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
        if module.weight.dtype not in FLOATS:
            got = module.weight.dtype
            raise TypeError(f"{_NAME}: weight of {label} must be float32, bfloat16 or float16, got {got}")
        layers.append(module)
    if not layers:
        wanted = "the model must have" if module_filter_fn is None else "module_filter_fn must select"
        raise ValueError(f"{_NAME}: {wanted} an nn.Linear that can be converted, got none")
    for module in layers:
        module.__class__, module.config = Float8Linear, config
    guard(model)
    return model


def end_float8_training(model: nn.Module) -> nn.Module:
    """Make the layers that `convert_to_float8_training` converted nn.Linear again, in place, and return ``model``.

    Raises:
        ValueError: there is none.
    """
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
    if not layers:
        raise ValueError("end_float8_training: the model must have layers of convert_to_float8_training, got none")
    for module in layers:
        module.__class__ = nn.Linear
        del module.config
    return model
