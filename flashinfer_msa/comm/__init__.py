# SPDX-License-Identifier: Apache-2.0
"""Receive storage, in one process or shared by a group of processes, and the exchange of a prefill step."""

from .group import MSAIcpComm, MSAIcpGroupComm, allocate_comm, exchange_carriers, local_comm

__all__ = ["MSAIcpComm", "MSAIcpGroupComm", "allocate_comm", "exchange_carriers", "local_comm"]
