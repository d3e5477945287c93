# SPDX-License-Identifier: Apache-2.0
"""The schema: C++ is rendered from it, and a launcher that was compiled with another is refused."""

from __future__ import annotations

import re
import subprocess
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from flashinfer_msa.abi import calls, schema
from flashinfer_msa.aot import headers, launcher, matrix
from flashinfer_msa.aot.render import render_headers
from flashinfer_msa.manifest import Manifest, load_manifest
from flashinfer_msa.prefill.window import MSAIcpScorePlan
from flashinfer_msa.runtime import native

NEIGHBOURS = [(name, first) for name, call in calls.OPERATIONS.items() for first in range(len(call._fields) - 1)]


def swapped(values: Sequence[Any], first: int) -> tuple[Any, ...]:
    """``values`` with one and the next exchanged."""
    return (*values[:first], values[first + 1], values[first], *values[first + 2 :])


def with_swapped_fields(call: type, first: int) -> type:
    """A call like ``call``, two neighbouring fields exchanged."""
    hints = typing.get_type_hints(
        call, localns={"Tensor": torch.Tensor, "MSAIcpScorePlan": MSAIcpScorePlan}, include_extras=True
    )
    return NamedTuple(call.__name__, swapped(list(hints.items()), first))


def refuses_to_load() -> None:
    """Assert that the installed launcher does not fit the package as it is now, and that the error says what to do."""
    with pytest.raises(RuntimeError) as caught:
        native._load_library.__wrapped__()
    assert re.fullmatch(
        r".*libflashinfer_msa\.so must have been built from this version of the package: the digest of its schema must "
        r"be [0-9a-f]{64}, was [0-9a-f]{64}; build it again with `flashinfer-msa build`, or reinstall the package",
        str(caught.value),
    )


def test_the_installed_launcher_fits() -> None:
    assert native.library()["schema_digest"]() == calls.schema_digest()


def test_the_digest_needs_neither_torch_nor_jinja() -> None:
    code = (
        "import sys; from flashinfer_msa.abi.calls import schema_digest; print(schema_digest()); "
        "assert not {'torch', 'jinja2'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == calls.schema_digest()


def test_a_launcher_without_a_digest_is_refused() -> None:
    class Old:
        def __getitem__(self, name: str) -> Any:
            raise AttributeError(f"Module has no function '{name}'")  # as tvm-ffi does

    with pytest.raises(RuntimeError, match=r"^old\.so must have been built from this .*, was none; build it again"):
        native._require_schema(Old(), Path("old.so"))


# --- swaps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operation", "first"), NEIGHBOURS, ids=str)
def test_any_two_neighbouring_fields_of_an_operation_count(
    monkeypatch: pytest.MonkeyPatch, operation: str, first: int
) -> None:
    before = calls.schema_digest()
    monkeypatch.setitem(calls.OPERATIONS, operation, with_swapped_fields(calls.OPERATIONS[operation], first))
    assert calls.schema_digest() != before


def swap_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calls.OPERATIONS, "decode_score", with_swapped_fields(calls.DecodeScore, 0))


def swap_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = with_swapped_fields(calls.PlanArguments, 0)
    hints = typing.get_type_hints(
        calls.PrefillScore,
        localns={"Tensor": torch.Tensor, "MSAIcpScorePlan": MSAIcpScorePlan},
        include_extras=True,
    )
    hints["plan"] = typing.Annotated[MSAIcpScorePlan, schema.Group(plan)]
    monkeypatch.setitem(calls.OPERATIONS, "prefill_score", NamedTuple("PrefillScore", list(hints.items())))


def swap_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ChainState", with_swapped_fields(calls.ChainState, 1))


def swap_fault_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "FAULT_FIELDS", swapped(schema.FAULT_FIELDS, 3))


def swap_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "ROLES", swapped(schema.ROLES, 0))


def swap_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"POOL_LISTS": schema.CONSTANTS["TOP_K"], "TOP_K": schema.CONSTANTS["POOL_LISTS"]}
    monkeypatch.setattr(schema, "CONSTANTS", {**schema.CONSTANTS, **values})


@pytest.mark.parametrize(
    "swap",
    (swap_operation, swap_plan, swap_state, swap_fault_fields, swap_roles, swap_constants),
    ids=lambda swap: swap.__name__,
)
def test_a_launcher_from_before_a_swap_is_refused(
    monkeypatch: pytest.MonkeyPatch, swap: Callable[[pytest.MonkeyPatch], None]
) -> None:
    native._load_library.__wrapped__()
    swap(monkeypatch)
    refuses_to_load()


@pytest.mark.parametrize("operation", ("decode_score", "merge"))
def test_a_launcher_from_after_a_swap_takes_the_new_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, operation: str
) -> None:
    """C++ knows arguments by name only: compiled again, it takes them in the new order without a change."""
    import tvm_ffi

    call = with_swapped_fields(calls.OPERATIONS[operation], 0)
    monkeypatch.setitem(calls.OPERATIONS, operation, call)
    library = compile_launcher(tmp_path)
    monkeypatch.setattr(native, "load_manifest", lambda: Manifest(tmp_path, {"launcher": None, "cubins": []}))
    monkeypatch.setattr(Manifest, "launcher", lambda self: library)
    module = native._load_library.__wrapped__()
    assert isinstance(module, tvm_ffi.Module)
    with pytest.raises(ValueError, match=f"^{call._fields[0]} must be a dense tensor, was 1"):
        module[operation](False, *range(1, 1 + len(call._fields)))


def compile_launcher(folder: Path) -> Path:
    """The launcher of the package as it is now."""
    (folder / launcher.GENERATED).mkdir()
    for name, text in render_headers().items():
        (folder / launcher.GENERATED / name).write_text(text)
    subprocess.run(
        launcher.command(launcher.find_compiler(), launcher.FILE, folder),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return folder / launcher.FILE


# --- what is rendered -------------------------------------------------------------------------------------------------


def body_of(kind: str, name: str, text: str) -> str:
    """The lines of a C++ struct or enum."""
    found = re.search(rf"^{kind} {name}\b[^\n]*{{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


def taken_names(call: type) -> list[str]:
    """Names that the rendered code takes for a call, in order."""
    return re.findall(r'call\.\w+\("([\w.]+)"', body_of("struct", call.__name__, render_headers()["calls.h"]))


def python_names(operation: str) -> list[str]:
    """Names of an operation's arguments in the order of Python, a plan's in the plan's place."""
    names: list[str] = []
    for name in calls.OPERATIONS[operation]._fields:
        is_plan = name in ("plan", "window_plan")
        names += [f"{name}.{field}" for field in calls.PlanArguments._fields] if is_plan else [name]
    return [calls.PREFIXES.get(operation, "") + name for name in names]


@pytest.mark.parametrize("operation", calls.OPERATIONS)
def test_rendered_order_is_that_of_python(operation: str) -> None:
    assert taken_names(calls.OPERATIONS[operation]) == python_names(operation)


@pytest.mark.parametrize("operation", calls.OPERATIONS)
def test_each_operation_takes_its_own_call(operation: str) -> None:
    sources = "".join(path.read_text() for path in Path(native.__file__).parent.parent.glob("native/*.cc"))
    body = sources.partition(f"__tvm_ffi_{operation}(")[2].partition("MSA_EXPORT")[0]
    assert re.findall(r"calls::(\w+)::take", body) == [calls.OPERATIONS[operation].__name__]


def test_rendered_records_are_those_of_python() -> None:
    rendered = render_headers()
    state = body_of("struct", "ChainState", rendered["calls.h"])
    assert tuple(re.findall(r"int64_t (\w+);", state)) == calls.ChainState._fields
    record = body_of("struct", "FaultRecord", rendered["params.h"])
    assert tuple(re.findall(r"int (\w+);", record)) == schema.FAULT_FIELDS
    assert tuple(re.findall(r'"(\w+)",', rendered["schema.h"])) == schema.FAULT_FIELDS
    roles = rendered["roles.h"].partition("kRoleNames")[2].partition("};")[0]
    assert tuple(re.findall(r'"(\w+)"', roles)) == schema.ROLES
    enumerators = re.findall(r"^  (k\w+),$", body_of("enum", "Role", rendered["roles.h"]), re.MULTILINE)
    assert enumerators == [headers.enumerator(role) for role in schema.ROLES]


def test_a_chain_state_is_packed_in_the_order_of_its_fields() -> None:
    state = calls.ChainState(*range(len(calls.ChainState._fields)))
    packed = state.pack()
    assert packed.dtype is torch.int64 and packed.device.type == "cpu"
    assert packed.tolist() == list(range(len(calls.ChainState._fields)))


@pytest.mark.parametrize("name", matrix.ARCHITECTURES)
def test_kernels_have_the_roles_of_the_launcher(name: str) -> None:
    assert {kernel.role for unit in matrix.units([name]) for kernel in unit.kernels} == set(schema.ROLES)


def test_an_argument_limits_one_after_it() -> None:
    """A range may name an argument only if that is taken before."""
    for operation, call in calls.OPERATIONS.items():
        names: list[str] = []
        for name, kind in schema.fields_of(call):
            if isinstance(kind, schema.Integer) and isinstance(kind.high, str):
                assert kind.high in names, (operation, name)
            names.append(name)


def test_the_installed_launcher_is_that_of_these_sources() -> None:
    """Else what the tests above say of it says nothing about the sources."""
    from flashinfer_msa.aot.render import launcher_digest

    assert load_manifest().data["launcher"]["source_digest"] == launcher_digest()
