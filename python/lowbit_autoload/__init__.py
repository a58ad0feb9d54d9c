# SPDX-License-Identifier: Apache-2.0
"""Entry points. `torch.backends`: makes the ops `lowbit::*` known after a bare `import torch`, so a saved .pt2 that
names them loads. `bitsandbytes.backends`: gives bitsandbytes our CPU kernels when it is imported.

A package of its own, so that torch can call it while `lowbit` itself is half imported, and so that a broken `lowbit`
can never break `import torch`: an error is kept (`failures`, shown by `lowbit.info()`) and raised only when
LOWBIT_STRICT=1. It claims no device and opens no device's library. LOWBIT_AUTOLOAD=0 turns it off, and so do
TORCH_DEVICE_BACKEND_AUTOLOAD=0 (torch's own switch, for every package) and LOWBIT_SIM=1; LOWBIT_BITSANDBYTES=0 leaves
bitsandbytes as it is.
"""

from __future__ import annotations

import os

ran = False
failures: dict[str, str] = {}  # by the name of the package that was to know lowbit: "torch", "bitsandbytes"


class _Keeping:
    """Keep what is raised inside as the failure of a package, and raise it only when LOWBIT_STRICT=1."""

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
    """Register the ops with torch; called by `import torch`."""
    global ran
    if os.environ.get("LOWBIT_AUTOLOAD") == "0":
        return
    if os.environ.get("LOWBIT_SIM") == "1":
        return  # `import lowbit` registers the ops and enables the simulated device, which autoload must not
    ran = True
    with _Keeping("torch"):
        from lowbit.ops.registration import register

        register()


def bitsandbytes() -> None:
    """Give bitsandbytes' ops our CPU kernels; called at the end of `import bitsandbytes`."""
    if os.environ.get("LOWBIT_BITSANDBYTES") == "0":
        return
    with _Keeping("bitsandbytes"):
        from lowbit.peers.bitsandbytes_ops import take_ops

        take_ops()
