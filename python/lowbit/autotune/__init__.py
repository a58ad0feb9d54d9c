# SPDX-License-Identifier: Apache-2.0
"""autoquant: measure on this machine which format and kernel row is best for each layer of a model, and return a
Plan."""

from __future__ import annotations

from lowbit.autotune.autoquant import autoquant
from lowbit.autotune.plan import Plan
from lowbit.autotune.recording import Recording

__all__ = ["Plan", "Recording", "autoquant"]
