# SPDX-License-Identifier: Apache-2.0
"""Entry points that torch and bitsandbytes call when they are imported.

`torch.backends` registers the ops `lowbit::*` after a bare `import torch`, so that a saved .pt2 with them loads.
`bitsandbytes.backends` gives bitsandbytes lowbit's CPU kernels.

This is a separate package, so that torch can call it while `lowbit` itself is half imported, and so that a broken
`lowbit` cannot break `import torch`. An error is stored (`failures`, shown by `lowbit.info()`) and raised only if
LOWBIT_STRICT=1. It claims no device and opens no device library. LOWBIT_AUTOLOAD=0 disables it, as do
TORCH_DEVICE_BACKEND_AUTOLOAD=0 (torch's own switch, for every package) and LOWBIT_SIM=1. LOWBIT_BITSANDBYTES=0 disables
only the part for bitsandbytes.
"""

from __future__ import annotations

import os

ran = False
failures: dict[str, str] = {}  # by the package whose entry point failed: "torch", "bitsandbytes"


class _Keeping:
    """Store an exception of the block as the failure of a package, and raise it only if LOWBIT_STRICT=1."""

    def __init__(self, package: str) -> None:
        self.package = package

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        failures[self.package] = f"{type(error).__name__}: {error}"
        return os.environ.get("LOWBIT_STRICT") != "1"


def autoload() -> None:
    """Register the ops with torch. `import torch` calls this."""
    global ran
    if os.environ.get("LOWBIT_AUTOLOAD") == "0":
        return
    if os.environ.get("LOWBIT_SIM") == "1":
        return  # `import lowbit` registers the ops and enables the simulated device, which autoload must not do
    ran = True
    with _Keeping("torch"):
        from lowbit.ops.registration import register

        register()


def bitsandbytes() -> None:
    """Give bitsandbytes' ops lowbit's CPU kernels. `import bitsandbytes` calls this at its end."""
    if os.environ.get("LOWBIT_BITSANDBYTES") == "0":
        return
    with _Keeping("bitsandbytes"):
        from lowbit.peers.bitsandbytes_ops import take_ops

        take_ops()
