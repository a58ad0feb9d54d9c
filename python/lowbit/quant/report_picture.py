# SPDX-License-Identifier: Apache-2.0
"""The picture of a report of quantize_."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowbit.tables.layer_picture import layer_picture


def picture(rows: Sequence[Any], config: str) -> Any:
    """Draw bars of each layer's bytes before and after, in a colour per format, below them its error; return both axes.
    ``rows`` are those of a report, whose file imports this one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    sizes, errors = layer_picture(
        "QuantizationReport.plot",
        [row.layer for row in rows],
        [row.bytes_before / 1e6 for row in rows],
        [row.bytes_after / 1e6 for row in rows],
        [row.format or "stays float" for row in rows],
        [row.error_db for row in rows],
        label_before="before",
        unchanged="stays float",
    )
    sizes.set_title(config, fontsize="medium")
    sizes.set_ylabel("MB")
    errors.set_ylabel("error, dB (up is better)")
    return sizes, errors
