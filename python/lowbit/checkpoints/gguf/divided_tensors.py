# SPDX-License-Identifier: Apache-2.0
"""DividedTensor: a tensor of a file whose rows are those of several matrices of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class DividedTensor:
    """A tensor ``[n, k]`` that several parameters share. Each keeps the codes of its rows.

    Args:
        parameters: their names in a layer.
        rows: returns, for each parameter, the row of the file for each of its rows. Every row of the file belongs to
            one parameter.
    """

    parameters: tuple[str, ...]
    rows: Callable[[PreTrainedConfig], tuple[np.ndarray, ...]]
