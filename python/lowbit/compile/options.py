# SPDX-License-Identifier: Apache-2.0
"""lowbit.compile_options: options of torch.compile that fold post-ops into lowbit's ops, and time lowbit's kernels."""

from __future__ import annotations

import warnings
from typing import Any

import torch

_HOOK = "post_grad_custom_pre_pass"
_DENSE_HOOK = "get_algorithm_selector_cache"


def compile_options(*, max_autotune: bool = False) -> dict[str, Any]:
    """Return ``options`` for ``torch.compile`` that make Inductor fold the ops after a quantized linear layer into it.

    Bias, relu, gelu (both kinds), silu, a product and a sum with a tensor of the result's shape become arguments of
    ``lowbit::linear``, in this order. This is the post-op chain of the op, which ``lowbit.fuse`` uses in eager mode.
    Ops that do not fit the chain are compiled as usual. The options affect only this compilation, and Inductor's cache
    takes the pass into account. ``lowbit.explain(options)`` lists the folded ops.

    ``max_autotune`` is torch's mode "max-autotune" with lowbit's kernels among the choices. Float layers with constant
    weights (``torch._inductor.config.freezing``) use the fastest of torch's library call, Inductor's C++ templates and
    lowbit's packed weight. Quantized layers prefer the kernel row that is fastest for their shape. Times are measured
    while a graph is compiled; ``lowbit.explain(options)`` and ``TORCH_LOGS`` show them.

    If this version of torch has no hook for such a pass, the options are empty, with one warning. If it has no hook for
    choices, float layers have Inductor's choices only, with one warning.

    Args:
        max_autotune: whether to time lowbit's kernels, and let Inductor time its own.

    Returns:
        The options, a dict.

    Raises:
        TypeError: ``max_autotune`` is not a bool.
        ValueError: ``torch._inductor.config`` already has another pass, which the options would replace.

    Example:
        >>> compiled = torch.compile(model, options=lowbit.compile_options())
    """
    from torch._inductor import config

    if not isinstance(max_autotune, bool):
        raise TypeError(f"compile_options: max_autotune must be a bool, got {type(max_autotune).__name__}")
    if not hasattr(config, _HOOK):
        _say_once(f"compile_options: torch {torch.__version__} has no {_HOOK}; models are compiled, nothing is folded")
        return {}
    if getattr(config, _HOOK) is not None:
        raise ValueError(
            f"compile_options: torch._inductor.config.{_HOOK} must be None, got a pass, which ours would replace"
        )
    from lowbit.compile.post_ops import FoldPostOps

    options: dict[str, Any] = {_HOOK: FoldPostOps(max_autotune)}
    if max_autotune:
        options["max_autotune"] = True
        _offer_dense()
    return options


def _offer_dense() -> None:
    from torch._inductor import select_algorithm

    if not hasattr(select_algorithm, _DENSE_HOOK):
        _say_once(
            f"compile_options: torch {torch.__version__} has no {_DENSE_HOOK}; float layers keep Inductor's choices"
        )
        return
    from lowbit.compile.dense_choice import offer

    offer()


def fold_report(options: dict[str, Any]) -> Any:
    """Return the report of the pass in these options, or None if they are not from `compile_options`."""
    return getattr(options.get(_HOOK), "report", None)


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=3)
