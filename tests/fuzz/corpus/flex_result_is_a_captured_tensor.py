# SPDX-License-Identifier: Apache-2.0
# A mod that returns a captured 0-d tensor itself: its value was baked, and it got no gradient.
import torch
from tests.fuzz import check

torch.manual_seed(0)
q = torch.randn(1, 2, 17, 8)
k, v = (torch.randn(1, 2, 17, 8) for _ in range(2))
captured = [torch.randn(()).requires_grad_()]


def make_score_mod(t0):
    def score_mod(s, b, h, i, j):
        return t0

    return score_mod


check.flex(q, k, v, make_score_mod, captured, gradients=True)

for seen in (True, False):
    check.flex(q, k, v, make_mask=lambda t0: lambda b, h, i, j: t0, mask_captured=[torch.tensor(seen)])
