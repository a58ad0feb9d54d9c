# SPDX-License-Identifier: Apache-2.0
# unpack under another default dtype or device.
import torch
from tests.fuzz import check

torch.manual_seed(0)
for under in ("default dtype float64", "default dtype bfloat16", "default device meta"):
    check.quantized(torch.randn(17, 64), "int8", 32, "asymmetric", under=under)
