# SPDX-License-Identifier: Apache-2.0
"""Random problems and their answers by brute force, for tests, demo and benchmarks."""
