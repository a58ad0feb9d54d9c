# SPDX-License-Identifier: Apache-2.0
# A parameter in another memory order, and its state saved before the next step: 4-bit codes do not say their order.
import torch
from tests.fuzz import check


def change(optimizer, leaves):
    leaves[0].data = leaves[0].data.t().contiguous().t()


torch.manual_seed(0)
for name in ("AdamW4bit", "AdamW8bit"):
    check.same_as_fresh(name, [torch.randn(5, 7)], change, "the parameter in another layout", min_8bit_size=0)
