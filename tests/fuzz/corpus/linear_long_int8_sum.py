# SPDX-License-Identifier: Apache-2.0
# The int32 sum of W8A8 per channel wrapped from k = 132,000 on.
import torch
from tests.fuzz import check

torch.manual_seed(0)
for k in (132_000, 150_016):
    for x_format in ("int8_row", "int8_row_asymmetric", "int8_group"):
        for values in ("ones", "minus"):
            check.large_k(k, 1, 1, "int8", 0, x_format, values)
