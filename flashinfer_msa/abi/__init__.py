# SPDX-License-Identifier: Apache-2.0
"""The interface between Python and the native launcher, stated once. ``aot`` renders the C++ side from it."""
