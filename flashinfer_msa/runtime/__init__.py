# SPDX-License-Identifier: Apache-2.0
"""Finds, verifies, loads and launches cubins."""
