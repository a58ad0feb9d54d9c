# SPDX-License-Identifier: Apache-2.0
"""The specification: the result of every kernel, in readable torch, without regard to speed. It imports only torch."""
