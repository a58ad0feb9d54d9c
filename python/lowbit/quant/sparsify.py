# SPDX-License-Identifier: Apache-2.0
"""sparsify_: torchao's name for quantize_ to 2:4 weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit.formats.semi_sparse import SemiSparseWeightConfig
from lowbit.quant.quantize import quantize_
from lowbit.quant.report import QuantizationReport
from lowbit.quant.select import FilterFn


def sparsify_(
    model: nn.Module, config: SemiSparseWeightConfig, filter_fn: FilterFn | None = None
) -> QuantizationReport:
    """Make the selected linear layers of ``model`` 2:4 in place, as ``quantize_`` does it, and return its report.

    Args:
        model: any module; its layers keep their identity, hooks and bias.
        config: `SemiSparseWeightConfig`, whose activations stay float, or
            ``lowbit.int8_dynamic_activation_int8_semi_sparse_weight()``.
        filter_fn: called with (module, qualified name), True selects nn.Linear. Default: as of ``quantize_``.

    Raises:
        TypeError: config is another configuration, and what ``quantize_`` raises.
        ValueError: what ``quantize_`` raises; of a layer whose in_features are no multiple of 4, and with
            ``pruned=True`` of a weight that is not 2:4.

    Example:
        >>> report = lowbit.sparsify_(model, lowbit.SemiSparseWeightConfig())
    """
    if not isinstance(config, SemiSparseWeightConfig):
        got: Any = config.__name__ if isinstance(config, type) else type(config).__name__
        raise TypeError(f"sparsify_: config must be a SemiSparseWeightConfig, got {got}")
    return quantize_(model, config, filter_fn)
