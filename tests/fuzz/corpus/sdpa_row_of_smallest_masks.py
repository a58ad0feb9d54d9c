# SPDX-License-Identifier: Apache-2.0
# Rows whose additive mask is all finfo.min (padding of Hugging Face models), or large of either sign, are averaged.
import torch
from tests.fuzz import check

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 17, 8) for _ in range(3))
for value in (torch.finfo(torch.float32).min, torch.finfo(torch.float32).max, -1e38, 1e38, 1e30, -1e30, 1e12, -1e12):
    for length in (17, 2):
        mask = torch.randn(1, 1, length, 17)
        mask[..., 1:, :] = value
        check.sdpa(q[:, :, :length], k, v, attn_mask=mask)
