# SPDX-License-Identifier: Apache-2.0
# Batch 0 with a broadcast float mask that wants a gradient: 0 / 0.
import torch
from tests.fuzz import check

torch.manual_seed(0)
q, k, v = (torch.randn(0, 2, 4, 8).requires_grad_() for _ in range(3))
mask = torch.randn(1, 1, 4, 4).requires_grad_()
check.sdpa(q, k, v, mask, order=1, how="grad")
