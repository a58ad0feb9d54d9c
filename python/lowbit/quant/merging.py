# SPDX-License-Identifier: Apache-2.0
"""merging: options for merges of adapters into packed layers, which peft's functions have no arguments for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats.base import FormatConfig
from lowbit.formats.semi_sparse import FORMAT as SEMI_SPARSE
from lowbit.quant.calibration import Calibration, calibrate
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.merge_options import CURRENT, MergeOptions
from lowbit.quant.merge_report import MergeReport


@contextlib.contextmanager
def merging(
    calibration: Calibration | Iterable[Any] | None = None, format: FormatConfig | None = None
) -> Iterator[MergeReport]:
    """Give options to the merges of peft's adapters into packed layers within the block, on this thread.

    A merge keeps the format and the size of each layer. Groups of weights that the adapter does not change keep their
    codes and scales bit for bit. In others, scales, zero points and codes are chosen so that the change is kept although
    each number of it may be far below a step of the codes.

    Args:
        calibration: a result of ``lowbit.calibrate(model, batches, hessian=True)``, or an iterable of batches that the
            model with its adapter is run on. Errors, and the share that is kept, are then those of products with the
            inputs of each layer. Packed experts are merged without; the report says so.
        format: a configuration for layers that keep less than 0.8 of their change in their own format, and for 2:4
            weights, which have no room for an adapter. They are packed with it, and the report names them. None keeps
            all formats; layers that lose more are named in a warning. Experts keep theirs, and the merge raises a
            ValueError where these lose more.

    Returns:
        A context manager of a `MergeReport` with one row per layer, which is complete after the block.

    Raises:
        TypeError: calibration or format is something else.
        ValueError: format is 2:4; the calibration has no products, or has not seen a layer (raised by the merge, which
            changes nothing then).

    Example:
        >>> with lowbit.merging(calibration=batches) as report:
        ...     model = model.merge_and_unload()
        >>> print(report)
    """
    if isinstance(calibration, (Tensor, Mapping, str)) or not isinstance(
        calibration, (Calibration, Iterable, type(None))
    ):
        raise TypeError(
            "merging: calibration must be of lowbit.calibrate, or an iterable of batches that the model is run on, "
            f"got {type(calibration).__name__}; [x] is one"
        )
    if format is not None and not isinstance(format, FormatConfig):
        got = type(format).__name__
        raise TypeError(
            f"merging: format must be a configuration such as lowbit.int8_weight_only(32) or None, got {got}"
        )
    if format is not None and format.spec(torch.float32).format == SEMI_SPARSE:
        raise ValueError(f"merging: format must have room for a dense change, got {format}, which is 2:4")
    options = MergeOptions(None if calibration is None else functools.partial(_moments, calibration), format)
    token = CURRENT.set(options)
    try:
        yield options.report
    finally:
        CURRENT.reset(token)


def _moments(given: Any, model: nn.Module, filter_fn: Callable[[nn.Module, str], bool]) -> Mapping[str, InputMoments]:
    if not isinstance(given, Calibration):
        given = calibrate(model, given, hessian=True, filter_fn=filter_fn)
    return given.layers
