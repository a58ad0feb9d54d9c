# SPDX-License-Identifier: Apache-2.0
"""sparsify_, named as in torchao: 2:4 sparse int8 weights by quantize_, and block-sparse float weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit.formats.block_sparse import BlockSparseWeightConfig
from lowbit.formats.float import FloatWeightConfig
from lowbit.formats.semi_sparse import SemiSparseWeightConfig
from lowbit.formats.text import config_of
from lowbit.formats.torchao import from_torchao
from lowbit.quant.block_sparse import sparsify_layers
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.packing import Selected, by_weight
from lowbit.quant.quantize import quantize_, tell_and_guard
from lowbit.quant.report import QuantizationReport, model_bytes
from lowbit.quant.select import FilterFn, Skipped, select


def sparsify_(
    model: nn.Module, config: SemiSparseWeightConfig | BlockSparseWeightConfig, filter_fn: FilterFn | None = None
) -> QuantizationReport:
    """Make the selected linear layers of ``model`` sparse in place, and return the report of ``quantize_``.

    Args:
        model: any module; its layers keep their identity, hooks and bias.
        config: for 2:4 sparsity, `SemiSparseWeightConfig` (float activations) or
            ``lowbit.int8_dynamic_activation_int8_semi_sparse_weight()``. For block sparsity, `BlockSparseWeightConfig`
            of lowbit or torchao; the blocks stay float and can be trained.
        filter_fn: called with (module, qualified name); True selects an nn.Linear. None selects layers as
            ``quantize_`` does; for block sparsity, only those that can be split into blocks.

    Raises:
        TypeError: config is another configuration, or ``quantize_`` raises it.
        ValueError: in_features is not a multiple of 4; a weight is not 2:4 with ``pruned=True``; a layer that filter_fn
            selects cannot be split into blocks; or ``quantize_`` raises it.

    Example:
        >>> report = lowbit.sparsify_(model, lowbit.SemiSparseWeightConfig())
    """
    config = config_of(config) if isinstance(config, str) else from_torchao(config)
    if isinstance(config, SemiSparseWeightConfig):
        return quantize_(model, config, filter_fn)
    if isinstance(config, BlockSparseWeightConfig):
        return _cut_into_blocks(model, config, filter_fn)
    got: Any = config.__name__ if isinstance(config, type) else type(config).__name__
    raise TypeError(f"sparsify_: config must be a SemiSparseWeightConfig or a BlockSparseWeightConfig, got {got}")


def _cut_into_blocks(
    model: nn.Module, config: BlockSparseWeightConfig, filter_fn: FilterFn | None
) -> QuantizationReport:
    selected, skipped = select(model, FloatWeightConfig(), filter_fn, None, strict=False)
    taken: list[Selected] = []
    for item in selected:
        reason = config.refuses(item.weight.matrix(item.value))
        if reason and filter_fn is not None:
            raise ValueError(f"sparsify_: weight of {item.name or 'the model itself'} {reason}")
        if reason:
            skipped.append(Skipped(item.name, item.module, f"its weight {reason}"))
        else:
            taken.append(item)
    report = QuantizationReport(str(config), model_bytes_before=model_bytes(model))
    with changing_layers(model):
        rows = sparsify_layers(by_weight(taken), config)
    tell_and_guard(model, report, rows, [*taken, *skipped])
    report.model_bytes_after = model_bytes(model)
    return report
