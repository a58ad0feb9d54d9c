# SPDX-License-Identifier: Apache-2.0
"""Entry point `torch.backends`: makes the ops `lowbit::*` known after a bare `import torch`, so a saved .pt2 that names
them loads.

A package of its own, so that torch can call it while `lowbit` itself is half imported, and so that a broken `lowbit`
can
never break `import torch`: whatever goes wrong is kept in `failure` (shown by `lowbit.info()`) and raised only when
LOWBIT_STRICT=1. It claims no device. TORCH_DEVICE_BACKEND_AUTOLOAD=0 (torch's own switch) turns it off,
and so does LOWBIT_SIM=1.
"""

from __future__ import annotations

import os

ran = False
failure: Exception | None = None


def autoload() -> None:
    """Register the ops with torch; called by `import torch`."""
    global ran, failure
    if os.environ.get("LOWBIT_SIM") == "1":
        return  # `import lowbit` registers the ops and enables the simulated device, which autoload must not
    ran = True
    try:
        from lowbit.ops.registration import register

        register()
    except Exception as error:
        failure = error
        if os.environ.get("LOWBIT_STRICT") == "1":
            raise
