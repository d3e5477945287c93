# SPDX-License-Identifier: Apache-2.0
"""The fault record: what a wait that ran out of polls was waiting for, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..abi.schema import FAULT_FIELDS, FAULT_WAITS, ROW_KINDS


@dataclass(frozen=True)
class Fault:
    """One wait that ran out.

    ``rank`` and ``slot`` are those of the waiting call where it knows them, else ``None``. ``peer`` is the rank the
    wait depends on: the owner whose receive row was still full (``wait == "publish"``), or the source whose row had
    not arrived (``wait == "merge"``). ``row`` is the token row within the slot set, ``head`` the index of the head
    within the owner. ``polls`` is ``None`` for a wait of the torch backend, which nothing could end. ``seconds`` is how
    long it waited, to the millisecond, 0 for a few hundred polls.
    """

    wait: Literal["publish", "merge"]
    row_kind: Literal["legacy", "tagged"]
    rank: int | None
    slot: int | None
    peer: int
    head: int
    row: int
    polls: int | None
    device: int | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        who = "a rank" if self.rank is None else f"rank {self.rank}"
        where = "" if self.slot is None else f" of slot set {self.slot}"
        on = "" if self.device is None else f" on cuda:{self.device}"
        row = f"the {self.row_kind} receive row {self.row} (owned head {self.head}){where}"
        if self.wait == "publish":
            what = f"for rank {self.peer} to merge and release {row}"
            advice = (
                f"Either rank {self.peer} stopped before its merge, the slot sets do not rotate, or the receive "
                "storage was not zeroed before its first use."
            )
        else:
            what = f"for rank {self.peer} to publish {row}"
            advice = (
                f"Either rank {self.peer} stopped or never published this layer, the ranks disagree on slot, capacity "
                "or row kind, or the receive storage and counters were not zeroed together."
            )
        took = f" ({self.seconds:.3g} s)" if self.seconds else ""
        waited = "waits in vain" if self.polls is None else f"waited {self.polls} polls{took}"
        return f"{who}{on} {waited} {what}, and gives up. {advice} Restart the ranks of the group."


_WAIT_NAMES = {value: name for name, value in FAULT_WAITS.items()}
_ROW_KIND_NAMES = {value: name for name, value in ROW_KINDS.items()}


def read_fault(device: int, field_of: Callable[[str], int]) -> Fault | None:
    """The fault in a device's record, whose fields ``field_of`` reads, or None while no wait has run out."""
    record = {name: field_of(name) for name in FAULT_FIELDS}
    if not record["complete"]:
        return None
    return Fault(
        wait=_WAIT_NAMES[record["wait"]],  # type: ignore[arg-type]  # the names are those of the literal
        row_kind=_ROW_KIND_NAMES[record["row_kind"]],  # type: ignore[arg-type]  # likewise
        rank=None if record["rank"] < 0 else record["rank"],
        slot=None if record["slot"] < 0 else record["slot"],
        peer=record["peer"],
        head=record["head"],
        row=record["row"],
        polls=record["polls"],
        device=device,
        seconds=record["milliseconds"] / 1000,
    )
