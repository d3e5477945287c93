# SPDX-License-Identifier: Apache-2.0
"""Other packages that run these functions."""
