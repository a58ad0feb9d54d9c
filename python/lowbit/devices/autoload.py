# SPDX-License-Identifier: Apache-2.0
"""The state of the autoload entry point (`lowbit_autoload`, group `torch.backends`), for `lowbit.info()`."""

from __future__ import annotations

import os
import sys

SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def autoload_state() -> str:
    """Return one sentence: whether `import torch` registered the ops, and why not."""
    module = sys.modules.get("lowbit_autoload")
    if module is not None and "torch" in module.failures:
        return f"failed: {module.failures['torch']}"
    if module is not None and module.ran:
        return "ran at import torch"
    if os.environ.get("LOWBIT_AUTOLOAD") == "0":
        return "off: LOWBIT_AUTOLOAD=0"
    if os.environ.get("LOWBIT_SIM") == "1":
        return "off: LOWBIT_SIM=1 leaves it to import lowbit"
    value = os.environ.get(SWITCH, "1")
    if value != "1":
        return f"off: {SWITCH}={value}"
    return "did not run: no entry point of lowbit in the group torch.backends (not installed by pip?)"
