# SPDX-License-Identifier: Apache-2.0
"""Receive storage: the rows that publishers store into and owners merge, and the counters of both.

:func:`local_comm` makes receive storage for ranks of one process, and :func:`allocate_comm` for one rank per process.
:func:`exchange_carriers` exchanges the carriers of a prefill step.

These must be equal on all ranks of a group, in every layer:

* the queries, ``seq_lens`` and ``num_valid_pages``, and so the number and order of tokens, including padding;
* ``decode_query_len``, row kind (legacy or tagged), slot set and the order of layers;
* the forced blocks;
* the tokens of an exchange.

Ranks that differ in these wait for rows that never come, or select different blocks. :func:`allocate_comm` compares
only the properties of the indexers and processes; it cannot compare the arguments of later calls. These may differ
between ranks: block tables, keys, scratch, pools, ``enable_pdl``, and whether a decode layer runs eagerly or from a
graph.

Shut down in this order: finish the last step; free the caller's graphs and call :meth:`MSAIcpLayerGraphs.clear`; call
:meth:`MSAIcpGroupComm.close` on every rank; call ``torch.distributed.destroy_process_group``.
"""

from .exchange import exchange_carriers
from .group import MSAIcpGroupComm, allocate_comm
from .storage import MSAIcpComm, local_comm

__all__ = ["MSAIcpComm", "MSAIcpGroupComm", "allocate_comm", "exchange_carriers", "local_comm"]
