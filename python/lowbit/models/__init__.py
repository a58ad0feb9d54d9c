# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, changed in place: fused, rotated, smoothed; their attention and their caches."""
