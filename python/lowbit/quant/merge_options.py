# SPDX-License-Identifier: Apache-2.0
"""The options of merges of adapters into packed layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import nn

from lowbit.formats.base import FormatConfig
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.merge_report import MergeReport


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """What `merging` was called with, and the report that it fills.

    ``calibrate`` returns the moments of the inputs of those layers of a model that a filter selects, by their names; it
    is None if all inputs count the same.
    """

    calibrate: Callable[[nn.Module, Callable[[nn.Module, str], bool]], Mapping[str, InputMoments]] | None = None
    format: FormatConfig | None = None
    report: MergeReport = field(default_factory=MergeReport)


CURRENT: ContextVar[MergeOptions | None] = ContextVar("lowbit_merging", default=None)
"""The options of the innermost `merging` of this thread, or None outside of it."""
