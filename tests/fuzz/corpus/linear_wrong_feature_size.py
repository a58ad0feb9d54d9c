# SPDX-License-Identifier: Apache-2.0
# QuantLinear took a wrong feature size wherever the padded panels agree.
import torch
from tests.fuzz import check

import lowbit

torch.manual_seed(0)
for config in (
    lowbit.Int8WeightOnlyConfig(),
    lowbit.Int4WeightOnlyConfig(group_size=32),
    lowbit.FloatWeightConfig(torch.bfloat16),
):
    for given in (321, 383, 385, 1):
        check.feature_size(config, 384, given)
        check.feature_size(config, 384, given, gradient=True)
