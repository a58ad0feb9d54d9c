# SPDX-License-Identifier: Apache-2.0
"""torch.compile for models with lowbit's ops: one graph for all blocks, post-ops folded into the ops, max_autotune."""
