# SPDX-License-Identifier: Apache-2.0
"""Receive storage: the rows that publishers store into and owners merge, and the counters of both.

:func:`local_comm` makes it for ranks of one process, :func:`allocate_comm` for one rank per process. The carriers of a
prefill step go through :func:`exchange_carriers`.

What must be equal on all ranks of a group, layer by layer: queries, ``seq_lens``, ``num_valid_pages`` and with them the
number and order of tokens, padding included; ``decode_query_len``, row form, slot set and the order of layers; forced
blocks; the tokens of an exchange. Ranks that differ in these wait for rows that do not come, or select differently.
What the ranks compare in :func:`allocate_comm` is less: what they are, not what they are given. Block tables and keys
are each rank's own, and so are scratch, pools, ``enable_pdl``, and whether a decode layer is launched eagerly or from a
graph.

At the end: the last step, then the caller's graphs and :meth:`MSAIcpLayerGraphs.clear`, then on every rank
:meth:`MSAIcpGroupComm.close`, then ``torch.distributed.destroy_process_group``.
"""

from .exchange import exchange_carriers
from .group import MSAIcpGroupComm, allocate_comm
from .storage import MSAIcpComm, local_comm

__all__ = ["MSAIcpComm", "MSAIcpGroupComm", "allocate_comm", "exchange_carriers", "local_comm"]
