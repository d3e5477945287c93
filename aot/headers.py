# SPDX-License-Identifier: Apache-2.0
"""The C++ side of what Python and the launcher agree on, as data for the templates of ``native/``."""

from __future__ import annotations

from typing import Any

from ..abi import schema
from ..abi.calls import OPERATIONS, PREFIXES, ChainState, PlanArguments, schema_digest
from ..abi.schema import DenseTensor, Flag, Group, Integer, Kind, Number, OneOf

_TYPES = {
    schema.E4M3: "Type::kE4M3",
    schema.FLOAT32: "Type::kFloat32",
    schema.INT32: "Type::kInt32",
    schema.INT64: "Type::kInt64",
    schema.UINT8: "Type::kUInt8",
}


def context() -> dict[str, Any]:
    """Return what the launcher's headers are rendered from, besides the constants."""
    return {
        "roles": [(enumerator(role), role) for role in schema.ROLES],
        "fault_fields": schema.FAULT_FIELDS,
        "state_fields": ChainState._fields,
        "plan_fields": _fields(PlanArguments),
        "calls": [_call(call, PREFIXES.get(operation, "")) for operation, call in OPERATIONS.items()],
        "digest": schema_digest(),
    }


def enumerator(role: str) -> str:
    """Return the C++ name of a kernel role."""
    return "k" + role.title().replace("_", "")


def _call(call: type, prefix: str) -> dict[str, Any]:
    return {"name": call.__name__, "fields": _fields(call), "takes": _takes(call, prefix)}


def _fields(call: type) -> list[tuple[str, str]]:
    """Return type and name of each field."""
    kinds = dict(schema.fields_of(call))
    return [(_type(kind, kinds), name) for name, kind in kinds.items()]


def _takes(call: type, prefix: str, path: str = "c.") -> list[str]:
    """Return the statements that take the arguments of a call into ``c``, in order."""
    statements: list[str] = []
    kinds = dict(schema.fields_of(call))
    for name, kind in kinds.items():
        if isinstance(kind, Group):
            statements += _takes(kind.call, f"{name}.", f"{path}{name}.")
        else:
            statements.append(f"{path}{name} = {_take(f'{prefix}{name}', kind, kinds, path)};")
    return statements


def _type(kind: Kind, kinds: dict[str, Kind]) -> str:
    """Return the C++ type of an argument of a call, whose arguments have ``kinds``."""
    if isinstance(kind, Group):
        return kind.call.__name__
    if isinstance(kind, Integer):
        fits = kind.low > -schema.INT32_MAX and (
            _type(kinds[kind.high], kinds) == "int" if isinstance(kind.high, str) else kind.high <= schema.INT32_MAX
        )
        return "int" if fits else "int64_t"
    return {Flag: "bool", Number: "double", OneOf: "int", DenseTensor: "Tensor"}[type(kind)]


def _take(name: str, kind: Kind, kinds: dict[str, Kind], path: str) -> str:
    """Return the expression that takes and checks one argument."""
    if isinstance(kind, Flag):
        return f'call.flag("{name}")'
    if isinstance(kind, Number):
        return f'call.finite_number("{name}")'
    if isinstance(kind, OneOf):
        return f'as_int(call.one_of("{name}", {kind.first}, {kind.second}))'
    if isinstance(kind, DenseTensor):
        dtype = _TYPES[kind.dtype]
        if kind.tagged_dtype is not None:
            dtype = f"{path}tagged ? {_TYPES[kind.tagged_dtype]} : {dtype}"
        return f'call.{"optional_" * kind.optional}tensor("{name}", {dtype}, {kind.dimensions})'
    assert isinstance(kind, Integer)
    if kind == Integer():
        return f'call.integer("{name}", INT64_MIN, INT64_MAX)'
    high = f"{path}{kind.high}" if isinstance(kind.high, str) else str(kind.high)
    taken = f'call.integer("{name}", {kind.low}, {high})'
    return f"as_int({taken})" if _type(kind, kinds) == "int" else taken
