# SPDX-License-Identifier: Apache-2.0
"""A model of transformers whose config does not say that it is packed, because only parts of it were given to
quantize_, gets its entry when it is saved.

No layer knows the model that it is in, and transformers asks nothing of it before it writes config.json. So each packed
layer, when its state is asked for, looks among the callers for ``Module.state_dict`` of a whole model, and for the
``save_pretrained`` behind it, whose config.json is written again.
"""

from __future__ import annotations

import inspect
import sys

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from lowbit.integrations.config_entry import note_formats

_STATE_DICT = nn.Module.state_dict.__code__
_SAVE = inspect.unwrap(PreTrainedModel.save_pretrained).__code__


def complete_entry() -> None:
    """Write the entry of the outermost model of transformers whose state is being asked for, where it has none."""
    frame, whole, save = sys._getframe(1), None, None
    while frame is not None:
        if frame.f_code is _STATE_DICT and isinstance(frame.f_locals["self"], PreTrainedModel):
            whole = frame.f_locals["self"]
        elif frame.f_code is _SAVE:
            save = frame.f_locals
        frame = frame.f_back
    if whole is None or getattr(whole.config, "quantization_config", None) is not None:
        return
    note_formats(whole)
    if save is not None and save["is_main_process"] and not getattr(whole, "_hf_peft_config_loaded", False):
        whole.config.save_pretrained(save["save_directory"])
