"""Compiles a C++ source against torch into a Python module, once for each version of torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from zgraph.ranks.host import cache_folder

HERE = Path(__file__).parent


def load(file: Path) -> ModuleType:
    """Return the module of a C++ source file, compiled if need be. Compiling takes g++ (or the compiler that the
    variable CXX names) and half a minute; processes wait for each other.

    Raises `subprocess.CalledProcessError` where the compiler fails, `FileNotFoundError` where there is none.
    """
    root = Path(torch.__file__).parent
    name = f"zgraph_native_{file.stem}"
    flags = ["-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-w"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", f"-DTORCH_EXTENSION_NAME={name}"]
    flags += [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", f"-I{sysconfig.get_path('include')}"]
    libraries = [f"-L{root}/lib", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10", f"-Wl,-rpath,{root}/lib"]
    key = hashlib.sha256(" ".join([torch.__version__, *flags, file.read_text()]).encode()).hexdigest()[:16]
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}-{key}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(".part")
            compiler = os.environ.get("CXX", "g++")
            subprocess.run([compiler, *flags, str(file), "-o", str(part), *libraries], check=True)
            part.replace(library)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
