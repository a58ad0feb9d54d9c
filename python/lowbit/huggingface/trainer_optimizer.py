# SPDX-License-Identifier: Apache-2.0
"""lowbit's optimizers under transformers' names for those of bitsandbytes and torchao (``optim="adamw_8bit"``).

transformers has no registry of optimizers, but its Trainer takes a class and arguments in place of a name.
`trainer_optimizer` returns these, so transformers is not modified, and the call shows whose optimizer is used.
"""

from __future__ import annotations

from typing import Any

from lowbit.optim import AdamW, AdamW4bit, AdamW8bit, CPUOffloadOptimizer, Lion8bit
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
_ARGS = {"block_size": int, "min_8bit_size": int, "bf16_stochastic_round": bool}
_PAGED_ARGS = {"minimal_size": int, "offload_gradients": bool}
_SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def trainer_optimizer(arguments: Any) -> tuple[type, dict[str, Any]]:
    """Return lowbit's optimizer for the ``optim`` and the hyperparameters of a transformers TrainingArguments.

    Args:
        arguments: a TrainingArguments. Its ``optim`` is one of adamw_8bit, adamw_bnb_8bit, adamw_torch_8bit,
            adamw_torch_4bit, lion_8bit, lion_32bit, or, with states on the CPU by `CPUOffloadOptimizer`,
            paged_adamw_8bit, paged_adamw_32bit, paged_lion_8bit, paged_lion_32bit. learning_rate, adam_beta1,
            adam_beta2 and adam_epsilon are used too, as are these ``optim_args``: block_size, min_8bit_size,
            bf16_stochastic_round, and with paged names minimal_size and offload_gradients.

    Returns:
        The class and its arguments, as ``Trainer(optimizer_cls_and_kwargs=...)`` takes them.

    Raises:
        TypeError: ``arguments`` is not a TrainingArguments.
        ValueError: ``optim`` is another name, or ``optim_args`` has an option that the optimizer does not have.

    Example:
        >>> arguments = TrainingArguments("out", optim="adamw_8bit", learning_rate=1e-4)
        >>> Trainer(model, arguments, optimizer_cls_and_kwargs=lowbit.trainer_optimizer(arguments))
    """
    needed = ("optim", "optim_args", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon")
    if missing := [name for name in needed if not hasattr(arguments, name)]:
        raise TypeError(
            f"trainer_optimizer: arguments must be a TrainingArguments, got {type(arguments).__name__} without "
            f"{', '.join(missing)}"
        )
    name = getattr(arguments.optim, "value", arguments.optim)
    if name not in _SERVED:
        raise ValueError(f"trainer_optimizer: optim must be one of {', '.join(_SERVED)}; got {name!r}")
    optimizer_class, options = _SERVED[name]
    paged = name.startswith("paged_")
    options = {"lr": arguments.learning_rate, "betas": (arguments.adam_beta1, arguments.adam_beta2), **options}
    if optimizer_class is not Lion8bit:
        options["eps"] = arguments.adam_epsilon
    options |= _read(arguments.optim_args, _ARGS | (_PAGED_ARGS if paged else {}))
    return (
        (CPUOffloadOptimizer, {"optimizer_class": optimizer_class, **options}) if paged else (optimizer_class, options)
    )


def _read(optim_args: str | None, known: dict[str, type]) -> dict[str, Any]:
    """Return the arguments in a string such as ``"block_size=128,bf16_stochastic_round=true"``."""
    values: dict[str, Any] = {}
    for entry in filter(None, (optim_args or "").replace(" ", "").split(",")):
        name, _, text = entry.partition("=")
        if name not in known:
            raise ValueError(f"trainer_optimizer: optim_args must be of {', '.join(known)}; got {entry!r}")
        try:
            values[name] = _SWITCHES[text.lower()] if known[name] is bool else int(text)
        except (KeyError, ValueError):
            kind = "true or false" if known[name] is bool else "a whole number"
            raise ValueError(f"trainer_optimizer: {name} of optim_args must be {kind}, got {text!r}") from None
    return values
