# SPDX-License-Identifier: Apache-2.0
# causal and a bool mask under create_graph and torch.func: the mask replaced causal.
import torch
from tests.fuzz import check

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
mask = torch.rand(9, 9)[None, None] > 0.3
for how in ("grad", "create_graph", "func"):
    check.attention(q, k, v, mask, causal=True, order=1, how=how)
check.attention(q, k, v, mask, causal=True, order=2, how="create_graph")
