# SPDX-License-Identifier: Apache-2.0
"""Which kernel row runs and why the others do not; what this machine and this torch gave us."""
