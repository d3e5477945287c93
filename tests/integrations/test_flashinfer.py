# SPDX-License-Identifier: Apache-2.0
"""Registration in FlashInfer: in stand-ins here, and in the real packages in processes of their own.

Run as a program, it is such a process: its arguments are names of checks, its last line their results.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import io
import itertools
import json
import logging
import os
import pickle
import pydoc
import random
import shutil
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from flashinfer_packages import VERSIONS, run_python
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer_msa
from flashinfer_msa import msa_ops, sizing
from flashinfer_msa.integrations import flashinfer as registration
from flashinfer_msa.prefill.window import MSAIcpScorePlan

OURS = {name: getattr(msa_ops, name) for name in msa_ops.__all__ if name.startswith(("msa_icp_", "prepare_"))}
MARKED = sorted(name for name, function in OURS.items() if "backend" in inspect.signature(function).parameters)
ONLY_OURS = {
    "msa_icp_index_score_sharded": ("accumulation",),
    "msa_icp_prefill_score_select": ("accumulation",),
    "prepare_msa_icp_indexer": ("accumulation", "spin_limit", "wait_seconds"),
}
"""Arguments that FlashInfer's functions lack."""
WITH_DEVICE = [name for name, function in OURS.items() if "device" in inspect.signature(function).parameters]
WITH_TENSOR = [name for name in MARKED if name not in WITH_DEVICE]
WITH_PLAN = ["msa_icp_index_score_sharded", "msa_icp_prefill_score_select"]
NEITHER = [name for name in OURS if name not in (*MARKED, *WITH_DEVICE)]

CHECKS: dict[str, tuple[Callable[[], None], tuple[str, ...], bool]] = {}
"""By name: a check of a real package, the versions it is for, and whether it needs a process of its own."""


def check(*versions: str, alone: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a function a check."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[function.__name__] = function, versions or VERSIONS, alone
        return function

    return add


def contents(module: ModuleType) -> tuple[dict[str, Any], list[str]]:
    """What a module has, to compare by identity, and its ``__all__``."""
    return {name: id(value) for name, value in vars(module).items()}, list(module.__all__)


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(owner, name, value)
        yield


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    yield
    flashinfer_msa.unregister()
    assert flashinfer_msa.registered() is None


# --- stand-ins --------------------------------------------------------------------------------------------------------


def twin(name: str) -> Callable[..., Any]:
    """A function with the signature that FlashInfer's has."""

    def theirs(*args: Any, **kwargs: Any) -> str:
        return "theirs"

    signature = inspect.signature(OURS[name])
    kept = [parameter for key, parameter in signature.parameters.items() if key not in ONLY_OURS.get(name, ())]
    theirs.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return theirs


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Makes a FlashInfer in which functions are twins; None stands for a function that it lacks."""

    def make(version: str = "0.7.4", *, icp: bool = True, **functions: Any) -> ModuleType:
        flashinfer, module = ModuleType("flashinfer"), ModuleType("flashinfer.msa_ops")
        flashinfer.__version__ = version
        flashinfer.msa_ops = module
        vars(module).update({name: twin(name) for name in OURS} if icp else {})
        vars(module).update(functions, msa_topk_select=len)
        for name in [name for name, function in functions.items() if function is None]:
            delattr(module, name)
        module.__all__ = [name for name in vars(module) if not name.startswith("__")]
        monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
        monkeypatch.setitem(sys.modules, "flashinfer.msa_ops", module)
        monkeypatch.delitem(sys.modules, "flashinfer.api_logging", raising=False)
        return module

    return make


@pytest.mark.parametrize("prefer", ("Auto", "", None, "cake", ("auto",)))
def test_a_preference_that_does_not_exist(stand_in: Callable[..., ModuleType], prefer: Any) -> None:
    """It is refused, and nothing has changed."""
    before = contents(stand_in())
    with pytest.raises(ValueError, match=r"^prefer must be one of \('auto', 'plugin', 'flashinfer'\), was "):
        flashinfer_msa.register(prefer)
    assert contents(sys.modules["flashinfer.msa_ops"]) == before and flashinfer_msa.registered() is None


@pytest.mark.parametrize("version", ("0.6.18", "0.6.18.post1", "0.7.0rc1", "0.7.4", "0.7.4+cu130", "0.7.99"))
@pytest.mark.parametrize("icp", (False, True))
def test_known_versions(stand_in: Callable[..., ModuleType], version: str, icp: bool) -> None:
    """They are registered in without a word."""
    module = stand_in(version, icp=icp)
    with no_warnings():
        made = flashinfer_msa.register()
    assert made == registration.Registration(
        version, "auto", () if icp else tuple(sorted(OURS)), tuple(sorted(OURS)) if icp else ()
    )
    assert sorted(module.__all__) == sorted([*OURS, "msa_topk_select"])


@pytest.mark.parametrize("version", ("0.6.17", "0.8.0", "0.8.0rc1", "1.0", "0.0.0+unknown", "main"))
@pytest.mark.parametrize("icp", (False, True))
def test_other_versions(stand_in: Callable[..., ModuleType], version: str, icp: bool) -> None:
    """They are registered in with a warning that points at the caller, once."""
    stand_in(version, icp=icp)
    with pytest.warns(RuntimeWarning, match=r"is known to fit FlashInfer >=0\.6\.18,<0\.8, this is ") as warned:
        made = flashinfer_msa.register()
    assert made is not None and made.flashinfer_version == version
    assert len(warned) == 1 and warned[0].filename == __file__ and version in str(warned[0].message)
    with no_warnings():
        assert flashinfer_msa.register() == made


def merge_of(*changes: Callable[[dict[str, inspect.Parameter]], Any]) -> Callable[..., Any]:
    """FlashInfer's merge with other parameters."""
    function = twin("msa_icp_merge_candidates")
    parameters = dict(inspect.signature(function).parameters)
    for change in changes:
        change(parameters)
    function.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return function


def keywords_last(parameters: dict[str, inspect.Parameter]) -> None:
    """Put keyword-only parameters behind the others."""
    for name in [name for name, each in parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY]:
        parameters[name] = parameters.pop(name)


def parameter(name: str, default: Any = inspect.Parameter.empty, kind: Any = inspect.Parameter.KEYWORD_ONLY) -> Any:
    return inspect.Parameter(name, kind, default=default)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (None, "has some ICP functions and lacks msa_icp_merge_candidates"),
        (merge_of(lambda p: p.update(extra=parameter("extra", None))), "has another msa_icp_merge_candidates"),
        (merge_of(lambda p: p.pop("prefill"), lambda p: p.pop("init_blocks")), "has another msa_icp_merge_candidates"),
        (merge_of(lambda p: p.update(prefill=parameter("prefill", True))), "has another msa_icp_merge_candidates"),
        (merge_of(lambda p: p.update(recv_slot=parameter("rows", kind=0))), "has another msa_icp_merge_candidates"),
        (merge_of(lambda p: p.pop("num_valid_pages")), "has another msa_icp_merge_candidates"),
        (merge_of(lambda p: p.update(output=p.pop("output")), keywords_last), "has another msa_icp_merge"),
        ("a string", "has another msa_icp_merge_candidates"),
    ],
    ids=("lacking", "more", "required-missing", "default", "renamed", "fewer", "order", "no-function"),
)
@pytest.mark.parametrize("version", ("0.7.4", "0.9.0"))
def test_other_shapes(stand_in: Callable[..., ModuleType], function: Any, complaint: str, version: str) -> None:
    """A FlashInfer with other functions is not changed, and a warning says why."""
    module = stand_in(version, msa_icp_merge_candidates=function)
    before = contents(module)
    with pytest.warns(RuntimeWarning) as warned:
        assert flashinfer_msa.register() is None
    assert len(warned) == (1 if version == "0.7.4" else 2)
    assert complaint in str(warned[-1].message) and "flashinfer_msa.msa_ops has the same" in str(warned[-1].message)
    assert contents(module) == before and flashinfer_msa.registered() is None
    assert flashinfer_msa.msa_ops.msa_icp_decode_score_columns(1024, 128) == 8


def test_keyword_arguments_have_no_order(stand_in: Callable[..., ModuleType]) -> None:
    """Functions whose keyword-only arguments come in another order take the same calls; so do some without defaults."""

    def last_first(parameters: dict[str, inspect.Parameter]) -> None:
        parameters["init_blocks"] = parameters.pop("init_blocks")

    stand_in(msa_icp_merge_candidates=merge_of(last_first, lambda p: p.pop("spin_limit")))
    with no_warnings():
        assert flashinfer_msa.register() is not None


def test_without_msa_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old FlashInfer has no msa_ops at all."""
    flashinfer = ModuleType("flashinfer")
    flashinfer.__version__, flashinfer.__path__ = "0.6.18", []
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.delitem(sys.modules, "flashinfer.msa_ops", raising=False)
    with pytest.warns(RuntimeWarning, match="FlashInfer 0.6.18 has no msa_ops, so nothing is registered"):
        assert flashinfer_msa.register() is None
    assert flashinfer_msa.registered() is None


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """``register`` says what to do; the plugin says so in the log, and raises nothing."""
    monkeypatch.delenv(registration.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match=r"flashinfer-msa\[flashinfer\]'; flashinfer_msa\.msa_ops has the same"):
        flashinfer_msa.register()
    registration.register_in_vllm()
    assert "pip install 'flashinfer-msa[flashinfer]'" in caplog.text
    caplog.clear()
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    registration.register_in_vllm()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage().startswith("FlashInfer is not installed")
    assert "pip install 'flashinfer-msa[flashinfer]'" in record.getMessage()
    assert flashinfer_msa.registered() is None


def test_a_flashinfer_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own error passes, and the plugin waits until an import succeeds, whoever looks for it in between."""
    monkeypatch.setenv(registration.ENVIRONMENT_VARIABLE, "plugin")
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("import a_package_that_does_not_exist\n")
    (package / "msa_ops.py").write_text("__all__ = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_does_not_exist"):
        flashinfer_msa.register()
    registration.register_in_vllm()
    registration.register_in_vllm()
    with pytest.raises(ModuleNotFoundError, match="a_package_that_does_not_exist"):
        import flashinfer  # noqa: F401
    assert flashinfer_msa.registered() is None
    (package / "__init__.py").write_text("from . import msa_ops\n__version__ = '0.7.0'\n# longer than it was\n")
    importlib.invalidate_caches()
    assert importlib.util.find_spec("flashinfer") and importlib.util.find_spec("flashinfer").origin
    assert flashinfer_msa.registered() is None and not caplog.records
    try:
        from flashinfer.msa_ops import msa_icp_comm_layout

        assert msa_icp_comm_layout is OURS["msa_icp_comm_layout"]
        made = flashinfer_msa.registered()
        assert made and (made.flashinfer_version, made.prefer, made.added) == ("0.7.0", "plugin", tuple(sorted(OURS)))
        assert registration._after_import.action is None
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("value", "prefer"),
    [
        (None, "auto"),
        ("", "auto"),
        ("auto", "auto"),
        ("plugin", "plugin"),
        (" FlashInfer ", "flashinfer"),
        ("0", None),
        ("off", None),
        ("OFF", None),
    ],
)
@pytest.mark.parametrize("imported", (False, True))
def test_values_of_the_plugins_variable(
    stand_in: Callable[..., ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: str | None,
    prefer: str | None,
    imported: bool,
) -> None:
    """They set the preference or switch the plugin off. The plugin waits until FlashInfer has been imported."""
    before = contents(stand_in())
    if not imported:
        monkeypatch.delitem(sys.modules, "flashinfer")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv(registration.ENVIRONMENT_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(registration.ENVIRONMENT_VARIABLE, value)
    registration.register_in_vllm()
    made, waiting = flashinfer_msa.registered(), registration._after_import.action
    if imported:
        assert (made and made.prefer) == prefer and waiting is None
    else:
        assert made is None and (waiting.args if waiting else (None,)) == (prefer,)
    if made is None:
        assert contents(sys.modules["flashinfer.msa_ops"]) == before
    assert not caplog.records


@pytest.mark.parametrize("value", ("2", "on", "cake", "auto,plugin"))
def test_values_that_the_plugin_does_not_know(
    stand_in: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    """They register nothing, and the log names those that there are."""
    before = contents(stand_in())
    monkeypatch.setenv(registration.ENVIRONMENT_VARIABLE, value)
    registration.register_in_vllm()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"FLASHINFER_MSA_REGISTER must be one of auto, plugin, flashinfer, 0, off, was {value!r}: nothing is registered"
    )
    assert record.levelname == "WARNING" and record.name == "flashinfer_msa"
    assert contents(sys.modules["flashinfer.msa_ops"]) == before


def test_the_plugin_after_flashinfer(
    stand_in: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It registers at once, logs what it would warn of, and leaves the process's preference unless told otherwise."""
    caplog.set_level(logging.INFO)
    stand_in("0.9.0", icp=False)
    monkeypatch.delenv(registration.ENVIRONMENT_VARIABLE, raising=False)
    with no_warnings():
        registration.register_in_vllm()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "this is 0.9.0" in caplog.text and flashinfer_msa.registered().prefer == "auto"
    flashinfer_msa.register("plugin")
    registration.register_in_vllm()
    assert flashinfer_msa.registered().prefer == "plugin"
    monkeypatch.setenv(registration.ENVIRONMENT_VARIABLE, " FlashInfer ")
    registration.register_in_vllm()
    assert flashinfer_msa.registered().prefer == "flashinfer"


def test_the_plugin_never_raises(
    stand_in: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong is in the log."""
    stand_in()

    def fail(*_: Any) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setenv(registration.ENVIRONMENT_VARIABLE, "auto")
    for name in ("_register", "_register_and_log"):
        caplog.clear()
        monkeypatch.setattr(registration, name, fail)
        registration.register_in_vllm()
        assert "nothing is registered in FlashInfer" in caplog.text and "unforeseen" in caplog.text


@pytest.mark.parametrize("icp", (False, True))
def test_threads(stand_in: Callable[..., ModuleType], icp: bool) -> None:
    """Threads that register, unregister and call at once see a function of either kind or none, and leave no trace."""
    module = stand_in("0.7.4", icp=icp)
    before = contents(module)
    errors: list[BaseException] = []
    answers: set[Any] = set()
    start = threading.Barrier(6)

    def work(seed: int) -> None:
        choose = random.Random(seed)
        start.wait()
        try:
            for _ in range(150):
                kind = choose.randrange(4)
                if kind == 0:
                    flashinfer_msa.unregister()
                elif kind == 1:
                    made = flashinfer_msa.register(choose.choice(registration.PREFERENCES))
                    assert made is not None and len(made.added) + len(made.replaced) == len(OURS)
                else:
                    function = getattr(module, "msa_icp_decode_pool_bytes", None)
                    answers.add(function and function(max_decode_tokens=1))
        except BaseException as error:
            errors.append(error)

    with no_warnings():
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        flashinfer_msa.unregister()
    assert not errors
    assert answers <= {65536, "theirs" if icp else None} and 65536 in answers
    assert contents(module) == before


# --- real packages: what is registered --------------------------------------------------------------------------------


def fi() -> ModuleType:
    """The real ``flashinfer.msa_ops``."""
    return importlib.import_module("flashinfer.msa_ops")


@check()
def what_is_registered() -> None:
    """Every function, with our signature and documentation; ``__all__``; and back to what was there."""
    before, listed, exported = *contents(fi()), fi().__all__
    with no_warnings():
        made = flashinfer_msa.register()
    flashinfer = sys.modules["flashinfer"]
    has_icp = flashinfer.__version__ == "0.7.4"
    everything = tuple(sorted(OURS))
    added, replaced = ((), everything) if has_icp else (everything, ())
    assert made == registration.Registration(flashinfer.__version__, "auto", added, replaced)
    assert flashinfer_msa.registered() == made
    for name, ours in OURS.items():
        function = getattr(flashinfer.msa_ops, name)
        assert inspect.signature(function) == inspect.signature(ours), name
        assert (function.__doc__ or "").endswith(ours.__doc__), name
        assert ours.__doc__.splitlines()[0] in pydoc.render_doc(function), name
        assert function.__name__ == function.__qualname__ == name and inspect.isfunction(function)
        assert not vars(ours)
    assert fi().__all__ == [*listed, *(name for name in OURS if name not in listed)]
    assert len(set(fi().__all__)) == len(fi().__all__)
    names: dict[str, Any] = {}
    exec("from flashinfer.msa_ops import *", names)
    assert all(names[name] is getattr(fi(), name) for name in OURS)
    assert "MSAIcpIndexerPlan" not in names
    with no_warnings():
        flashinfer_msa.unregister()
    assert contents(fi()) == (before, listed) and fi().__all__ is exported and flashinfer_msa.registered() is None


@check()
def twice_is_once() -> None:
    """A second registration only changes the preference; unregistering twice, or without one, does nothing."""
    before = contents(fi())
    with no_warnings():
        flashinfer_msa.unregister()
        assert contents(fi()) == before
        flashinfer_msa.register()
        once = contents(fi())
        for prefer in ("auto", "plugin", "flashinfer"):
            assert flashinfer_msa.register(prefer) == flashinfer_msa.registered()
            assert flashinfer_msa.registered().prefer == prefer and contents(fi()) == once
        flashinfer_msa.unregister()
        flashinfer_msa.unregister()
    assert contents(fi()) == before


@check()
def what_others_put_on_top() -> None:
    """It stays, with a warning that names it; the rest is undone."""
    name, gone = "msa_icp_merge_candidates", "msa_icp_comm_layout"
    before, listed = contents(fi())
    flashinfer_msa.register()
    ours = getattr(fi(), name)
    theirs = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    setattr(fi(), name, theirs)
    delattr(fi(), gone)
    with pytest.warns(RuntimeWarning) as warned:
        flashinfer_msa.unregister()
    (warning,) = warned
    left = [gone, name] if gone in before else [name]
    assert str(warning.message).startswith(f"{', '.join(left)} of flashinfer.msa_ops are no longer")
    assert warning.filename == __file__
    assert getattr(fi(), name) is theirs
    with pytest.raises(ValueError, match="backend must be one of"):
        theirs(None, None, None, None, init_blocks=0, local_blocks=0, backend="other")
    found, found_listed = contents(fi())
    assert {key for key in found.keys() | before if found.get(key) != before.get(key)} == set(left)
    assert found_listed == listed
    delattr(fi(), name)
    vars(fi()).update({key: ORIGINALS[key] for key in left if key in before})


@check()
def registered_again_after_a_reload() -> None:
    """A warning names functions that a reload has replaced, and says what to do; then ours are back."""
    before = contents(fi())
    flashinfer_msa.register()
    ours = fi().msa_icp_merge_candidates
    fi().msa_icp_merge_candidates = other = functools.partial(ours)
    with pytest.warns(RuntimeWarning, match=r"^msa_icp_merge_candidates of .* call unregister\(\), then register\(\)"):
        assert flashinfer_msa.register() is not None
    assert fi().msa_icp_merge_candidates is other
    fi().msa_icp_merge_candidates = ours
    with no_warnings():
        flashinfer_msa.register()
        flashinfer_msa.unregister()
    assert contents(fi()) == before


@check()
def imported_before_and_meanwhile() -> None:
    """A function that was imported before is what it was; one that was imported meanwhile goes on."""
    name = "msa_icp_topk_select_prefill"
    flashinfer_msa.register()
    meanwhile = getattr(fi(), name)
    assert meanwhile is not ORIGINALS[name]
    flashinfer_msa.unregister()
    assert getattr(fi(), name, None) is ORIGINALS[name]
    scores, valid = torch.randn(3, 4, 8), torch.full((3,), 8, dtype=torch.int32)
    carriers = torch.zeros(2, 4, 3, 33, dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function, carrier in zip((meanwhile, OURS[name]), carriers, strict=True):
            function(scores, valid, carrier, backend="torch")
    assert carriers[0].any() and torch.equal(*carriers)


@check()
def pickles() -> None:
    """Registered functions can be pickled, as FlashInfer's can."""
    for prefer in ("auto", "plugin"):
        flashinfer_msa.register(prefer)
        for name in OURS:
            function = getattr(fi(), name)
            assert pickle.loads(pickle.dumps(function)) is function, name


@check()
def errors_are_ours() -> None:
    """An error is the one that ``flashinfer_msa.msa_ops`` raises."""
    flashinfer_msa.register()
    plane = torch.empty(2, 4, 8, dtype=torch.int32)
    valid, carrier = torch.zeros(2, dtype=torch.int32), torch.zeros(4, 2, 33, dtype=torch.int32)
    for arguments, options in (
        ((plane, valid, carrier), {"backend": "torch"}),
        ((plane.float(), valid, carrier), {"backend": "torch", "force_begin_blocks": 17}),
        ((plane.float(), valid, carrier), {"backend": "nonsense"}),
        ((plane.float(), valid, carrier), {}),
        ((None, valid, carrier), {}),
        ((plane.float(), valid), {}),
        ((plane.float(), valid, carrier), {"unknown": 1}),
    ):
        raised = []
        for module in (msa_ops, fi()):
            with pytest.raises((ValueError, TypeError, RuntimeError)) as info:
                module.msa_icp_topk_select_prefill(*arguments, **options)
            raised.append((info.type, str(info.value)))
        assert raised[0] == raised[1], raised


# --- real packages: calls on the CPU ----------------------------------------------------------------------------------


@check()
def calls_and_compiled_calls() -> None:
    """What ``test_compiled`` has ``flashinfer_msa.msa_ops`` do, eager and in one graph, the functions here do."""
    import test_compiled as compiled

    flashinfer_msa.register()
    with warnings.catch_warnings(), patched(compiled, msa_ops=fi()):
        warnings.simplefilter("ignore")
        for test in (
            functools.partial(compiled.test_decode_functions, tagged=True, fused=False),
            functools.partial(compiled.test_decode_functions, tagged=False, fused=True),
            functools.partial(compiled.test_prefill_functions, prefill_step(), planned="inside"),
        ):
            torch._dynamo.reset()
            test()


def prefill_step() -> Any:
    from test_compiled import LAYOUT, PrefillProblem

    made = PrefillProblem.random(LAYOUT, query_lens=(40, 0, 70), kv_lens=(500, 0, 1500), padding=5)
    _ = made.segments, made.num_valid_pages
    return made


@check()
def indexers_are_ours() -> None:
    """An indexer and a host plan for the CPU are of our classes."""
    flashinfer_msa.register("flashinfer")
    indexer = fi().prepare_msa_icp_indexer(
        world_size=2,
        rank=0,
        num_index_heads=4,
        page_size=128,
        init_blocks=0,
        local_blocks=1,
        max_decode_tokens=8,
        max_decode_query_len=1,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        max_model_len=1024,
        num_sparse_layers=2,
        device="cpu",
        backend="torch",
    )
    assert type(indexer) is msa_ops.MSAIcpIndexerPlan and indexer.arch == "cpu"
    lens = torch.tensor([4], dtype=torch.int32)
    made = fi().msa_icp_index_score_sharded_plan(lens, lens, 4, qo_offset=lens - 4, backend="torch")
    assert type(made) is MSAIcpScorePlan


# --- real packages: marks ---------------------------------------------------------------------------------------------


def call_wrongly(function: Callable[..., Any]) -> None:
    """Call a function with what it refuses at once."""
    parameters = inspect.signature(function).parameters.values()
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    positional = [object() for p in required if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    options = {p.name: object() for p in required if p.kind is inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(ValueError, match="'other'"):
        function(*positional, **options, backend="other")


@check("0.7.4")
def marks() -> None:
    """Warned of once, marked and logged as FlashInfer's own; sizing functions are not."""
    from flashinfer.api_logging import ExperimentalWarning

    for name in MARKED:
        with warnings.catch_warnings(record=True) as theirs:
            warnings.simplefilter("always")
            call_wrongly(getattr(fi(), name))
        flashinfer_msa.register()
        function = getattr(fi(), name)
        assert function.is_experimental is True
        assert function.experimental_feature == ORIGINALS[name].experimental_feature
        assert function.__doc__.startswith(ORIGINALS[name].__doc__.split("\n\n")[0])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            call_wrongly(function)
            call_wrongly(function)
        assert [type(w.message) for w in warned] == [ExperimentalWarning]
        assert not theirs or str(theirs[0].message) == str(warned[0].message)
        flashinfer_msa.unregister()
    assert len(MARKED) == 10
    flashinfer_msa.register()
    for name in OURS.keys() - MARKED:
        assert not hasattr(getattr(fi(), name), "is_experimental")
    with no_warnings():
        assert fi().msa_icp_decode_score_columns(1024, 128) == 8


@check("0.7.4")
def a_traced_call_is_a_use() -> None:
    """Compiled code is warned of while it is traced, and eager code no more then; and the other way round."""
    from flashinfer.api_logging import ExperimentalWarning

    def select(function: Callable[..., Any], scores: torch.Tensor) -> torch.Tensor:
        carrier = scores.new_empty(4, len(scores), 33, dtype=torch.int32)
        function(scores, scores.new_full((len(scores),), 8, dtype=torch.int32), carrier, backend="torch")
        return carrier

    scores = torch.randn(3, 4, 8)
    for order in ((True, False, True), (False, True)):
        flashinfer_msa.register()
        function = functools.partial(select, fi().msa_icp_topk_select_prefill)
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            results = [
                (torch.compile(function, backend="eager", fullgraph=True) if compiles else function)(scores)
                for compiles in order
            ]
        assert [w.category for w in warned] == [ExperimentalWarning]
        assert all(torch.equal(result, results[0]) for result in results)
        flashinfer_msa.unregister()


@check("0.7.4")
def a_routed_call_is_warned_of_once() -> None:
    """By FlashInfer's own function, whose error passes as it is."""
    from flashinfer.api_logging import ExperimentalWarning

    name = "msa_icp_topk_select_prefill"
    fresh = importlib.reload(importlib.import_module("flashinfer.msa_ops.cake_icp_indexer"))
    with patched(fi(), **{name: getattr(fresh, name)}), patched(registration, _capability=lambda device: (10, 3)):
        flashinfer_msa.register("flashinfer")
        with FakeTensorMode():
            plane = torch.empty(2, 4, device="cuda:0")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                with pytest.raises(ValueError, match="scores must be") as raised:
                    getattr(fi(), name)(plane, plane, plane)
        assert [w.category for w in warned] == [ExperimentalWarning]
        assert "flashinfer/experimental" in str(raised.traceback[-1].path)
        flashinfer_msa.unregister()


@check("0.7.4")
def marks_of_functions_that_are_added() -> None:
    """A FlashInfer that marks functions as experimental, and lacks these, marks them too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in OURS:
            patch.delattr(fi(), name)
        before = contents(fi())
        made = flashinfer_msa.register("flashinfer")
        assert made is not None and len(made.added) == len(OURS) and made.route("cuda:0").implementation == "plugin"
        for name in MARKED:
            function = getattr(fi(), name)
            assert function.is_experimental and "flashinfer-msa" in function.experimental_feature
            with pytest.warns(UserWarning, match="flashinfer-msa"):
                call_wrongly(function)
            assert pickle.loads(pickle.dumps(function)) is function
        flashinfer_msa.unregister()
        assert contents(fi()) == before


@check("0.6.18")
def no_marks() -> None:
    """A FlashInfer that marks nothing as experimental does not warn; without its log, functions are our own."""
    with no_warnings():
        flashinfer_msa.register()
        for name in MARKED:
            call_wrongly(getattr(fi(), name))
        for name, ours in OURS.items():
            assert getattr(fi(), name) is ours


@check(alone=True)
def the_log() -> None:
    """With FLASHINFER_LOGLEVEL, every call of a function that is no sizing function is logged, a compiled one once."""
    from flashinfer import api_logging

    lines = io.StringIO()
    api_logging._logger.handlers = [logging.StreamHandler(lines)]
    name = "msa_icp_topk_select_prefill"

    def logged() -> int:
        text = lines.getvalue()
        lines.seek(0)
        lines.truncate()
        assert text.count("API Call") == text.count(f"API Call: {name}")
        return text.count("API Call")

    def select(scores: torch.Tensor) -> torch.Tensor:
        carrier = scores.new_empty(4, len(scores), 33, dtype=torch.int32)
        valid = scores.new_full((len(scores),), 8, dtype=torch.int32)
        function(scores, valid, carrier=carrier, backend="torch")
        return carrier

    warnings.simplefilter("ignore")
    scores = torch.randn(3, 4, 8)
    for prefer in ("auto", "plugin"):
        flashinfer_msa.register(prefer)
        function = getattr(fi(), name)
        logged()
        expected = select(scores)
        assert logged() == 1 and torch.equal(select(scores), expected) and logged() == 1
        fi().msa_icp_comm_layout(2, 2, 8)
        assert logged() == 0
        torch._dynamo.reset()
        compiled = torch.compile(select, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(scores), expected)
        assert logged() == 1
        assert torch.equal(compiled(scores), expected) and logged() == 0


# --- real packages: routes --------------------------------------------------------------------------------------------


class Call(NamedTuple):
    who: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Answer(NamedTuple):
    who: str


@contextlib.contextmanager
def recorders(capability: tuple[int, int] | None, *, loadable: bool = False) -> Iterator[tuple[list[Call], list[Any]]]:
    """Both sides' functions note their calls. Yields the calls, and the devices whose capability was asked for."""
    calls: list[Call] = []
    asked: list[torch.device] = []

    def recorder(who: str, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def note(*args: Any, **kwargs: Any) -> Answer:
            calls.append(Call(who, name, args, kwargs))
            return ANSWERS[who]

        return note

    def ask(device: torch.device) -> tuple[int, int] | None:
        asked.append(device)
        return capability

    def load(architecture: str) -> None:
        if not loadable:
            raise RuntimeError(f"none for {architecture}")

    theirs = {name: recorder("flashinfer", name, getattr(fi(), name)) for name in OURS}
    ours = {name: recorder("plugin", name, function) for name, function in OURS.items()}
    with (
        patched(fi(), **theirs),
        patched(msa_ops, **ours),
        patched(registration, _capability=ask, _require_loadable=load),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            yield calls, asked
        finally:
            flashinfer_msa.unregister()


ANSWERS = {who: Answer(who) for who in ("flashinfer", "plugin")}
PLAN_AT = 3


def arguments_of(name: str, first: Any, *, by_keyword: bool, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for a call: ``first`` and objects. What has a default is left out unless an option says otherwise."""
    parameters = inspect.signature(OURS[name]).parameters.values()
    needed = [p for p in parameters if p.default is inspect.Parameter.empty and p.name not in options]
    given = {p.name: object() for p in needed}
    keyword_only = {p.name for p in needed if p.kind is inspect.Parameter.KEYWORD_ONLY}
    if first is not None and (head := next(iter(given), None)) and head not in keyword_only:
        given[head] = first
    positional = [] if by_keyword else [key for key in given if key not in keyword_only]
    if options.keys() & {"plan"}:
        positional = positional[:PLAN_AT]
    args = tuple(given.pop(key) for key in positional)
    return args, {**given, **options}


def fake(device: str) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2, device=device)


def served_by(name: str, place: str, **options: Any) -> str:
    """Who serves a call of a registered function with a tensor there, and with ``device`` there unless it is given."""
    if name in WITH_DEVICE:
        options.setdefault("device", place)
    tensor = fake(place)
    who = set()
    for by_keyword in (False, True):
        args, kwargs = arguments_of(name, tensor, by_keyword=by_keyword, **options)
        who.add(getattr(fi(), name)(*args, **kwargs).who)
    (only,) = who
    return only


@check("0.7.4")
def routes() -> None:
    """Every function goes where preference, capability and kernels say, and sizing without a device to us."""
    assert len(WITH_TENSOR) == 8 and len(WITH_DEVICE) == 4 and len(NEITHER) == 4
    for capability, loadable, auto, flashinfer in (
        ((9, 0), True, "plugin", "plugin"),
        ((10, 0), True, "flashinfer", "flashinfer"),
        ((10, 0), False, "plugin", "flashinfer"),
        ((10, 3), True, "flashinfer", "flashinfer"),
        ((10, 7), True, "flashinfer", "flashinfer"),
        ((10, 7), False, "plugin", "flashinfer"),
        ((12, 0), True, "plugin", "plugin"),
        (None, True, "plugin", "plugin"),
    ):
        with recorders(capability, loadable=loadable):
            for prefer, expected in (("auto", auto), ("plugin", "plugin"), ("flashinfer", flashinfer)):
                made = flashinfer_msa.register(prefer)
                for name in (*WITH_TENSOR, *WITH_DEVICE):
                    case = (name, capability, loadable, prefer)
                    assert served_by(name, "cuda:1") == expected, case
                    assert served_by(name, "cpu") == served_by(name, "meta") == "plugin", case
                for name in NEITHER:
                    args, kwargs = arguments_of(name, None, by_keyword=False)
                    assert getattr(fi(), name)(*args, **kwargs).who == "plugin"
                assert made.route("cuda:1").implementation == made.route().implementation == expected
                assert made.route("cpu").implementation == "plugin" and made.route("cuda:1").reason


@check("0.7.4")
def calls_that_only_we_take() -> None:
    """``backend="torch"`` and arguments that FlashInfer lacks are ours; other backends go by the device."""
    with recorders((10, 0), loadable=True):
        for prefer in ("auto", "flashinfer"):
            flashinfer_msa.register(prefer)
            for name in MARKED:
                assert served_by(name, "cuda:0", backend="torch") == "plugin"
                assert served_by(name, "cuda:0", backend="cake") == "flashinfer"
                assert served_by(name, "cuda:0", backend="another") == "flashinfer"
            for name, options in ONLY_OURS.items():
                for option in options:
                    assert served_by(name, "cuda:0", **{option: None}) == "plugin"
            for name in WITH_TENSOR:
                for first in (None, 1, "cuda", object(), torch.device("cuda:0")):
                    parameters = list(inspect.signature(OURS[name]).parameters)
                    assert getattr(fi(), name)(first).who == "plugin"
                    assert getattr(fi(), name)(**{parameters[0]: first}).who == "plugin"
                assert getattr(fi(), name)().who == "plugin"


@check("0.7.4")
def plans_go_back_to_their_makers() -> None:
    """Whatever the device and the preference, a window's plan is never read by the other side."""
    from flashinfer.experimental.cake_msa_icp_indexer import MSAIcpScorePlan as TheirPlan

    theirs, ours = TheirPlan(*range(13)), MSAIcpScorePlan(*range(13))
    for capability in ((9, 0), (10, 0)):
        with recorders(capability, loadable=True):
            for prefer in registration.PREFERENCES:
                flashinfer_msa.register(prefer)
                for name in WITH_PLAN:
                    assert list(inspect.signature(OURS[name]).parameters).index("plan") == PLAN_AT
                    tensor = fake("cuda:0")
                    for plan, who in ((theirs, "flashinfer"), (ours, "plugin")):
                        args, kwargs = arguments_of(name, tensor, by_keyword=True, plan=plan)
                        assert getattr(fi(), name)(*args, **kwargs).who == who
                        args, kwargs = arguments_of(name, tensor, by_keyword=False, plan=plan)
                        plan_last = (*args, kwargs.pop("plan"))
                        assert getattr(fi(), name)(*plan_last, **kwargs).who == who


@check("0.7.4")
def devices() -> None:
    """However ``device`` is given: without an index, the current one of each call; a wrong one is ours to refuse."""
    with recorders((10, 0), loadable=True) as (calls, asked):
        flashinfer_msa.register()
        for name in WITH_DEVICE:
            for device in ("cuda:2", torch.device("cuda", 2), "cuda", torch.device("cuda"), None):
                expected = "flashinfer"
                assert served_by(name, "cpu", device=device) == expected, (name, device)
                assert calls[-1].kwargs["device"] is device
            for device in ("cpu", "nonsense", object(), -1):
                assert served_by(name, "cpu", device=device) == "plugin", (name, device)
        lens = torch.zeros(1, dtype=torch.int32)
        assert fi().msa_icp_index_score_sharded_plan(lens, lens, 4, qo_offset=lens).who == "flashinfer"
        del asked[:]
        for name in WITH_DEVICE:
            served_by(name, "cpu", device="cuda:2")
        assert not asked
        served_by(WITH_DEVICE[0], "cpu", device="cuda")
        assert asked == [torch.device("cuda")] * 2


@check("0.7.4")
def a_device_is_asked_once() -> None:
    """The first call on a device finds out, and functions imported before follow a change of the preference."""
    with recorders((10, 0), loadable=True) as (_, asked):
        flashinfer_msa.register()
        imported = fi().msa_icp_merge_candidates
        tensor = fake("cuda:0")
        assert [imported(tensor).who for _ in range(3)] == ["flashinfer"] * 3
        assert fi().msa_icp_topk_select_prefill(tensor).who == "flashinfer"
        assert asked == [torch.device("cuda:0")]
        flashinfer_msa.register("auto")
        assert imported(tensor).who == "flashinfer" and len(asked) == 1
        flashinfer_msa.register("plugin")
        assert imported(tensor).who == "plugin" and len(asked) == 1
        flashinfer_msa.register("flashinfer")
        assert imported(tensor).who == "flashinfer" and imported(fake("cuda:1")).who == "flashinfer"
        assert asked[1:] == [torch.device("cuda:0"), torch.device("cuda:1")]


@check("0.7.4")
def nothing_is_touched_on_the_way() -> None:
    """Arguments, result and exception are the very objects."""
    with recorders((10, 0), loadable=True) as (calls, _):
        flashinfer_msa.register()
        for name, device in itertools.product(WITH_TENSOR, ("cuda:0", "cpu")):
            args, kwargs = arguments_of(name, fake(device), by_keyword=False, enable_pdl=object())
            answer = getattr(fi(), name)(*args, **kwargs)
            call = calls.pop()
            assert call.name == name and answer is ANSWERS[call.who]
            assert len(call.args) == len(args) and all(a is b for a, b in zip(call.args, args, strict=True))
            assert call.kwargs.keys() == kwargs.keys() and all(call.kwargs[key] is kwargs[key] for key in kwargs)
    error = KeyError("theirs")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    name = "msa_icp_merge_candidates"
    fails = functools.wraps(getattr(fi(), name))(fail)
    with (
        patched(fi(), **{name: fails}),
        patched(registration, _capability=lambda device: (10, 0), _require_loadable=lambda architecture: None),
    ):
        flashinfer_msa.register()
        with pytest.raises(KeyError) as raised:
            getattr(fi(), name)(fake("cuda:0"))
        assert raised.value is error
        flashinfer_msa.unregister()


@check("0.7.4")
def traced_routes() -> None:
    """Compiled code goes where the device says, without a graph break."""
    name = "msa_icp_topk_select_prefill"
    seen = []

    def trace(device: str) -> None:
        function = getattr(fi(), name)

        def select(scores: torch.Tensor) -> torch.Tensor:
            function(scores, scores, carrier=scores)
            return scores + 1

        with FakeTensorMode():
            torch._dynamo.reset()
            torch.compile(select, backend="eager", fullgraph=True)(torch.empty(2, device=device))

    def note(who: str) -> Callable[..., Any]:
        @torch.compiler.assume_constant_result
        def add() -> None:
            seen.append(who)

        def function(scores: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            add()

        return functools.wraps(OURS[name])(function)

    theirs = note("flashinfer")
    theirs.__signature__ = inspect.signature(getattr(fi(), name))
    with (
        patched(fi(), **{name: theirs}),
        patched(msa_ops, **{name: note("plugin")}),
        patched(registration, _capability=lambda device: (10, device.index), _require_loadable=lambda name: None),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        flashinfer_msa.register()
        for device, who in (
            ("cuda:0", "flashinfer"),
            ("cuda:1", "plugin"),
            ("cuda:3", "flashinfer"),
            ("cpu", "plugin"),
        ):
            trace(device)
            assert seen.pop() == who and not seen, device
        flashinfer_msa.unregister()


@check("0.7.4")
def sizes_are_the_same() -> None:
    """What is not routed need not be: both sides size every buffer alike."""
    from flashinfer.experimental.cake_msa_icp_indexer import cake_jit

    lengths = (1, 127, 128, 129, 511, 512, 513, 100_000, 1 << 20, 1 << 21)
    for length, page_size in itertools.product(lengths, (128, 256)):
        for name in ("msa_icp_index_score_columns", "msa_icp_decode_score_columns"):
            assert ORIGINALS[name](length, page_size) == OURS[name](length, page_size), (name, length, page_size)
    for tokens in lengths:
        name = "msa_icp_decode_pool_bytes"
        assert ORIGINALS[name](max_decode_tokens=tokens) == OURS[name](max_decode_tokens=tokens)
    for world_size, capacity in itertools.product((2, 4), (1, 7, 256, 1000)):
        name = "msa_icp_comm_layout"
        theirs, ours = (of[name](world_size, 4 // world_size, capacity) for of in (ORIGINALS, OURS))
        assert {key: value if isinstance(value, int) else tuple(value) for key, value in theirs.items()} == ours
    with (
        patched(cake_jit, sm_count=lambda index: 132),
        patched(sizing, multiprocessor_count=lambda device: 132),
    ):
        for total_q, batch in itertools.product((1, 63, 64, 65, 129, 8192), (1, 3, 256)):
            shape = {"total_q": total_q, "batch": batch, "device": "cuda:0"}
            storage, pool = "msa_icp_index_score_plan_storage", "msa_icp_prefill_pool_bytes"
            assert ORIGINALS[storage](num_qo_heads=4, **shape) == OURS[storage](num_qo_heads=4, **shape)
            assert ORIGINALS[pool](**shape) == OURS[pool](**shape)


# --- real packages: what FlashInfer can load --------------------------------------------------------------------------


@check("0.7.4", alone=True)
def what_flashinfer_can_load() -> None:
    """Nothing of its wheel; all that a builder has compiled; and sources, with a compiler that knows the GPU."""
    import flashinfer.experimental as experimental
    from flashinfer.jit import cpp_ext

    folder = Path(tempfile.mkdtemp())
    package = folder / "cake_msa_icp_indexer"
    shutil.copytree(Path(experimental.__path__[0]) / package.name, package)
    experimental.__path__.insert(0, str(folder))
    from flashinfer.experimental.cake_msa_icp_indexer import cake_build

    assert Path(cake_build.__file__).parent == package
    toolkit = folder / "toolkit"
    (toolkit / "bin").mkdir(parents=True)
    os.environ["CUDA_HOME"] = str(toolkit)
    compiler = toolkit / "bin" / "nvcc"

    def install(version: str | None) -> None:
        cpp_ext.get_cuda_version.cache_clear()
        compiler.unlink(missing_ok=True)
        if version:
            compiler.write_text(f"#!/bin/sh\necho 'release {version}, V{version}'\n")
            compiler.chmod(0o755)

    made = flashinfer_msa.register()

    def route(prefer: str = "auto", capability: tuple[int, int] = (10, 0)) -> registration.Route:
        with patched(registration, _capability=lambda device: capability):
            flashinfer_msa.register(prefer)
            return flashinfer_msa.registered().route("cuda:0")

    def refused(reason: str, **case: Any) -> None:
        who, why = route(**case)
        assert who == "plugin" and reason in why, why

    assert made is not None
    entries = {name: entry for name, entry in cake_build.libraries_by_name().items() if entry["arch"] == "sm_100a"}
    install("13.0")
    refused("csrc")
    assert route("flashinfer") == ("flashinfer", "it has kernels for sm_100a, and is preferred")
    refused("no kernels for compute capability 9.0", prefer="flashinfer", capability=(9, 0))

    # Prebuilt libraries, which say by what they were built.
    (package / "aot").mkdir()
    for entry in entries.values():
        (package / entry["path"]).touch()
    refused("build_info.json")
    info = {"schema": "cake-build-info/1", "cuda": "13.0.88", "cudart_version": 13000, "arches": ["sm_100a"]}
    (package / "aot" / "build_info.json").write_text(json.dumps(info))
    install(None)
    assert route() == ("flashinfer", "it can load its kernels for sm_100a")
    install("13.0")
    refused("csrc", capability=(10, 3))
    one = next(iter(entries.values()))
    (package / one["path"]).unlink()
    refused("csrc")

    # The sources of that one, with a compiler.
    (package / "csrc").mkdir()
    for source in one["sources"]:
        (package / source).write_text("")
        one["sha256"][source] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert route()[0] == "flashinfer"
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    refused("FLASHINFER_DISABLE_JIT is set")
    del os.environ["FLASHINFER_DISABLE_JIT"]
    install("12.4")
    refused("needs CUDA 12.")
    install(None)
    with patched(torch.version, cuda="13.0"):
        refused("nvcc is not there to build it")
    install("13.0")
    (package / one["sources"][0]).write_text("changed")
    refused("does not match")
    (package / "build.json").unlink()
    cake_build.libraries_by_name.cache_clear()
    cake_build.manifest.cache_clear()
    refused("build.json is missing")
    with patched(registration, _capability=lambda device: (10, 0)):
        sys.modules["flashinfer.experimental.cake_msa_icp_indexer"] = None
        refused("does not tell what it has kernels for", prefer="flashinfer")
    shutil.rmtree(folder)


# --- real packages: vLLM's processes ----------------------------------------------------------------------------------


def in_a_fork(function: Callable[[], Any]) -> Any:
    """What a function returns in a fork of this process."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = function()
        except BaseException:
            answer = {"error": traceback.format_exc()}
        os.write(send, json.dumps(answer).encode())
        os._exit(0)
    os.close(send)
    with open(receive) as answers:
        answer = json.loads(answers.read())
    os.waitpid(child, 0)
    assert not isinstance(answer, dict) or "error" not in answer, answer["error"]
    return answer


@check(alone=True)
def the_plugin() -> None:
    """It asks no device, and registers after FlashInfer's import in a fork; ``unregister`` cancels it."""
    asked: list[Any] = []
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda *args: asked.append(args) or (9, 0)

    def server() -> list[Any]:
        registration.register_in_vllm()
        assert "flashinfer" not in sys.modules and not asked
        assert flashinfer_msa.registered() is None
        return in_a_fork(worker)

    def worker() -> list[Any]:
        assert importlib.util.find_spec("flashinfer") is not None  # as vLLM asks whether it is installed
        import flashinfer.msa_ops

        assert asked, "importing FlashInfer asks for the devices' capability, which initialises CUDA"
        made = flashinfer_msa.registered()
        has = hasattr(flashinfer.msa_ops, "prepare_msa_icp_indexer")
        if made is None:
            return [None, has]
        function = flashinfer.msa_ops.prepare_msa_icp_indexer
        assert inspect.signature(function) == inspect.signature(msa_ops.prepare_msa_icp_indexer)
        registration.register_in_vllm()
        assert flashinfer_msa.registered() == made
        flashinfer_msa.unregister()
        return [made.prefer, hasattr(flashinfer.msa_ops, "prepare_msa_icp_indexer")]

    def cancelled() -> list[Any]:
        registration.register_in_vllm()
        flashinfer_msa.unregister()
        return in_a_fork(worker)

    found = [in_a_fork(server), in_a_fork(cancelled)]
    has_icp = found[1][1]
    assert found == [["auto", has_icp], [None, has_icp]]


@pytest.mark.network
def test_the_plugin_is_cheap() -> None:
    """Loading and calling it imports neither torch nor FlashInfer, and registers nothing by itself."""
    run_python(
        "-c",
        "import sys; from flashinfer_msa.integrations.flashinfer import register_in_vllm, registered\n"
        "register_in_vllm()\n"
        "assert registered() is None; assert not {'torch', 'flashinfer', 'numpy'} & sys.modules.keys()",
        version="0.6.18",
    )


# --- the processes ----------------------------------------------------------------------------------------------------


@functools.cache
def run_checks(version: str, alone: str | None) -> dict[str, str | None] | BaseException:
    """What one check printed, or all that share a process; or why the process did not run to its end."""
    shared = [name for name, (_, versions, own) in CHECKS.items() if version in versions and not own]
    environment = {"FLASHINFER_LOGLEVEL": "1" if alone == "the_log" else "0"}
    if alone != "the_plugin":
        environment["FLASHINFER_CUDA_ARCH_LIST"] = "10.0a"
    try:
        printed = run_python(__file__, *([alone] if alone else shared), version=version, **environment)
    except (Exception, pytest.skip.Exception) as failure:
        return failure
    return json.loads(printed.splitlines()[-1])


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "name"), [(version, name) for name, (_, versions, _) in CHECKS.items() for version in versions]
)
def test_in_flashinfer(version: str, name: str) -> None:
    """A check in the real package."""
    results = run_checks(version, name if CHECKS[name][2] else None)
    if isinstance(results, BaseException):
        raise results
    assert results[name] is None, results[name]


def main(names: list[str]) -> None:
    """Run checks and print how they went."""
    global ORIGINALS
    if not any(CHECKS[name][2] for name in names):
        ORIGINALS = {name: getattr(fi(), name, None) for name in OURS}
    outcome: dict[str, str | None] = {}
    for name in names:
        try:
            CHECKS[name][0]()
            outcome[name] = None
        except BaseException:
            outcome[name] = traceback.format_exc()
        finally:
            flashinfer_msa.unregister()
    print("\n" + json.dumps(outcome))


ORIGINALS: dict[str, Any] = {}
"""What the real package has before anything is registered."""

if __name__ == "__main__":
    main(sys.argv[1:])
