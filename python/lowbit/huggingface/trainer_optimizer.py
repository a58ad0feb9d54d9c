# SPDX-License-Identifier: Apache-2.0
"""lowbit's optimizers under transformers' names for those of bitsandbytes and torchao (``optim="adamw_8bit"``), and Muon.

transformers has no registry of optimizers, but its Trainer takes a class and arguments in place of a name, or a factory
that makes an optimizer of the model. `trainer_optimizer` returns these, so transformers is not modified, and the call
shows whose optimizer is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lowbit.optim import (
    AdamW,
    AdamW4bit,
    AdamW8bit,
    ChainedOptimizer,
    CPUOffloadOptimizer,
    Lion8bit,
    Muon,
    Muon8bit,
    split_for_muon,
)
from lowbit.optim.base import LowBitOptimizer

_SERVED: dict[str, tuple[type[LowBitOptimizer], dict[str, Any]]] = {
    "adamw_8bit": (AdamW8bit, {}),
    "adamw_bnb_8bit": (AdamW8bit, {}),
    "adamw_torch_8bit": (AdamW8bit, {}),
    "adamw_torch_4bit": (AdamW4bit, {}),
    "lion_8bit": (Lion8bit, {}),
    "lion_32bit": (Lion8bit, {"optim_bits": 32}),
    "paged_adamw_8bit": (AdamW8bit, {}),
    "paged_adamw_32bit": (AdamW, {}),
    "paged_lion_8bit": (Lion8bit, {}),
    "paged_lion_32bit": (Lion8bit, {"optim_bits": 32}),
}
_MUON: dict[str, tuple[type[LowBitOptimizer], type[LowBitOptimizer]]] = {
    "muon": (Muon, AdamW), "muon_8bit": (Muon8bit, AdamW8bit),
}  # fmt: skip
"""Names of optimizers for matrices, and for all other parameters. transformers has none of them."""
_ARGS = {"block_size": int, "min_8bit_size": int, "bf16_stochastic_round": bool, "master": str}
_PAGED_ARGS = {"minimal_size": int, "offload_gradients": bool}
_SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def trainer_optimizer(arguments: Any, optim: str | None = None) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return lowbit's optimizer for the ``optim`` and the hyperparameters of a transformers TrainingArguments.

    Args:
        arguments: a TrainingArguments. Its ``optim`` is one of adamw_8bit, adamw_bnb_8bit, adamw_torch_8bit,
            adamw_torch_4bit, lion_8bit, lion_32bit, or, with states on the CPU by `CPUOffloadOptimizer`,
            paged_adamw_8bit, paged_adamw_32bit, paged_lion_8bit, paged_lion_32bit. learning_rate, adam_beta1,
            adam_beta2 and adam_epsilon are used too, as are these ``optim_args``: block_size, min_8bit_size,
            bf16_stochastic_round, master, and with paged names minimal_size and offload_gradients.
        optim: a name in place of ``arguments.optim``: one of those, or "muon" or "muon_8bit", which TrainingArguments
            refuses. The matrices inside of the model get Muon with ``adjust_lr_fn="match_rms_adamw"``, for which
            learning_rate and weight_decay of AdamW fit, all other parameters AdamW.

    Returns:
        The class, or for Muon a factory, and its arguments, as ``Trainer(optimizer_cls_and_kwargs=...)`` takes them.

    Raises:
        TypeError: ``arguments`` is not a TrainingArguments.
        ValueError: the name is another one, or ``optim_args`` has an option that the optimizer does not have.

    Example:
        >>> arguments = TrainingArguments("out", optim="adamw_8bit", learning_rate=1e-4)
        >>> Trainer(model, arguments, optimizer_cls_and_kwargs=lowbit.trainer_optimizer(arguments))
    """
    needed = ("optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
    if missing := [name for name in needed if not hasattr(arguments, name)]:
        raise TypeError(
            f"trainer_optimizer: arguments must be a TrainingArguments, got {type(arguments).__name__} without "
            f"{', '.join(missing)}"
        )
    name = getattr(arguments.optim, "value", arguments.optim) if optim is None else optim
    if name in _MUON:
        betas = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
        shared = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
        shared |= _read(arguments.optim_args, _ARGS)
        return _MuonFactory, {"classes": _MUON[name], "shared": shared, "of_adamw": betas}
    if name not in _SERVED:
        raise ValueError(f"trainer_optimizer: optim must be one of {', '.join([*_SERVED, *_MUON])}; got {name!r}")
    optimizer_class, options = _SERVED[name]
    paged = name.startswith("paged_")
    options = {"lr": arguments.learning_rate, "betas": (arguments.adam_beta1, arguments.adam_beta2), **options}
    if optimizer_class is not Lion8bit:
        options["eps"] = arguments.adam_epsilon
    options |= _read(arguments.optim_args, _ARGS | (_PAGED_ARGS if paged else {}))
    return (
        (CPUOffloadOptimizer, {"optimizer_class": optimizer_class, **options}) if paged else (optimizer_class, options)
    )


class _MuonFactory:
    """What the Trainer makes and calls with the model and the arguments."""

    def __call__(
        self,
        model: nn.Module,
        classes: tuple[type[LowBitOptimizer], type[LowBitOptimizer]],
        shared: dict[str, Any],
        of_adamw: dict[str, Any],
    ) -> ChainedOptimizer:
        matrices, others = split_for_muon(model)
        vectors = [p for p in others if p.ndim < 2]  # norms and biases do not decay, as in the Trainer
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": [p for p in others if p.ndim > 1]}]
        groups = [group for group in groups if group["params"]]
        made: list[Any] = [classes[0](matrices, adjust_lr_fn="match_rms_adamw", **shared)] if matrices else []
        made += [classes[1](groups, **of_adamw, **shared)] if groups else []
        return ChainedOptimizer(made)


def _read(optim_args: str | None, known: dict[str, type]) -> dict[str, Any]:
    """Return the arguments in a string such as ``"block_size=128,bf16_stochastic_round=true"``."""
    values: dict[str, Any] = {}
    for entry in filter(None, (optim_args or "").replace(" ", "").split(",")):
        name, _, text = entry.partition("=")
        if name not in known:
            raise ValueError(f"trainer_optimizer: optim_args must be of {', '.join(known)}; got {entry!r}")
        try:
            values[name] = _SWITCHES[text.lower()] if known[name] is bool else known[name](text)
        except (KeyError, ValueError):
            kind = "true or false" if known[name] is bool else "a whole number"
            raise ValueError(f"trainer_optimizer: {name} of optim_args must be {kind}, got {text!r}") from None
    return values
