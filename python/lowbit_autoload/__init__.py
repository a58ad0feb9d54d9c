# SPDX-License-Identifier: Apache-2.0
"""Entry points. `torch.backends`: makes the ops `lowbit::*` known after a bare `import torch`, so a saved .pt2 that
names them loads. `bitsandbytes.backends`: gives bitsandbytes our CPU kernels when it is imported.

A package of its own, so that torch can call it while `lowbit` itself is half imported, and so that a broken `lowbit`
can
never break `import torch`: whatever goes wrong is kept in `failure` (shown by `lowbit.info()`) and raised only when
LOWBIT_STRICT=1. It claims no device. TORCH_DEVICE_BACKEND_AUTOLOAD=0 (torch's own switch) turns it off,
and so does LOWBIT_SIM=1; LOWBIT_BITSANDBYTES=0 leaves bitsandbytes as it is.
"""

from __future__ import annotations

import os

ran = False
failure: Exception | None = None
bitsandbytes_failure: Exception | None = None


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


def bitsandbytes() -> None:
    """Give bitsandbytes' ops our CPU kernels; called at the end of `import bitsandbytes`."""
    global bitsandbytes_failure
    if os.environ.get("LOWBIT_BITSANDBYTES") == "0":
        return
    try:
        from lowbit.integrations.bitsandbytes_ops import take_ops

        take_ops()
    except Exception as error:
        bitsandbytes_failure = error
        if os.environ.get("LOWBIT_STRICT") == "1":
            raise
