# SPDX-License-Identifier: Apache-2.0
"""JSON documents that lowbit wrote: read as declared types, or refused with the place of the first fault."""
