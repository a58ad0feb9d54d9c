# SPDX-License-Identifier: Apache-2.0
"""lowbit inside other people's libraries. Nothing here is imported unless it is asked for."""
