# SPDX-License-Identifier: Apache-2.0
"""What the config.json of a checkpoint says about its quantization. This file imports no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lowbit.checkpoints.methods.quanto import MAP


def settings_of(folder: Path) -> dict[str, Any] | None:
    """Return the entry ``quantization_config`` of the config.json in a folder, or None if there is none.

    Raises:
        ValueError: the file is no JSON object, or the entry is none.
    """
    path, apart, map = folder / "config.json", folder / "hf_quant_config.json", folder / MAP
    if not path.exists():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        inner = config.get("text_config") or {}
        entry = config.get("quantization_config") or config.get("compression_config")
        entry = entry or inner.get("quantization_config")
        if entry is None and apart.exists():  # of ModelOpt
            path = apart
            entry = {"quant_method": "modelopt"} | json.loads(path.read_text(encoding="utf-8"))["quantization"]
        if map.exists() and (entry is None or entry.get("quant_method") == "quanto"):
            path = map
            entry = {"quant_method": "quanto", "map": json.loads(path.read_text(encoding="utf-8"))}
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON object with settings, got {error!r}") from None
    if entry is not None and not isinstance(entry, dict):
        raise ValueError(f"{path}: quantization_config must be an object, got {entry!r}")
    return entry
