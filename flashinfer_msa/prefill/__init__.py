# SPDX-License-Identifier: Apache-2.0
"""Prefill windows: their plans, on the device and on the host, and how their scores are summed."""
