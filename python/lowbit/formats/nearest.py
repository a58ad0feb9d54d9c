# SPDX-License-Identifier: Apache-2.0
"""The nearest known names, for errors about unknown ones."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; the nearest is x"`` for the known names that are close to ``name``, or an empty string."""
    found = get_close_matches(name, list(known))
    return f"; the nearest {'is' if len(found) == 1 else 'are'} {', '.join(found)}" if found else ""
