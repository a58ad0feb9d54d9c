# SPDX-License-Identifier: Apache-2.0
"""Memory of the process: quantizing peaks below the model plus one layer, and no second copy of a weight appears in use.

In a process of its own: the high-water mark of this one knows other tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

LAYERS, SIDE = 6, 2048
LAYER_MB = SIDE * SIDE * 4 / 1e6

SCRIPT = f"""
import json, torch, lowbit
from torch import nn

def memory(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024 / 1e6

warm = nn.Sequential(nn.Linear(256, 256))
CONFIG = CONFIG_TEXT
lowbit.quantize_(warm, CONFIG)
warm(torch.randn(64, 256)), warm(torch.randn(1, 256))
with torch.no_grad():
    model = nn.Sequential(*[nn.Linear({SIDE}, {SIDE}) for _ in range({LAYERS})])
    start = memory("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # resets VmHWM
    report = lowbit.quantize_(model, CONFIG)
    peak, quantized = memory("VmHWM"), memory("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    for m in (1, 3, 64):
        model(torch.randn(m, {SIDE}))
    print(json.dumps(dict(start=start, peak=peak, quantized=quantized, used=memory("VmRSS"), use_peak=memory("VmHWM"),
                          packed=report.bytes_after / 1e6)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("call", ["int8_weight_only()", "int8_dynamic_activation_int4_weight()"])
def test_quantizing_peaks_below_two_layers_and_use_adds_no_copy_of_the_weights(python, call):
    mb = json.loads(python(SCRIPT.replace("CONFIG_TEXT", f"lowbit.{call}")).splitlines()[-1])
    assert mb["peak"] - mb["start"] < 2 * LAYER_MB, mb
    float_weights = LAYERS * LAYER_MB
    assert mb["start"] - mb["quantized"] > 0.8 * (float_weights - mb["packed"]), mb
    assert mb["use_peak"] - mb["quantized"] < 0.5 * LAYER_MB + mb["packed"] / LAYERS, mb
    assert mb["used"] - mb["quantized"] < 0.5 * mb["packed"], mb
