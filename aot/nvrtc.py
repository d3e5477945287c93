# SPDX-License-Identifier: Apache-2.0
"""Compiles a source to a cubin with NVRTC: ``nvrtc.py LIBRARY CUBIN SOURCE OPTION...``. The log goes to stderr.

It uses only the standard library, because NVRTC's output depends on what its process has in memory. Run as
``env -i python -I -S``, it always gives the same bytes for the same source.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


class NvrtcError(RuntimeError):
    """The source does not compile (with the compiler's log), or the library cannot be used."""


def compile_source(source: bytes, library: Path, options: list[str]) -> tuple[bytes, str]:
    """Return the cubin and the compiler's log. ``options`` must name a real architecture, such as sm_90a."""
    try:
        # NVRTC loads this library by name, which fails if the folder is not on the loader's path. So load it first.
        for builtins in sorted(library.parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        nvrtc = ctypes.CDLL(str(library))
    except OSError as error:
        raise NvrtcError(f"{library} cannot be loaded: {error}") from error
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(result: int) -> None:
        if result:
            raise NvrtcError(f"{library}: {nvrtc.nvrtcGetErrorString(result).decode()}")

    def read(size_of: str, content_of: str) -> bytes:
        size = ctypes.c_size_t()
        check(getattr(nvrtc, size_of)(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        check(getattr(nvrtc, content_of)(program, content))
        return content.raw

    program = ctypes.c_void_p()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None))
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        result = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        log = read("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode()
        if result:
            raise NvrtcError(f"{nvrtc.nvrtcGetErrorString(result).decode()}\n{log}")
        return read("nvrtcGetCUBINSize", "nvrtcGetCUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def main() -> None:
    """Compile. The cubin is written only if that succeeds."""
    library, cubin, source = map(Path, sys.argv[1:4])
    text, folder = source.read_bytes(), os.open(".", os.O_RDONLY)
    os.chdir("/")  # NVRTC keeps the working folder's path in memory, so its output would depend on that too
    try:
        content, log = compile_source(text, library, sys.argv[4:])
    except NvrtcError as error:
        raise SystemExit(str(error)) from None
    os.fchdir(folder)
    print(log, file=sys.stderr)
    cubin.write_bytes(content)


if __name__ == "__main__":
    main()
