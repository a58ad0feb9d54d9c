# SPDX-License-Identifier: Apache-2.0
# sliding_window(W) is W keys; alibi for head counts that are no power of two.
import torch
from tests.fuzz import check

import lowbit

torch.manual_seed(0)
check.mask(lowbit.attention.masks.sliding_window(4), 17, lambda i, j: (j <= i) & (j > i - 4), "sliding_window")
for heads in (8, 12, 6, 20):
    check.alibi(heads, 17)
