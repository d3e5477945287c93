# SPDX-License-Identifier: Apache-2.0
"""What Python and the launcher agree on besides the operations (``calls``): kinds of arguments, kernel roles, faults.

Each is stated here once. ``aot`` renders the C++ side of it, and neither torch nor a compiler is needed to read it.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any

from .. import layout

CONSTANTS = {name: value for name, value in vars(layout).items() if name.isupper() and isinstance(value, int)}
"""The integers of ``layout``, by name: the constants header is rendered from them."""

FAULT_WAITS = {"publish": 1, "merge": 2}
"""What a wait that ran out was part of."""
ROW_KINDS = {"legacy": 0, "tagged": 1}
FAULT_FIELDS = ("complete", "wait", "row_kind", "rank", "slot", "peer", "head", "row", "polls", "milliseconds")
"""int32 fields of a device's fault record, in order. ``complete`` is stored last."""
FAULT_WORDS = 16
"""int32 words of a fault record, its padding included."""

ROLES = (
    *(f"decode_{output}_{tiles}" for output in ("score", "lists") for tiles in range(1, layout.MAX_QUERY_TILES + 1)),
    *(f"select_publish_{rows}_{width}" for width in ("narrow", "wide") for rows in ROW_KINDS),
    *(f"fold_publish_{rows}" for rows in ROW_KINDS),
    *(f"merge_{rows}_{world_size}" for world_size in layout.WORLD_SIZES for rows in (*ROW_KINDS, "exchanged")),
    "prefill_plan",
    "prefill_fill",
    *(f"prefill_{output}{exact}" for exact in ("", "_exact") for output in ("score", "score_global", "lists")),
    "prefill_fold",
    "select_prefill_narrow",
    "select_prefill_wide",
)
"""What kernels do, in the launcher's order. A cubin's kernels are looked up by these names."""

E4M3, FLOAT32, INT32, INT64, UINT8 = "e4m3", "float32", "int32", "int64", "uint8"
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class Flag:
    """``True`` or ``False``."""


@dataclass(frozen=True)
class Number:
    """A finite number."""


@dataclass(frozen=True)
class Integer:
    """An integer from ``low`` to ``high``, which may be the name of an argument before it."""

    low: int = INT64_MIN
    high: int | str = INT64_MAX


@dataclass(frozen=True)
class OneOf:
    """One of two integers."""

    first: int
    second: int


@dataclass(frozen=True)
class DenseTensor:
    """A tensor of ``dtype`` with memory, or of ``tagged_dtype`` if the argument ``tagged`` is true."""

    dtype: str
    dimensions: int
    tagged_dtype: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class Group:
    """The arguments of ``call`` one after another. Errors name them ``<name of the group>.<name>``."""

    call: type


Kind = Flag | Number | Integer | OneOf | DenseTensor | Group


class _Tensor:
    """Stands for ``torch.Tensor`` where annotations are read."""


def fields_of(call: type, prefix: str = "") -> list[tuple[str, Kind]]:
    """The fields of a call and the kind of each, from its annotations. Names start with ``prefix``."""
    hints = typing.get_type_hints(call, localns={"Tensor": _Tensor, "MSAIcpScorePlan": object}, include_extras=True)
    return [(prefix + name, _kind_of(hint)) for name, hint in hints.items()]


def arguments_of(call: type, prefix: str = "") -> list[tuple[str, Kind]]:
    """What the launcher takes of a call: its fields in order, with those of a group in the group's place."""
    arguments: list[tuple[str, Kind]] = []
    for name, kind in fields_of(call, prefix):
        arguments += arguments_of(kind.call, f"{name}.") if isinstance(kind, Group) else [(name, kind)]
    return arguments


def _kind_of(hint: Any) -> Kind:
    if hint is bool:
        return Flag()
    if hint is int:
        return Integer()
    if hint is float:
        return Number()
    value, kind = typing.get_args(hint)
    if isinstance(kind, DenseTensor) and type(None) in typing.get_args(value):
        return DenseTensor(kind.dtype, kind.dimensions, kind.tagged_dtype, optional=True)
    return kind
