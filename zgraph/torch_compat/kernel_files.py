"""Inductor's C++ kernels, compiled several to a file.

Inductor gives each kernel a file of its own. Most of a small file's time goes into the headers, whose templates are
instantiated in each file anew, also where they are precompiled; and of a program that is generated section by section,
the files of one section would be waited for before the next one is generated. Here the kernels of a whole program are
compiled at once, in about as many files as there are processors. Their code is the same.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._inductor import async_compile

_OWN = "from zgraph.torch_compat.kernel_files import AsyncCompile"
_IMPORT = "from torch._inductor.async_compile import AsyncCompile"
_MADE = re.compile(r"(?<=^async_compile = AsyncCompile\()(?=\)$)", re.M)
_KERNEL = re.compile(r"^\w+ = async_compile\.cpp_pybinding\(", re.M)


def in_few_files(source: str) -> str:
    """Return Inductor's code, changed so that its C++ kernels are compiled several to a file when it is loaded.

    The number of files is written into the code: it says under which names the compiled files are found.
    """
    count = len(_KERNEL.findall(source))
    if count < 2 or _IMPORT not in source or not _MADE.search(source):
        return source
    files = min(count, max(1, async_compile.get_compile_threads()))
    return _MADE.sub(f"files={files}", source.replace(_IMPORT, _OWN))


class AsyncCompile(async_compile.AsyncCompile):
    """What generated code calls to compile its kernels; here the C++ kernels wait for each other."""

    def __init__(self, files: int) -> None:
        super().__init__()
        self.files = files
        self.kernels: list[KernelSource] = []

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        """Return what stands for a C++ kernel until `wait`."""
        self.kernels.append(KernelSource(argtypes, source_code))
        return self.kernels[-1]

    def wait(self, scope: dict[str, Any]) -> None:
        """Compile the kernels, and put them in the scope."""
        functions = compile_together(self.kernels, self.files)
        for name, value in list(scope.items()):
            if isinstance(value, KernelSource):
                scope[name] = functions[value]
        super().wait(scope)


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


def compile_together(kernels: Sequence[KernelSource], files: int) -> Mapping[KernelSource, Callable[..., Any]]:
    """Compile kernels in at most `files` files, and some of unknown form in files of their own.

    Returns the function of each.
    """
    bodies = {kernel: body for kernel in kernels if (body := _body(kernel.source)) is not None}
    parts: list[list[KernelSource]] = [[] for _ in range(files)]
    sizes = [0] * files
    for kernel in sorted(bodies, key=lambda k: -len(k.source)):
        least = sizes.index(min(sizes))
        parts[least].append(kernel)
        sizes[least] += len(kernel.source)
    modules = [(part, _started(_file([bodies[k] for k in part]))) for part in parts if part]
    others = {kernel: _alone(kernel) for kernel in kernels if kernel not in bodies}
    functions: dict[KernelSource, Callable[..., Any]] = {}
    for part, module in modules:
        loaded = module()
        functions.update({kernel: getattr(loaded, f"kernel{at}") for at, kernel in enumerate(part)})
    return functions | {kernel: function() for kernel, function in others.items()}


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
    return async_compile.AsyncCompile.submit if async_compile.get_compile_threads() > 1 else None
