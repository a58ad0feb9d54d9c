# SPDX-License-Identifier: Apache-2.0
"""The ops as torch sees them: registration (registration.py), fake kernels (fakes.py, or `fake` of the op's file), one
file per op for its Python side."""
