# SPDX-License-Identifier: Apache-2.0
"""In-place changes to transformers models (fusion, rotation, smoothing), their attention function, and their caches."""
