# SPDX-License-Identifier: Apache-2.0
"""The functions of index context parallelism in FlashInfer's ``msa_ops`` namespace.

Names, shapes, defaults and argument order are FlashInfer's. With ``backend="cake"``, functions launch on torch's
current stream and do not allocate, synchronize or read device values; only the host plan,
``msa_icp_index_score_sharded_plan``, allocates and copies. ``backend="torch"`` is the reference, on any device.
``T`` is the number of query tokens, ``B`` the number of requests or segments, ``W`` the world size, and ``hpr`` the
heads per rank.
"""

from ..indexer import MSAIcpIndexerPlan, prepare_msa_icp_indexer
from ..prefill.window import MSAIcpScorePlan
from ..sizing import (
    msa_icp_comm_layout,
    msa_icp_decode_pool_bytes,
    msa_icp_decode_score_columns,
    msa_icp_index_score_columns,
    msa_icp_index_score_plan_storage,
    msa_icp_prefill_pool_bytes,
)
from .decode import (
    msa_icp_decode_index_score_sharded,
    msa_icp_decode_score_publish,
    msa_icp_merge_candidates,
    msa_icp_topk_select_publish,
)
from .prefill import (
    msa_icp_index_score_sharded,
    msa_icp_index_score_sharded_plan,
    msa_icp_index_score_sharded_plan_device,
    msa_icp_prefill_score_select,
    msa_icp_topk_select_prefill,
)

__all__ = [
    "MSAIcpIndexerPlan",
    "MSAIcpScorePlan",
    "msa_icp_comm_layout",
    "msa_icp_decode_index_score_sharded",
    "msa_icp_decode_pool_bytes",
    "msa_icp_decode_score_columns",
    "msa_icp_decode_score_publish",
    "msa_icp_index_score_columns",
    "msa_icp_index_score_plan_storage",
    "msa_icp_index_score_sharded",
    "msa_icp_index_score_sharded_plan",
    "msa_icp_index_score_sharded_plan_device",
    "msa_icp_merge_candidates",
    "msa_icp_prefill_pool_bytes",
    "msa_icp_prefill_score_select",
    "msa_icp_topk_select_prefill",
    "msa_icp_topk_select_publish",
    "prepare_msa_icp_indexer",
]
