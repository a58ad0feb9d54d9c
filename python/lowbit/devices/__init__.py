# SPDX-License-Identifier: Apache-2.0
"""Entry points by which torch and other packages find lowbit."""
