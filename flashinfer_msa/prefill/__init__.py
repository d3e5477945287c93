# SPDX-License-Identifier: Apache-2.0
"""Prefill windows: their plans, made on the device or on the host, and the summation of their scores."""
