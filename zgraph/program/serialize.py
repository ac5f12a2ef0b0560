"""A program as JSON and back: for reproducers, for other tools, for looking at it on another machine.

What passes read of a program is kept: nodes in order with operators, arguments, fake values and records, the
constants that it holds, ports, parameter layouts, mesh, level and facts. Python objects that only tracing
leaves behind (stacks of modules, stack traces) are not. Nothing is pickled and nothing can be named but
registered operators, so a file from anywhere can be loaded.

A value that JSON has no form for is an object with one key, its tag: `{"node": "mm_3"}`,
`{"dtype": "bfloat16"}`, `{"tuple": […]}`, `{"float": "-inf"}`. A JSON array is a list.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zgraph._version import __version__
from zgraph.errors import UnsupportedError, ZgraphError
from zgraph.program.node import NodeInfo, Phase, Role, has_info, info, set_info
from zgraph.program.program import Division, InputRole, Level, OutputRole, ParamSpec, Port, Program
from zgraph.program.sizes import NO_SIZES, ProgramSize, SizeGuard, Sizes, is_symbolic, new_mode, text
from zgraph.program.transfers import mark_by_graph
from zgraph.torch_compat import fx_graphs, symbols

FORMAT = 1
MAX_CONSTANT_BYTES = 1 << 20

# The functions besides registered operators that a graph may call.
_FUNCTIONS: dict[str, Callable[..., Any]] = (
    {
        f"operator.{f.__name__}": f
        for f in (
            operator.getitem,
            operator.add,
            operator.sub,
            operator.mul,
            operator.floordiv,
            operator.truediv,
            operator.mod,
            operator.pow,
            operator.neg,
            operator.abs,
            operator.eq,
            operator.ne,
            operator.lt,
            operator.le,
            operator.gt,
            operator.ge,
            operator.and_,
            operator.or_,
        )
    }
    | {f"{f.__module__}.{f.__name__}": f for f in (math.trunc, math.floor, math.ceil, round)}
    | {
        f"torch.{f.__name__}": f
        for f in (
            torch.sym_float,
            torch.sym_int,
            torch.sym_ite,
            torch.sym_max,
            torch.sym_min,
            torch.sym_not,
            torch.sym_sum,
        )
    }
)
_FUNCTION_NAMES = {function: name for name, function in _FUNCTIONS.items()}

# Plain values that the tracer leaves on a node, and that torch's partitioner and Inductor read.
_META = ("partitioner_tag", "seq_nr", "autograd_backward", "is_gradient_acc", "original_aten")


def to_json(program: Program, *, constants: bool = True) -> dict[str, Any]:
    """Return the program as a JSON value (dicts, lists, strings, finite numbers).

    Without `constants` those of more than `MAX_CONSTANT_BYTES` are written as types: such a program can be looked at,
    but not run. Raises `UnsupportedError` for what has no JSON form: an argument that is no plain value, a call of
    anything but an operator, a constant of more than `MAX_CONSTANT_BYTES`.
    """
    return {
        **frame_to_json(program),
        "constants": _encode_constants(program, constants),
        "nodes": [_encode_node(node) for node in program.graph.nodes],
        **({"sizes": _encode_sizes(program.sizes)} if program.sizes else {}),
    }


def frame_to_json(program: Program) -> dict[str, Any]:
    """Return what `to_json` writes of a program besides its graph and its sizes."""
    return {
        "format": FORMAT,
        "zgraph": __version__,
        "torch": str(torch.__version__),
        "name": program.name,
        "level": Level(program.level).name.lower(),
        "facts": sorted(program.facts),
        "aliases": [list(names) for names in dict.fromkeys(program.aliases.values())],
        "mesh": [[name, size] for name, size in program.mesh.items()],
        "params": [_encode_record(spec) for spec in program.params.values()],
        "inputs": [_encode_record(port) for port in program.inputs],
        "outputs": [_encode_record(port) for port in program.outputs],
    }


def _encode_sizes(sizes: Sizes) -> dict[str, Any]:
    return {f.name: [dataclasses.asdict(item) for item in getattr(sizes, f.name)] for f in dataclasses.fields(sizes)}


def _decode_sizes(data: dict[str, Any]) -> Sizes:
    every = {name: tuple(_size(row) for row in data[name]) for name in ("symbols", "tied")}
    for size in (*every["symbols"], *every["tied"]):
        if not size.name.isidentifier():
            raise ValueError(f"{size.name!r} is no name")
    sizes = Sizes(**every, guards=tuple(SizeGuard(**row) for row in data["guards"]))
    for guard in sizes.guards:
        symbols.refuse_code(guard.condition, sizes.names)
    return sizes


def _size(row: dict[str, Any]) -> ProgramSize:
    elements = tuple(symbols.Element(**element) for element in row.get("elements", ()))
    return ProgramSize(**{**row, "elements": elements, "factors": tuple(row.get("factors", ()))})


def from_json(data: dict[str, Any]) -> Program:
    """Return the program that `to_json` wrote, with a fake mode of its own.

    Raises `ZgraphError` for another format version, an operator that is not registered here, a node that uses one not
    defined before it, and for anything else that `to_json` does not write.
    """
    if not isinstance(data, dict) or "format" not in data:
        raise ZgraphError("this is no program in JSON form", why="it states no format version")
    if data["format"] != FORMAT:
        raise ZgraphError(
            f"this program is of format {data['format']!r}, and this zgraph reads format {FORMAT}",
            why=f"zgraph {data.get('zgraph', 'of an unknown version')} wrote it",
            hint="write it again with this version",
        )
    with _said_in_words():
        return _Loader(data).program()


@contextlib.contextmanager
def _said_in_words() -> Iterator[None]:
    """Turn errors of reading into a `ZgraphError`."""
    try:
        yield
    except ZgraphError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError) as error:
        raise ZgraphError(
            "this program in JSON form is damaged",
            why=f"{type(error).__name__}: {error}",
            hint="write it again",
        ) from error


def frame_from_json(data: dict[str, Any]) -> dict[str, Any]:
    """Return all fields of the program that `to_json` wrote, except those of its graph. Raises what `from_json` does."""
    with _said_in_words():
        return _Loader(data).frame()


def nodes_to_json(nodes: Iterable[fx.Node]) -> list[dict[str, Any]]:
    """Return calls as JSON values, without their results' types. Raises `UnsupportedError` for what has no JSON form."""
    rows = []
    for node in nodes:
        row: dict[str, Any] = {"name": node.name, "op": node.op, "target": _target_name(node)}
        rows.append(
            {**row, "args": _encode(list(node.args)), "kwargs": {k: _encode(v) for k, v in node.kwargs.items()}}
        )
    return rows


def nodes_from_json(graph: fx.Graph, rows: Sequence[dict[str, Any]], given: dict[str, fx.Node]) -> dict[str, fx.Node]:
    """Append the calls that `nodes_to_json` wrote to `graph`; return all nodes by name.

    `given` are the nodes that the calls use besides each other.
    """
    loader = _Loader({})
    loader.nodes.update(given)
    for row in rows:
        loader.node(graph, row)
    return loader.nodes


def type_to_json(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor's type as a JSON value: dtype, sizes, strides, device."""
    return _encode_type(tensor)


# -- writing ----------------------------------------------------------------------------------
def _encode_node(node: fx.Node) -> dict[str, Any]:
    try:
        row: dict[str, Any] = {"name": node.name, "op": node.op, "target": _target_name(node)}
        if node.args:
            row["args"] = [_encode(a) for a in node.args]
        if node.kwargs:
            row["kwargs"] = {k: _encode(v) for k, v in node.kwargs.items()}
        if "val" in node.meta:
            row["val"] = _encode(node.meta["val"])
        if has_info(node):
            row["info"] = _encode_record(info(node))
        meta = {key: _encode(node.meta[key]) for key in _META if _plain(node.meta.get(key))}
        return {**row, "meta": meta} if meta else row
    except UnsupportedError as error:
        raise UnsupportedError(error.what, where=f"node {node.name!r}", why=error.why, hint=error.hint) from None


def _plain(item: Any) -> bool:
    return isinstance(item, (bool, int, str, torch._ops.OpOverload))


def _target_name(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr", "output"):
        return str(node.target)
    if node.op == "call_function":
        if isinstance(node.target, torch._ops.OpOverload):
            return str(node.target)
        if node.target in _FUNCTION_NAMES:
            return _FUNCTION_NAMES[node.target]
    raise UnsupportedError(
        f"a {node.op} of {node.target} has no JSON form", why="programs call registered operators only"
    )


def _encode(item: Any) -> Any:
    """Return the JSON form of an argument or a fake value."""
    if item is None or isinstance(item, (bool, int, str)):
        return item
    if isinstance(item, float):
        return item if math.isfinite(item) else {"float": repr(item)}
    if isinstance(item, complex):
        return {"complex": [_encode(item.real), _encode(item.imag)]}
    if isinstance(item, fx.Node):
        return {"node": item.name}
    if isinstance(item, torch.Tensor):
        return {"tensor": _encode_type(item)}
    if isinstance(item, tuple):
        return {"tuple": [_encode(x) for x in item]}
    if isinstance(item, list):
        return [_encode(x) for x in item]
    if isinstance(item, dict):
        return {"dict": [[_encode(k), _encode(v)] for k, v in item.items()]}
    if isinstance(item, slice):
        return {"slice": [_encode(item.start), _encode(item.stop), _encode(item.step)]}
    if item is Ellipsis:
        return {"ellipsis": True}
    for tag, kind in (
        ("dtype", torch.dtype),
        ("memory_format", torch.memory_format),
        ("layout", torch.layout),
    ):
        if isinstance(item, kind):
            return {tag: str(item).removeprefix("torch.")}
    if isinstance(item, (torch.SymInt, torch.SymFloat)) and symbols.is_readable(text(item)):
        return {"size": text(item)}
    if isinstance(item, torch.device):
        return {"device": str(item)}
    if isinstance(item, torch._ops.OpOverload):
        return {"operator": str(item)}
    if isinstance(item, Division):
        return {"division": [item.mesh_dim, item.ranks, item.dim, item.blocks]}
    raise UnsupportedError(f"a value of type {type(item).__name__} has no JSON form", why=repr(item)[:200])


def _encode_type(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.layout is not torch.strided:
        raise UnsupportedError("a tensor that is not strided has no JSON form", why=f"{tensor.layout}")
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": [text(n) if is_symbolic(n) else n for n in tensor.shape],
        "stride": [text(n) if is_symbolic(n) else n for n in tensor.stride()],
        "device": str(tensor.device),
    }


def _encode_record(record: NodeInfo | Port | ParamSpec) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    row = {}
    for name, default in _DEFAULTS[type(record)]:
        item = getattr(record, name)
        if item is not default and item != default:
            row[name] = _encode(item)
    return row


_DEFAULTS = {kind: tuple((f.name, f.default) for f in dataclasses.fields(kind)) for kind in (NodeInfo, Port, ParamSpec)}


def _encode_constants(program: Program, all_data: bool) -> dict[str, Any]:
    """Return the constants that get_attr nodes read: with the bytes of a real tensor, the type alone of a fake one."""
    constants: dict[str, Any] = {}
    for node in program.graph.find_nodes(op="get_attr"):
        name, where = str(node.target), f"node {node.name!r}"
        constant = operator.attrgetter(name)(program.module)
        if not isinstance(constant, torch.Tensor):
            what = f"constant {name!r} of type {type(constant).__name__} has no JSON form"
            raise UnsupportedError(what, where=where)
        constants[name] = _encode_type(constant)
        if isinstance(constant, FakeTensor) or constant.is_meta:
            continue
        constant = constant.detach().resolve_conj().resolve_neg()
        span = constant.as_strided((_span(constant),), (1,))
        if span.nbytes > MAX_CONSTANT_BYTES and not all_data:
            continue
        if span.nbytes > MAX_CONSTANT_BYTES:
            raise UnsupportedError(
                f"constant {name!r} is too large for JSON",
                where=where,
                why=f"{span.nbytes} bytes, and the limit is {MAX_CONSTANT_BYTES}",
                hint="register it as a buffer of the model: it is then an input of the program",
            )
        raw = span.cpu().view(torch.uint8).numpy().tobytes()
        constants[name]["data"] = base64.b64encode(raw).decode("ascii")
    return constants


def _span(tensor: torch.Tensor) -> int:
    """Return the elements of storage from a tensor's first to its last, gaps included and overlaps counted once."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


# -- reading ----------------------------------------------------------------------------------
class _Loader:
    """The state of reading one program: `nodes` are those read so far, by name."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.fake_mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self.sizes = NO_SIZES
        self.numbers: dict[str, Any] = {}  # symbols by name
        if "sizes" in data:
            self.sizes = _decode_sizes(data["sizes"])
            self.fake_mode, self.numbers = new_mode(self.sizes.symbols, self.sizes.typical)
        self.nodes: dict[str, fx.Node] = {}

    def program(self) -> Program:
        data = self.data
        root = nn.Module()
        for name, entry in data["constants"].items():
            self.constant(root, name, entry)
        graph = fx.Graph()
        for row in data["nodes"]:
            self.node(graph, row)
        module = fx_graphs.lazy_module(root, graph)
        graph.lint()
        program = Program(module=module, fake_mode=self.fake_mode, **self.frame())
        if not any("transfer" in row.get("info", ()) for row in data["nodes"]):
            mark_by_graph(program)
        return program

    def frame(self) -> dict[str, Any]:
        """Return the fields of the program that are not its graph's."""
        data = self.data
        specs = [ParamSpec(**self.fields(spec)) for spec in data["params"]]
        return {
            "name": data["name"],
            "inputs": [self.port(p, InputRole) for p in data["inputs"]],
            "outputs": [self.port(p, OutputRole) for p in data["outputs"]],
            "mesh": {name: size for name, size in data["mesh"]},
            "params": {spec.name: spec for spec in specs},
            "level": Level[data["level"].upper()],
            "facts": set(data["facts"]),
            "remarks": [],
            "aliases": {n: tuple(names) for names in data.get("aliases", ()) for n in names},
            "sizes": self.sizes,
        }

    def node(self, graph: fx.Graph, row: dict[str, Any]) -> None:
        name, op = row["name"], row["op"]
        if name in self.nodes:
            raise ZgraphError(f"the program has two nodes {name!r}")
        try:
            target = _target(row["target"]) if op == "call_function" else row["target"]
            args = tuple(self.decode(a) for a in row.get("args", ()))
            kwargs = {k: self.decode(v) for k, v in row.get("kwargs", {}).items()}
            node = graph.create_node(op, target, args, kwargs, name=name)
            node.name = name  # the graph's namespace would change a name that Python reserves
            if "val" in row:
                node.meta["val"] = self.decode(row["val"])
            if "info" in row:
                record = self.fields(row["info"])
                if "turn" in record:  # the name that `chunk` had in earlier versions
                    record["chunk"] = record.pop("turn")
                set_info(
                    node,
                    NodeInfo(
                        **{
                            **record,
                            "phase": Phase(record["phase"]),
                            "role": Role(record.get("role", Role.COMPUTE)),
                        }
                    ),
                )
            node.meta.update({k: self.decode(v) for k, v in row.get("meta", {}).items() if k in _META})
        except ZgraphError as error:
            raise ZgraphError(error.what, where=f"node {name!r}", why=error.why, hint=error.hint) from None
        self.nodes[name] = node

    def decode(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self.decode(x) for x in item]
        if not isinstance(item, dict):
            return item
        ((tag, inner),) = item.items()
        match tag:
            case "node":
                if inner not in self.nodes:
                    raise ZgraphError(f"it uses {inner!r}, which no node before it defines")
                return self.nodes[inner]
            case "tensor":
                return self.fake(inner)
            case "tuple":
                return tuple(self.decode(x) for x in inner)
            case "dict":
                return {self.decode(k): self.decode(v) for k, v in inner}
            case "slice":
                return slice(*(self.decode(x) for x in inner))
            case "float":
                return float(inner)
            case "complex":
                return complex(*(self.decode(x) for x in inner))
            case "ellipsis":
                return Ellipsis
            case "dtype":
                return _named(torch.dtype, inner)
            case "memory_format":
                return _named(torch.memory_format, inner)
            case "layout":
                return _named(torch.layout, inner)
            case "device":
                return torch.device(inner)
            case "division":
                return Division(*inner)
            case "size":
                return symbols.read(inner, self.numbers)
            case "operator":
                return _target(inner)
        raise ZgraphError(f"a value is tagged {tag!r}, which means nothing here")

    def fake(self, kind: dict[str, Any]) -> torch.Tensor:
        read = lambda n: symbols.read(n, self.numbers) if isinstance(n, str) else n  # noqa: E731
        with self.fake_mode:
            return _empty({**kind, "shape": [*map(read, kind["shape"])], "stride": [*map(read, kind["stride"])]})

    def constant(self, root: nn.Module, name: str, held: dict[str, Any]) -> None:
        if "data" in held:
            shape = _empty({**held, "device": "meta"})
            raw = bytearray(base64.b64decode(held["data"]))
            if len(raw) != _span(shape) * shape.element_size():
                needed = f"its type needs {_span(shape) * shape.element_size()}"
                raise ZgraphError(f"constant {name!r} has {len(raw)} bytes", why=needed)
            flat = torch.frombuffer(raw, dtype=shape.dtype) if raw else torch.empty(0, dtype=shape.dtype)
            tensor = flat.as_strided(shape.shape, shape.stride())
            try:
                tensor = tensor.to(held["device"])
            except (RuntimeError, AssertionError) as error:
                raise ZgraphError(
                    f"constant {name!r} can't be put on {held['device']!r} here",
                    why=str(error).splitlines()[0],
                ) from error
        else:
            tensor = self.fake(held)
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(root, part):
                root.add_module(part, nn.Module())
            root = getattr(root, part)
        root.register_buffer(leaf, tensor)

    def fields(self, record: dict[str, Any]) -> dict[str, Any]:
        return {key: self.decode(value) for key, value in record.items()}

    def port(self, record: dict[str, Any], roles: type[InputRole] | type[OutputRole]) -> Port:
        fields = self.fields(record)
        of = fields.get("of")
        return Port(**{**fields, "role": roles(fields["role"]), "of": InputRole(of) if of is not None else None})


def _empty(kind: dict[str, Any]) -> torch.Tensor:
    return torch.empty_strided(
        kind["shape"], kind["stride"], dtype=_named(torch.dtype, kind["dtype"]), device=kind["device"]
    )


def _named(kind: type, name: str) -> Any:
    """Return the torch.dtype, memory format or layout of this name."""
    member = getattr(torch, name, None)
    if not isinstance(member, kind):
        raise ZgraphError(f"torch has no {kind.__name__} {name!r}")
    return member


def _target(name: str) -> Any:
    """Return the operator or function that a node's target names; nothing else can be named."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError):
        op = None
    if not isinstance(op, torch._ops.OpOverload):
        raise ZgraphError(
            f"there is no operator {name!r} here",
            hint=f"import the package that registers the operators of {namespace!r} first",
        )
    return op
