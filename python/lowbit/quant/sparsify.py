# SPDX-License-Identifier: Apache-2.0
"""sparsify_: by torchao's name, quantize_ to 2:4 weights, and block-sparse float weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit.formats.block_sparse import BlockSparseWeightConfig
from lowbit.formats.float import FloatWeightConfig
from lowbit.formats.semi_sparse import SemiSparseWeightConfig
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
        config: `SemiSparseWeightConfig`, whose activations stay float, or
            ``lowbit.int8_dynamic_activation_int8_semi_sparse_weight()``: 2:4, as ``quantize_`` does it. Or
            `BlockSparseWeightConfig`, also torchao's: weights stay float, and their blocks can still be trained.
        filter_fn: called with (module, qualified name), True selects nn.Linear. Default: as of ``quantize_``; of
            block-sparse weights those layers alone that can be cut into blocks.

    Raises:
        TypeError: config is another configuration, and what ``quantize_`` raises.
        ValueError: what ``quantize_`` raises; of a layer whose in_features are no multiple of 4, and with
            ``pruned=True`` of a weight that is not 2:4; of one that filter_fn selects and cannot be cut into blocks.

    Example:
        >>> report = lowbit.sparsify_(model, lowbit.SemiSparseWeightConfig())
    """
    config = from_torchao(config)
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
