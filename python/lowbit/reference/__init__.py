# SPDX-License-Identifier: Apache-2.0
"""The specification: what every kernel must compute, in readable torch, without regard to speed. Imports torch only."""
