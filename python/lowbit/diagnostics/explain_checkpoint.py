# SPDX-License-Identifier: Apache-2.0
"""explain of a folder: whether lowbit reads a checkpoint that another package quantized, and the line that does so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lowbit.checkpoints.methods import method_of
from lowbit.checkpoints.methods.settings import settings_of


@dataclass(frozen=True, slots=True)
class CheckpointExplanation:
    """What a folder holds.

    Args:
        method: the ``quant_method`` of its config.json, or None.
        line: the call that loads it into packed weights, or None.
        refusal: why lowbit does not read it, or None.
    """

    method: str | None
    line: str | None
    refusal: str | None

    def __repr__(self) -> str:
        if self.refusal is not None:
            return self.refusal
        what = "a float checkpoint" if self.method is None else f"quant_method {self.method}"
        return f"{what}; this line loads it into packed weights:\n{self.line}"


def explain_checkpoint(folder: str | Path) -> CheckpointExplanation:
    """Return what a folder with a config.json holds.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: it is no JSON object.
    """
    path = Path(folder)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"explain: {path} must be a folder with a config.json, and is not")
    settings = settings_of(path)
    method = None if settings is None else settings.get("quant_method")
    try:
        if settings is not None and method != "lowbit":
            method_of(settings, None)
    except ValueError as error:
        return CheckpointExplanation(method, None, str(error))
    config = {None: '"int4_weight_only"', "lowbit": None}.get(method, '"checkpoint"')
    given = "" if config is None else f", quantization_config=lowbit.LowbitConfig({config})"
    return CheckpointExplanation(method, f"AutoModelForCausalLM.from_pretrained({str(path)!r}{given})", None)
