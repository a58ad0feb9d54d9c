# SPDX-License-Identifier: Apache-2.0
# Parameters of shape (3, 0), strided ones, and other default dtypes and devices.
import torch
from tests.fuzz import check

torch.manual_seed(0)
params = [torch.randn(3, 0), torch.randn(0), torch.randn(()), torch.randn(10, 64)[::2], torch.randn(7, 5).t()]
for name in ("AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8", "SGD8bit"):
    for under in ("", "default dtype float64", "default dtype bfloat16", "default device meta"):
        check.trains(name, params, under=under, min_8bit_size=0)
