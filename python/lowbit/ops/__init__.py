# SPDX-License-Identifier: Apache-2.0
"""The ops as torch sees them: registration and fake kernels (registration.py, fakes.py), one file per op for its Python
side."""
