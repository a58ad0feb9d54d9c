# SPDX-License-Identifier: Apache-2.0
"""torch.compile of models with our ops: one graph for all blocks, post-ops folded into the ops."""
