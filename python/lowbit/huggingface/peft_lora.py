# SPDX-License-Identifier: Apache-2.0
"""peft makes the LoRA layer that merges into a QuantLinear (quant/adapters.py) from when it is imported on
(when_imported.py)."""

from __future__ import annotations

from peft.tuners.lora import model

from lowbit.quant.adapters import extend_dispatch

extend_dispatch(model)
