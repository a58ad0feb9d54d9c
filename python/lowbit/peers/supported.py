# SPDX-License-Identifier: Apache-2.0
"""The supported packages, with their versions if installed and what lowbit adds to each. None of them is imported."""

from __future__ import annotations

import importlib.metadata
import os
import sys

from lowbit.peers.when_imported import failures

_OLDEST = {"transformers": 5, "peft": 0, "bitsandbytes": 0, "torchao": 0}
_WHAT = {
    "transformers": 'LowbitConfig, attn_implementation="lowbit", QuantizedCache',
    "peft": "LoRA layers merge into a QuantLinear",
    "torchao": "its quantize_ takes lowbit's configurations",
}
_SWITCH = "LOWBIT_BITSANDBYTES"


def integration_states() -> dict[str, str]:
    """Return a sentence for each package: its version and what lowbit adds to it, or why it adds nothing."""
    states = {}
    for package, oldest in _OLDEST.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            states[package] = "not installed"
            continue
        if int(version.partition(".")[0]) < oldest:
            states[package] = f"{version}: nothing, lowbit needs {oldest} or later"
        else:
            told = [f"{name}: {error}" for name, error in failures.items() if package in name]
            what = _bitsandbytes() if package == "bitsandbytes" else _WHAT[package]
            states[package] = f"{version}: {'; '.join(told) or what}"
    return states


def _bitsandbytes() -> str:
    if os.environ.get(_SWITCH) == "0":
        return f"left as it is, {_SWITCH}=0"
    failure = getattr(sys.modules.get("lowbit_autoload"), "failures", {}).get("bitsandbytes")
    if failure is not None:
        return f"left as it is: {failure}"
    taken = getattr(sys.modules.get("lowbit.peers.bitsandbytes_ops"), "states", {})
    if taken:
        return "; ".join(f"{name}: {state}" for name, state in taken.items())
    if "bitsandbytes" in sys.modules:
        return "left as it is: no entry point of lowbit in the group bitsandbytes.backends (not installed by pip?)"
    return "its CPU ops run on our kernels when it is imported"
