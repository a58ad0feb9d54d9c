# SPDX-License-Identifier: Apache-2.0
"""info: versions, ISA, threads and registered ops of this build on this machine, with the reason for each fallback."""

from __future__ import annotations

import os
from collections import defaultdict

import torch

from lowbit import _C, devices
from lowbit.backends.report import report, told
from lowbit.devices import level_zero
from lowbit.devices.autoload import autoload_state
from lowbit.ops.registration import registered
from lowbit.peers.supported import integration_states
from lowbit.tables.table import html_table, text_table

_SAID_APART = {"cuda", "onednn", "level_zero", "level_zero_xpu"}
"""Backends that have lines of their own."""


class Info(dict[str, str]):
    """Facts by name; prints as a table."""

    def __repr__(self) -> str:
        return text_table(("lowbit", self["version"]), [item for item in self.items() if item[0] != "version"])

    def _repr_html_(self) -> str:
        return html_table(("lowbit", self["version"]), [item for item in self.items() if item[0] != "version"])


def info() -> Info:
    """Return facts about lowbit on this machine, as ``python -m lowbit info`` prints them."""
    isa, threads = _C.isa(), _C.threads()
    facts = Info(version=_C.version)
    facts["weight layout"] = f"{_C.LAYOUT} (readable: {', '.join(_C.LAYOUTS)})"
    facts["isa compiled"] = ", ".join(isa["compiled"])
    facts["isa detected"] = isa["detected"]
    facts["isa chosen"] = (isa["chosen"] or "none, every op fails") + (f" ({isa['reason']})" if isa["reason"] else "")
    facts["LOWBIT_ISA"] = os.environ.get("LOWBIT_ISA", "not set")
    facts["LOWBIT_KERNEL"] = os.environ.get("LOWBIT_KERNEL", "not set")
    facts["threads"] = f"{threads['count']}, from {threads['source']}"
    facts["recorder"] = _recorder()
    facts["torch"] = torch.__version__
    facts["autoload"] = autoload_state()
    facts["torch.ops.lowbit"] = _ops()
    facts |= integration_states()
    facts["devices"] = ", ".join(devices.list())
    facts |= {f"backend {package.name}": told(package) for package in report()}
    facts |= _backends() if isa["chosen"] else {}
    facts["oneDNN"] = _onednn()
    facts |= _cuda()
    facts["level_zero"] = _level_zero()
    facts["level_zero modules"] = _modules()
    return facts


def _ops() -> str:
    """Return how the ops are registered with torch; which ones, if some are in another way."""
    ways: dict[str, list[str]] = defaultdict(list)
    for row in registered():
        ways[row["how"] + (f" ({row['reason']})" if row["reason"] else "")].append(row["op"].removeprefix("lowbit::"))
    if len(ways) == 1:
        ((how, ops),) = ways.items()
        return f"{len(ops)} ops, {how}"
    return "; ".join(f"{how}: {', '.join(ops)}" for how, ops in ways.items())


def _backends() -> dict[str, str]:
    """Return a line for each instruction set and device whose rows of linear do not run here, with the first reason.
    `lowbit.kernels` has a line for each row."""
    running, reasons = set(), {}
    for row in _C.kernels("linear"):
        what = f"rows of {row['backend']}" if row["device"] == "cpu" else f"device {row['device']}"
        if row["available"]:
            running.add(what)
        elif row["backend"] not in _SAID_APART:
            reasons.setdefault(what, f"not available: {row['reason']}")
    return {what: reason for what, reason in reasons.items() if what not in running}


def _recorder() -> str:
    """Return the path of this process's recording, or why there is none; "off" unless it was enabled."""
    state = _C.recorder.state()
    if not state["on"]:
        return "off (LOWBIT_RECORD=1 turns it on)"
    if state["reason"]:
        return f"in memory alone: {state['reason']}"
    return state["path"] or f"on, makes its file in {state['folder']} at the first call"


def _onednn() -> str:
    """Return the library that was found and whether its rows can run, or the paths that were searched."""
    found = _C.onednn.facts()
    return found["reason"] or f"{found['version']}, {found['path']}"


def _cuda() -> dict[str, str]:
    """Return NVIDIA's libraries that were found, and the ops that run on the first device."""
    facts = {"cuda:0": f"not available: {_C.cuda.unavailable(0)}"}
    if not _C.cuda.unavailable(0):
        ops = [op for op in _C.OPS if any(row["device"] == "cuda" for row in _C.kernels(op))]
        facts = {"cuda:0": f"runs {', '.join(ops)}"}
    facts["cuda attention by cuDNN"] = _C.cuda.cudnn_missing() or "yes"
    return facts | {f"cuda {library['name']}": library["path"] or library["missing"] for library in _C.cuda.libraries()}


def _level_zero() -> str:
    """Return the Intel GPUs and how torch has them, or why there is none."""
    found = _C.level_zero.facts()
    if found["reason"]:
        return f"not available: {found['reason']}"
    if level_zero.enabled():
        known = "lowbit_ze"
    else:
        known = "xpu" if torch.version.xpu else "not enabled (lowbit.devices.level_zero.enable())"
    return f"{', '.join(found['names'])}; {found['path']}; for torch: {known}"


def _modules() -> str:
    """Return the compiler of this build's SPIR-V modules, or why there are none."""
    if reason := _C.level_zero.modules_missing():
        return f"none: {reason}"
    return f"{len(_C.level_zero.modules())}, by {_C.level_zero.modules_compiler()}"
