# SPDX-License-Identifier: Apache-2.0
"""Random problems and their brute-force answers, for tests, demo and benchmarks."""
