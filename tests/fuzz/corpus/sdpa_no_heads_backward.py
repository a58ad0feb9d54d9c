# SPDX-License-Identifier: Apache-2.0
# Zero heads, or zero heads of q over four of k: SIGFPE in the backward.
import torch
from tests.fuzz import check

torch.manual_seed(0)
for batch, heads, kv_heads in ((2, 0, 0), (2, 0, 4), (0, 2, 2)):
    q = torch.randn(batch, heads, 4, 8).requires_grad_()
    k, v = (torch.randn(batch, kv_heads, 4, 8).requires_grad_() for _ in range(2))
    check.attention(q, k, v, order=1)
    check.attention(q, k, v, order=2, how="create_graph")
