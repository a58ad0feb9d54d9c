# SPDX-License-Identifier: Apache-2.0
"""JSON documents that lowbit wrote: read as what is declared, or refused with the place of what is wrong."""
