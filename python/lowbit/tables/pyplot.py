# SPDX-License-Identifier: Apache-2.0
"""matplotlib, imported when something is drawn."""

from __future__ import annotations

from typing import Any


def pyplot(asker: str) -> Any:
    """Return ``matplotlib.pyplot``.

    Raises:
        ImportError: matplotlib is not installed; the message names the caller.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(f'{asker} needs matplotlib: pip install "lowbit[notebook]"') from error
    return plt
