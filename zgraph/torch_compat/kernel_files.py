"""Inductor's C++ kernels, compiled several to a file.

Inductor gives each kernel a file of its own. Most of a small file's time goes into the headers, whose templates are
instantiated in each file anew, also where they are precompiled; and of a program that is generated section by section,
the files of one section would be waited for before the next one is generated. Here the kernels of a whole program are
compiled at once, in about as many files as there are processors. Their code is the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zgraph.errors import LoweringError
from zgraph.torch_compat.vector_instructions import choose_instructions

_OWN = "from zgraph.torch_compat.kernels_later import AsyncCompile"
_INDUCTORS = "from torch._inductor.async_compile import AsyncCompile"


class Place(NamedTuple):
    """Where a compiled kernel is."""

    kernel: str  # its name in the generated code
    path: str  # its file, within Inductor's cache folder
    function: str  # its name in the file


class KernelSource:
    """A C++ kernel that is not compiled yet; a call of it compiles it alone."""

    def __init__(self, argtypes: Sequence[str], source: str) -> None:
        self.argtypes = argtypes
        self.source = source
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Run the kernel."""
        if self._function is None:
            self._function = _alone(self)()
        return self._function(*args)


class Waiting:
    """Code whose kernels are not compiled yet, and what is to be done when they are."""

    def __init__(self) -> None:
        self._scopes: list[dict[str, Any]] = []
        self._actions: list[Callable[[], None]] = []

    def add(self, scope: dict[str, Any]) -> None:
        """Add the names of code that is loaded: functions come in the place of its kernels."""
        self._scopes.append(scope)

    def then(self, action: Callable[[], None]) -> None:
        """Add what is to be done when all kernels are compiled."""
        self._actions.append(action)

    def compile(self) -> None:
        """Compile the kernels. Raises `LoweringError`."""
        sources = [value for scope in self._scopes for value in scope.values() if isinstance(value, KernelSource)]
        try:
            functions = compile_together(sources, _threads()) if sources else {}
        except Exception as error:
            raise LoweringError(
                "the C++ kernels of a program can't be compiled",
                why=f"{type(error).__name__}: {error}",
                hint="see that a C++ compiler runs here (g++, or what CXX names), and that there is room in"
                f' {inductor_folder()}; backend="eager" needs none',
            ) from error
        for scope in self._scopes:
            scope.update({n: functions[v] for n, v in scope.items() if isinstance(v, KernelSource)})
        for action in self._actions:
            action()


_waiting: contextvars.ContextVar[Waiting | None] = contextvars.ContextVar("kernels that wait", default=None)


@contextlib.contextmanager
def kernels_together() -> Iterator[Waiting]:
    """Compile the kernels of all code that is loaded inside together, at the end; one inside of another ends with it.

    An error inside compiles nothing. Raises `LoweringError` if they can't be compiled.
    """
    if (outer := _waiting.get()) is not None:
        yield outer
        return
    waiting = Waiting()
    token = _waiting.set(waiting)
    try:
        yield waiting
    finally:
        _waiting.reset(token)
    waiting.compile()


def compiled_later(source: str) -> str:
    """Return Inductor's code, changed so that it defines its C++ kernels without compiling them."""
    return source.replace(_INDUCTORS, _OWN)


def compile_kernels(scope: dict[str, Any], places: Sequence[Place]) -> None:
    """Put functions in the place of the kernels in the scope of loaded code: those of `places` that are there now, others
    when they are compiled (see `kernels_together`)."""
    for place in places:
        path = os.path.join(inductor_folder(), place.path)
        if isinstance(scope.get(place.kernel), KernelSource) and os.path.exists(path):
            scope[place.kernel] = getattr(_module(path), place.function)
    if any(isinstance(value, KernelSource) for value in scope.values()):
        with kernels_together() as waiting:
            waiting.add(scope)


def places_of(scope: Mapping[str, Any]) -> tuple[Place, ...] | None:
    """Return where the compiled C++ kernels of a scope are; None where one is outside of Inductor's cache folder."""
    folder = os.path.realpath(inductor_folder())
    places = []
    for name, value in scope.items():
        of = getattr(getattr(value, "__self__", None), "__file__", None)
        if isinstance(of, str) and of.endswith(".so"):
            path = os.path.relpath(os.path.realpath(of), folder)
            if path.startswith(os.pardir):
                return None
            places.append(Place(name, path, value.__name__))
    return tuple(places)


def compile_together(kernels: Sequence[KernelSource], files: int) -> Mapping[KernelSource, Callable[..., Any]]:
    """Compile kernels in at most `files` files, and some of unknown form in files of their own.

    Returns the function of each. One that this process has compiled before, for another program, is not compiled again.
    """
    choose_instructions()
    settings = _settings()
    keys = {kernel: hashlib.sha256(f"{settings}\n{kernel.source}".encode()).digest() for kernel in kernels}
    sources = {kernel.source: kernel for kernel in kernels if keys[kernel] not in _compiled}
    bodies = {source: body for source in sources if (body := _body(source)) is not None}
    parts: list[list[str]] = [[] for _ in range(min(files, len(bodies)))]
    sizes = [0] * len(parts)
    for source in sorted(bodies, key=len, reverse=True):
        least = sizes.index(min(sizes))
        parts[least].append(source)
        sizes[least] += len(source)
    modules = [(part, _started(_file([bodies[source] for source in part]))) for part in parts]
    others = {source: _alone(kernel) for source, kernel in sources.items() if source not in bodies}
    functions: dict[str, Callable[..., Any]] = {}
    for part, module in modules:
        loaded = module()
        functions.update({source: getattr(loaded, f"kernel{at}") for at, source in enumerate(part)})
    functions.update({source: function() for source, function in others.items()})
    _compiled.update({keys[sources[source]]: function for source, function in functions.items()})
    return {kernel: _compiled[keys[kernel]] for kernel in kernels}


_compiled: dict[bytes, Callable[..., Any]] = {}  # what this process has compiled


def _settings() -> str:
    """Return what compiled kernels depend on besides their source: Inductor's settings, and where it puts them."""
    from torch._inductor import config

    return f"{config.get_hash().hex()} {inductor_folder()}"


_FORM = re.compile(
    r'\s*(?P<include>#include [<"][^>"\n]*cpp_prefix\.h[>"])\s*extern "C"\s+(?P<body>void\s+kernel\(.*)', re.S
)
_DIRECTIVE = re.compile(r"^\s*#\s*(?!pragma\b)|\bextern\b", re.M)


def _body(source: str) -> tuple[str, str] | None:
    """Return (the line that includes Inductor's header, the function) of a kernel; None for one of another form."""
    match = _FORM.fullmatch(source)
    if match is None or _DIRECTIVE.search(match["body"]):
        return None
    return match["include"], match["body"]


def _file(bodies: Sequence[tuple[str, str]]) -> str:
    """Return a file of several kernels, which is a module of Python with the functions `kernel0`, `kernel1`, …."""
    includes = dict.fromkeys(include for include, _ in bodies)
    spaces = [f"namespace kernel{at} {{\n{body}\n}}\n" for at, (_, body) in enumerate(bodies)]
    methods = [
        f'    {{"kernel{at}", reinterpret_cast<PyCFunction>(run<&kernel{at}::kernel>), METH_FASTCALL, ""}},'
        for at in range(len(bodies))
    ]
    return "\n".join([*includes, *spaces, _BINDING, _METHODS, *methods, _END])


_BINDING = textwrap.dedent(
    """
    #define PY_SSIZE_T_CLEAN
    #include <Python.h>
    #include <cstdlib>
    #include <stdexcept>
    #include <type_traits>
    #include <utility>

    static void* (*data_of)(PyObject*);

    template <typename T> static T argument(PyObject* value) {
        if constexpr (std::is_pointer_v<T>) {
            return static_cast<T>(data_of(value));
        } else {
            T result;
            if constexpr (std::is_floating_point_v<T>) {
                result = static_cast<T>(PyFloat_AsDouble(value));
            } else if constexpr (std::is_unsigned_v<T>) {
                result = static_cast<T>(PyLong_AsUnsignedLongLong(value));
            } else {
                result = static_cast<T>(PyLong_AsLongLong(value));
            }
            if (PyErr_Occurred()) throw std::invalid_argument("an argument is no number of its kind");
            return result;
        }
    }

    template <typename... T, std::size_t... At>
    static void launch(void (*kernel)(T...), PyObject* const* args, std::index_sequence<At...>) {
        kernel(argument<T>(args[At])...);
    }

    template <typename... T> static constexpr std::size_t arity(void (*)(T...)) { return sizeof...(T); }

    template <auto kernel> static PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t count) {
        constexpr std::size_t expected = arity(kernel);
        try {
            if (count != static_cast<Py_ssize_t>(expected)) throw std::invalid_argument("wrong number of arguments");
            launch(kernel, args, std::make_index_sequence<expected>{});
        } catch (std::exception const& error) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
            return nullptr;
        } catch (...) {
            PyErr_SetString(PyExc_RuntimeError, "unhandled error");
            return nullptr;
        }
        Py_RETURN_NONE;
    }
    """
)
_METHODS = "static PyMethodDef methods[] = {"
_END = textwrap.dedent(
    """\
        {nullptr, nullptr, 0, nullptr}};

    static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods};

    PyMODINIT_FUNC PyInit_kernel(void) {
        const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
        if (address == nullptr) {
            PyErr_SetString(PyExc_RuntimeError, "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR is not set");
            return nullptr;
        }
        data_of = reinterpret_cast<decltype(data_of)>(std::strtoull(address, nullptr, 10));
        PyObject* module = PyModule_Create(&definition);
    #ifdef Py_GIL_DISABLED
        if (module != nullptr) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
    #endif
        return module;
    }
    """
)


def _started(text: str) -> Callable[[], Any]:
    """Begin to compile a file; return a function that waits for it and returns its module."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load_async(text, submit_fn=_submit())  # type: ignore[no-any-return]


def _alone(kernel: KernelSource) -> Callable[[], Callable[..., Any]]:
    """Begin to compile one kernel as Inductor does; return a function that waits for it and returns it."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load_pybinding_async(  # type: ignore[no-any-return]
        kernel.argtypes, kernel.source, submit_fn=_submit()
    )


def _submit() -> Callable[..., Any] | None:
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile.submit if _threads() > 1 else None


def _threads() -> int:
    """Return how many files are compiled at once."""
    from torch._inductor.async_compile import get_compile_threads

    return max(1, get_compile_threads())


def _module(path: str) -> Any:
    """Return the module of a compiled file."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache._load_library(path, os.path.basename(path).split(".")[0])


def inductor_folder() -> str:
    """Return Inductor's cache folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()
