# SPDX-License-Identifier: Apache-2.0
# A default device or dtype of torch is not that of a mod.
import torch
from tests.fuzz import check

torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 16, 8) for _ in range(3))
for under in ("default device meta", "default dtype float64"):
    check.flex(q, k, v, lambda: lambda s, b, h, i, j: s + (i - j) * 0.5, [], under=under)
    check.flex(q, k, v, make_mask=lambda: lambda b, h, i, j: i >= j, under=under)
