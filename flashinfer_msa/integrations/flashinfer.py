# SPDX-License-Identifier: Apache-2.0
"""Registers the functions of ``msa_ops`` in ``flashinfer.msa_ops``. The device of a call decides who serves it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import logging
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..version import __version__

if TYPE_CHECKING:
    import torch

PREFERENCES = ("auto", "plugin", "flashinfer")
KNOWN_VERSIONS = ">=0.6.18,<0.8"
"""Versions of FlashInfer that registration is known to fit. Others get a warning, and then what they have decides."""
ENVIRONMENT_VARIABLE = "FLASHINFER_MSA_REGISTER"
_OFF = ("0", "off")
_MODULE = "flashinfer.msa_ops"
_FEATURE = "MiniMax-M3 ICP indexer functions of flashinfer-msa"
_ELSEWHERE = "flashinfer_msa.msa_ops has the same functions, and works as ever"
_INSTALL = "pip install 'flashinfer-msa[flashinfer]'"
_log = logging.getLogger("flashinfer_msa")

Function = Callable[..., Any]


class Route(NamedTuple):
    """Who serves calls on a device, ``"plugin"`` (this package) or ``"flashinfer"``, and why."""

    implementation: str
    reason: str


@dataclass(frozen=True)
class Registration:
    """What :func:`register` has put under ``flashinfer.msa_ops``.

    Attributes
    ----------
    flashinfer_version : str
        Version of FlashInfer.
    prefer : str
        The preference in force.
    added, replaced : tuple of str
        Names that FlashInfer lacks, and names that it has.
    """

    flashinfer_version: str
    prefer: str
    added: tuple[str, ...]
    replaced: tuple[str, ...]

    def route(self, device: torch.device | str | None = None) -> Route:
        """Return who serves calls on ``device`` (default: the current CUDA device). May initialise CUDA."""
        from ..sizing import require_device

        resolved = require_device("cuda" if device is None else device)
        if not self.replaced:
            return Route("plugin", f"FlashInfer {self.flashinfer_version} has no ICP functions of its own")
        return _route(self.prefer, resolved)


def register(prefer: str = "auto") -> Registration | None:
    """Put the functions of ``flashinfer_msa.msa_ops`` under ``flashinfer.msa_ops``.

    A name that the installed FlashInfer lacks (0.6.18) is added, also to ``__all__``. A name that it has (0.7.4) is
    replaced by a function with our signature and docstring, which passes each call on unchanged:

    * A call that only this package accepts is ours: ``backend="torch"``, or an argument that FlashInfer's function
      lacks (``accumulation``; ``spin_limit`` and ``wait_seconds`` of ``prepare_msa_icp_indexer``).
    * A call with a prefill window's plan goes to the package that made the plan.
    * For other calls, ``prefer`` and the device decide: the first tensor's, or the argument ``device``. Calls without a
      CUDA device are ours. So are sizing functions that take no ``device``, whose values are the same.

    The methods of an indexer belong to the package that made it, and are not routed. Only functions are registered,
    because ``flashinfer.msa_ops`` has no such classes. They are marked as FlashInfer marks its own: the first use of an
    experimental function warns, and ``FLASHINFER_LOGLEVEL`` logs calls. Compiled code warns and logs when it is traced,
    and its calls keep the routes that they had then.

    Code that imported functions from ``flashinfer.msa_ops`` earlier keeps those functions. Registering again changes
    only the preference.

    Parameters
    ----------
    prefer : str
        ``"auto"``: FlashInfer's function if it has kernels for the GPU's compute capability and can load them here,
        prebuilt or compiled from sources (its wheel has neither); otherwise ours. ``"plugin"``: always ours.
        ``"flashinfer"``: FlashInfer's function if it has kernels for the compute capability, even if it cannot load
        them; otherwise ours.

    Returns
    -------
    Registration or None
        None if nothing was registered. A warning then says why: FlashInfer has no ``msa_ops``, or ICP functions with
        other signatures.

    Raises
    ------
    ValueError
        If ``prefer`` has another value.
    ImportError
        If FlashInfer is not installed.
    """
    registration, complaints = _register(prefer)
    for complaint in complaints:
        warnings.warn(complaint, RuntimeWarning, stacklevel=2)
    return registration


def unregister() -> None:
    """Restore ``flashinfer.msa_ops``: put back what was replaced, and remove what was added.

    If other code has replaced a name since, the name stays as it is, with a warning. Functions that were imported while
    registered keep working. Without a registration, nothing happens.
    """
    global _installed
    with _lock:
        _after_import.action = None
        installed, _installed = _installed, None
        left = installed.withdraw() if installed else []
    if left:
        warnings.warn(
            f"{', '.join(left)} of {_MODULE} are no longer what register() put there, and are left as they are",
            RuntimeWarning,
            stacklevel=2,
        )


def registered() -> Registration | None:
    """Return the current registration, or None."""
    installed = _installed
    return installed.registration if installed else None


def register_in_vllm() -> None:
    """Register as a plugin of vLLM, which calls this in each process (entry point group ``vllm.general_plugins``).

    The environment variable ``FLASHINFER_MSA_REGISTER`` is ``auto`` (the default), ``plugin`` or ``flashinfer``, as in
    :func:`register`. ``0`` or ``off`` registers nothing. A registration that the process made itself stays, unless the
    variable is set.

    If FlashInfer is not imported yet, registration waits for its import, because importing it initialises CUDA, and
    vLLM may fork the process later. Errors are warnings of the logger ``flashinfer_msa``, never exceptions, which would
    end the server.
    """
    try:
        value = os.environ.get(ENVIRONMENT_VARIABLE) or None
        prefer = (value or "auto").strip().lower()
        if prefer in _OFF or (value is None and registered()):
            return
        if prefer not in PREFERENCES:
            allowed = ", ".join((*PREFERENCES, *_OFF))
            _log.warning("%s must be one of %s, was %r: nothing is registered", ENVIRONMENT_VARIABLE, allowed, value)
        elif "flashinfer" in sys.modules:
            _register_and_log(prefer)
        elif importlib.util.find_spec("flashinfer") is None:
            _log.warning("FlashInfer is not installed, so nothing is registered in it: %s; %s", _INSTALL, _ELSEWHERE)
        else:
            _after_import.action = functools.partial(_register_and_log, prefer)
            if _after_import not in sys.meta_path:
                sys.meta_path.insert(0, _after_import)
    except Exception:
        _log.warning("nothing is registered in FlashInfer; %s", _ELSEWHERE, exc_info=True)


def _register_and_log(prefer: str) -> None:
    """Register, and log warnings and the result."""
    try:
        registration, complaints = _register(prefer)
    except Exception:
        _log.warning("nothing is registered in FlashInfer; %s", _ELSEWHERE, exc_info=True)
        return
    for complaint in complaints:
        _log.warning("%s", complaint)
    if registration:
        _log.info("registered in %s: %s", _MODULE, registration)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs ``action`` once, after FlashInfer's import. It finds no modules by itself.

    It stays in ``sys.meta_path``: removing it could hide another finder from a thread that is importing.
    """

    action: Callable[[], None] | None = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the other finders' spec of FlashInfer, with a loader that runs ``action`` at its end."""
        if fullname != "flashinfer" or self.action is None:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path) if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            # Patch the loader's method, and keep the loader: tracebacks and resources need it.
            load = functools.partial(self._load, spec.loader.exec_module)
            spec.loader.exec_module = load  # type: ignore[method-assign]  # patches one instance
        return spec

    def _load(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        exec_module(module)
        action = self.action
        if action is not None and module.__name__ == "flashinfer":
            self.action = None
            action()


# --- what is put there ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Installed:
    """What was put into a module, and what was there before."""

    module: ModuleType
    registration: Registration
    functions: dict[str, Function]
    before: dict[str, Any]
    listed: tuple[str, ...]
    """Names that were added to the module's ``__all__``."""

    def withdraw(self) -> list[str]:
        """Undo it. Return the names that stay, because other code has replaced them."""
        left = []
        for name, function in self.functions.items():
            found = vars(self.module).get(name)
            if found is not function:
                if found is not None or name in self.before:
                    left.append(name)
            elif name in self.before:
                setattr(self.module, name, self.before[name])
            else:
                delattr(self.module, name)
        exported = getattr(self.module, "__all__", None)
        if isinstance(exported, list):
            exported[:] = [name for name in exported if name not in self.listed]
        return left


def _register(prefer: str) -> tuple[Registration | None, list[str]]:
    """Register. Return the registration and warnings."""
    global _installed, _routes
    if not isinstance(prefer, str) or prefer not in PREFERENCES:
        raise ValueError(f"prefer must be one of {PREFERENCES}, was {prefer!r}")
    # Import before taking the lock: another thread may hold import locks while it imports FlashInfer and gets here.
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        if error.name != "flashinfer":
            raise
        raise ImportError(
            f"FlashInfer is not installed, so nothing can be registered in it: {_INSTALL}; {_ELSEWHERE}"
        ) from error
    version = str(getattr(flashinfer, "__version__", "of an unknown version"))
    complaints = []
    if not _is_known(version):
        complaints.append(
            f"flashinfer-msa {__version__} is known to fit FlashInfer {KNOWN_VERSIONS}, this is {version}: check that "
            f"what it registers is what you expect"
        )
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if error.name != _MODULE:
            raise
        return None, [*complaints, f"FlashInfer {version} has no msa_ops, so nothing is registered; {_ELSEWHERE}"]
    from .. import msa_ops

    ours = {name: getattr(msa_ops, name) for name in msa_ops.__all__ if inspect.isfunction(getattr(msa_ops, name))}
    with _lock:
        if _installed is not None and _installed.module is module:
            if _installed.registration.prefer != prefer:
                _installed = replace(_installed, registration=replace(_installed.registration, prefer=prefer))
                _routes = _Routes(prefer)
            if changed := [name for name, ours in _installed.functions.items() if vars(module).get(name) is not ours]:
                complaints.append(
                    f"{', '.join(changed)} of {_MODULE} are no longer what register() put there, and are left as they "
                    "are: call unregister(), then register(), to replace them"
                )
                return _installed.registration, complaints
            return _installed.registration, []
        theirs = {name: getattr(module, name) for name in ours if hasattr(module, name)}
        misfit = _misfit(ours, theirs)
        if misfit:
            return None, [
                *complaints,
                f"{_MODULE} of FlashInfer {version} {misfit}: nothing is registered; {_ELSEWHERE}",
            ]
        functions = {name: _front(function, theirs.get(name)) for name, function in ours.items()}
        registration = Registration(version, prefer, tuple(sorted(ours.keys() - theirs)), tuple(sorted(theirs)))
        exported: Any = getattr(module, "__all__", None)
        listed = [name for name in functions if isinstance(exported, list) and name not in exported]
        before = {name: vars(module)[name] for name in functions if name in vars(module)}
        _installed = _Installed(module, registration, functions, before, tuple(listed))
        _routes = _Routes(prefer)
        vars(module).update(functions)
        if listed:
            exported.extend(listed)
        return registration, complaints


def _is_known(version: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(KNOWN_VERSIONS).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _misfit(ours: dict[str, Function], theirs: dict[str, Any]) -> str | None:
    """Return why FlashInfer's functions cannot be replaced, or None if they can."""
    missing = ours.keys() - theirs.keys()
    if theirs and missing:
        return f"has some ICP functions and lacks {', '.join(sorted(missing))}"
    for name, function in theirs.items():
        if not _takes_calls_of(ours[name], function):
            return f"has another {name} than is known"
    return None


def _takes_calls_of(ours: Function, theirs: Any) -> bool:
    """Return whether each call of their function means the same to ours."""
    own = inspect.signature(ours).parameters
    try:
        known = inspect.signature(theirs).parameters
    except (TypeError, ValueError):
        return False
    keyword = inspect.Parameter.KEYWORD_ONLY
    positional = [[name for name, at in these.items() if at.kind is not keyword] for these in (own, known)]
    return (
        positional[0] == positional[1]
        and all(
            name in own and (own[name].kind, own[name].default) == (parameter.kind, parameter.default)
            for name, parameter in known.items()
        )
        and all(own[name].default is not inspect.Parameter.empty for name in own if name not in known)
    )


# --- one function -----------------------------------------------------------------------------------------------------


def _front(ours: Function, theirs: Function | None) -> Function:
    """Return the function to register for ``ours``."""
    import torch

    goes_to_flashinfer = _chooser(ours, theirs) if theirs is not None else None
    bare = functools.update_wrapper(functools.partial(ours), ours)  # marks are attributes, and ours gets none
    marked = _marking(ours, theirs)(bare)
    if marked is bare:
        marked = ours
    if marked is ours and goes_to_flashinfer is None:
        return ours
    is_compiling = torch.compiler.is_compiling

    @_assume_constant_result
    def mark_traced() -> None:
        with contextlib.suppress(TypeError):  # a call without arguments is warned of and logged, then refused
            marked()

    @functools.wraps(marked)
    def call(*args: Any, **kwargs: Any) -> Any:
        if goes_to_flashinfer is not None and goes_to_flashinfer(args, kwargs):
            return theirs(*args, **kwargs)  # type: ignore[misc]  # goes_to_flashinfer is None where theirs is
        if not is_compiling():
            return marked(*args, **kwargs)
        # Marks cannot be traced, so they are applied during tracing.
        mark_traced()
        return ours(*args, **kwargs)

    call.__module__ = _MODULE  # where it is found, so that it can be pickled
    return call


def _assume_constant_result(function: Function) -> Function:
    """Do what ``torch.compiler.assume_constant_result`` does, which imports the compiler first and takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read by the compiler
    return function


def _marking(ours: Function, theirs: Function | None) -> Callable[[Any], Function]:
    """Return FlashInfer's decorator for such a function. Functions that only size buffers have none."""

    def nothing(function: Any) -> Function:
        return function

    if "backend" not in inspect.signature(ours).parameters:
        return nothing
    try:
        api = importlib.import_module("flashinfer.api_logging")
    except ImportError:
        return nothing
    experimental = getattr(api, "flashinfer_experimental_api", None)
    if experimental is not None and (theirs is None or getattr(theirs, "is_experimental", False)):
        return experimental(feature=getattr(theirs, "experimental_feature", _FEATURE))
    return getattr(api, "flashinfer_api", nothing)


def _chooser(ours: Function, theirs: Function) -> Callable[[tuple[Any, ...], dict[str, Any]], bool] | None:
    """Return a function that decides by a call's arguments whether it goes to FlashInfer. None if none has a device."""
    import torch

    from ..prefill.window import MSAIcpScorePlan
    from ..sizing import require_device

    parameters = list(inspect.signature(ours).parameters)
    only_ours = frozenset(parameters).difference(inspect.signature(theirs).parameters)
    first = parameters[0]
    plan_at = parameters.index("plan") if "plan" in parameters else None
    is_compiling = torch.compiler.is_compiling

    def device_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
        device = kwargs.get("device")
        try:
            return require_device("cuda" if device is None else device)
        except ValueError:
            return None

    def tensor_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
        tensor = args[0] if args else kwargs.get(first)
        return tensor.device if isinstance(tensor, torch.Tensor) else None

    if "device" in parameters:
        device_of = device_argument
    elif "backend" in parameters:
        device_of = tensor_device
    else:
        return None

    @_assume_constant_result
    def route_when_traced(device: torch.device | None) -> bool:
        return _routes[device]

    def goes_to_flashinfer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if kwargs.get("backend") == "torch" or (only_ours and not only_ours.isdisjoint(kwargs)):
            return False
        if plan_at is not None:
            plan = args[plan_at] if len(args) > plan_at else kwargs.get("plan")
            if isinstance(plan, MSAIcpScorePlan):
                return False
            if type(plan).__module__.startswith("flashinfer."):
                return True
        device = device_of(args, kwargs)
        return route_when_traced(device) if is_compiling() else _routes[device]

    return goes_to_flashinfer


# --- one device -------------------------------------------------------------------------------------------------------


class _Routes(dict["torch.device | None", bool]):
    """Whether calls go to FlashInfer, by device. Determined at the first call on each device."""

    def __init__(self, prefer: str) -> None:
        super().__init__({None: False})
        self.prefer = prefer

    def __missing__(self, device: torch.device) -> bool:
        route = _route(self.prefer, device)
        chosen = route.implementation == "flashinfer"
        if device.type != "cuda" or device.index is not None:  # otherwise it is the current device, which can change
            self[device] = chosen
            _log.info("calls of %s on %s go to %s: %s", _MODULE, device, *route)
        return chosen


def _route(prefer: str, device: torch.device) -> Route:
    if prefer == "plugin":
        return Route("plugin", "it is preferred for every device")
    if device.type != "cuda":
        return Route("plugin", "FlashInfer has kernels only for CUDA devices")
    capability = _capability(device)
    if capability is None:
        return Route("plugin", f"torch finds no device {device}")
    try:
        from flashinfer.experimental.cake_msa_icp_indexer import cake_jit

        architecture = cake_jit.arch_for_capability(capability)
    except Exception as error:
        return Route("plugin", f"FlashInfer does not tell what it has kernels for ({error})")
    if architecture is None:
        return Route("plugin", "FlashInfer has no kernels for compute capability {}.{}".format(*capability))
    if prefer == "flashinfer":
        return Route("flashinfer", f"it has kernels for {architecture}, and is preferred")
    try:
        _require_loadable(architecture)
    except Exception as error:
        return Route("plugin", f"FlashInfer cannot load its kernels for {architecture} here ({error})")
    return Route("flashinfer", f"it can load its kernels for {architecture}")


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device (without an index: the current one), or None if there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.get_device_capability(index) if index < torch.cuda.device_count() else None


def _require_loadable(architecture: str) -> None:
    """Raise FlashInfer's error if a kernel library is not prebuilt and cannot be built here."""
    from flashinfer.experimental.cake_msa_icp_indexer import cake_build
    from flashinfer.jit.cpp_ext import get_cuda_path

    libraries = [name for name, entry in cake_build.libraries_by_name().items() if entry["arch"] == architecture]
    cake_build.record_cuda_version(architecture)  # raises if prebuilt libraries do not name their CUDA version
    for name in libraries:
        # jit_spec raises if sources are missing or changed, or if the toolkit is too old.
        if not cake_build.prebuilt_path(name).is_file() and not cake_build.jit_spec(name).is_aot:
            if os.environ.get("FLASHINFER_DISABLE_JIT"):
                raise RuntimeError(f"{name} is not prebuilt, and FLASHINFER_DISABLE_JIT is set")
            compiler = os.environ.get("FLASHINFER_NVCC", f"{get_cuda_path()}/bin/nvcc")
            if shutil.which(compiler) is None:
                raise RuntimeError(f"{name} is not prebuilt, and {compiler} is not there to build it")


_lock = threading.Lock()
_installed: _Installed | None = None
_routes = _Routes("auto")
_after_import = _AfterImport()
