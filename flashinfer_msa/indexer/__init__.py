# SPDX-License-Identifier: Apache-2.0
"""One rank's indexer. It is prepared once from the serving limits and used by every layer of every step."""

from .indexer import MSAIcpIndexerPlan
from .prepare import prepare_msa_icp_indexer

__all__ = ["MSAIcpIndexerPlan", "prepare_msa_icp_indexer"]
