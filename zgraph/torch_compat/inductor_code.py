"""Inductor: its joint passes, its decompositions, and the code that it generates."""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from zgraph.torch_compat import kernel_files
from zgraph.torch_compat.fx_graphs import fix_strides
from zgraph.torch_compat.vector_instructions import choose_instructions


def inductor_joint_passes(module: fx.GraphModule, fake_mode: Any, *, pads: bool) -> None:
    """Run Inductor's own passes over a joint graph (random operators become functions of seeds, patterns are replaced).

    With `pads`, matrix products on CUDA whose rows do not begin at multiples of 16 bytes (a head of 50,257 words, say)
    are padded. Torch decides by timing, which would differ between ranks; here the sizes decide. Programs with symbolic
    sizes are not padded.
    """
    from torch._inductor import config, pattern_matcher
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    by_sizes = unittest.mock.patch.object(pad_mm, "_should_pad", _worth_padding)
    once = unittest.mock.patch.object(pattern_matcher, "fallback_node_due_to_unsupported_type", _asked_once())
    values = (node.meta.get("val") for node in module.graph.find_nodes(op="placeholder"))
    pads = pads and any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values)
    tried = contextlib.nullcontext() if pads else _without_padding()
    with V.set_fake_mode(fake_mode), config.patch(shape_padding=pads), by_sizes, once, tried:
        joint_graph_passes(module)


@contextlib.contextmanager
def _without_padding() -> Iterator[None]:
    """Take torch's patterns that pad products out of its joint passes, which are to pad none.

    (They make new fake tensors for each product before they refuse it: a tenth of all passes of 48 layers.)
    """
    from torch._inductor.fx_passes import joint_graph, pad_mm

    joint_graph.lazy_init()
    asks = {getattr(pad_mm, f"should_pad_{product}", None) for product in ("mm", "bmm", "addmm")} - {None}

    def pads(entry: Any) -> bool:
        check = getattr(entry, "extra_check", None)
        names = getattr(getattr(check, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, getattr(check, "__closure__", None) or (), strict=True))
        return "extra_check" in cells and cells["extra_check"].cell_contents in asks

    table = joint_graph.patterns.patterns
    others = {key: [entry for entry in entries if not pads(entry)] for key, entries in table.items()}
    with unittest.mock.patch.dict(table, others):
        yield


def _asked_once() -> Callable[..., bool]:
    """Return torch's check whether Inductor supports a node's types, which looks at each set of types once.

    (Torch looks at the values of each node for each list of patterns: a tenth of all passes of 48 layers.)
    """
    from torch._inductor.lowering import fallback_node_due_to_unsupported_type as check

    answers: dict[Any, bool] = {}

    def asked(node: fx.Node, allow_cpu_inputs: bool = True) -> bool:
        values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(tensors) < len(values):
            return bool(check(node, allow_cpu_inputs))
        types = tuple((x.dtype, x.device, x.layout) for x in tensors)
        key = (node.op, node.target, allow_cpu_inputs, types)
        if key not in answers:
            answers[key] = bool(check(node, allow_cpu_inputs))
        return answers[key]

    return asked


def _worth_padding(match: Any, one: torch.Tensor, other: torch.Tensor, *rest: Any) -> bool:
    """Return whether a product computes longer than it reads and writes, at about 100 operations to an element (an
    accelerator).

    A padded copy costs about as much as the reading and writing.
    """
    rows, inner, columns = *one.shape[-2:], other.shape[-1]
    return bool(rows * inner * columns > 100 * (rows * inner + inner * columns + rows * columns))


@contextlib.contextmanager
def eager_random_numbers() -> Iterator[None]:
    """Let Inductor's programs made inside draw what plain PyTorch draws (by itself Inductor has a generator of its
    own)."""
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield


def inductor_decompositions() -> dict[Any, Any]:
    """Return the decompositions that Inductor needs at capture."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def draws_by_seed(target: Any) -> bool:
    """Return whether this is one of Inductor's operators for seeds, or for random numbers made from them.

    Their plain implementations draw other numbers than Inductor's code does.
    """
    prims = torch.ops.prims
    return target in (prims.inductor_seeds.default, prims.inductor_random.default, prims.inductor_randint.default)


def drawn_by_inductor(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the numbers that Inductor's code draws for such an operator."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if target is torch.ops.prims.inductor_seeds.default:
        count, device = args
        seeds = torch.empty(count, dtype=torch.int64, device=device)
        return torch.ops.aten.randint.low_out(-(2**63), 2**63 - 1, [count], out=seeds)  # type: ignore[no-any-return]
    seed = next(a for a in args if isinstance(a, torch.Tensor))
    mode = FakeTensorMode()
    graph = fx.Graph()
    seed_node = graph.placeholder("seed")
    seed_node.meta["val"] = mode.from_tensor(seed)
    draw = graph.call_function(target, tuple(seed_node if a is seed else a for a in args), kwargs)
    with mode:
        draw.meta["val"] = target(*(seed_node.meta["val"] if a is seed else a for a in args), **kwargs)
    graph.output((draw,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    function, _, _ = compile_with_inductor(module, [seed_node.meta["val"]], mode, False, False, False)
    return function([seed])[0]  # type: ignore[no-any-return]


def name_origins(graph: fx.Graph) -> None:
    """Make Inductor's comments name this graph's own nodes, and its kernels the operators that passes inserted."""
    from torch.fx.traceback import NodeSource

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        node.meta.pop("from_node", None)
        node.meta["from_node"] = [NodeSource(node, "zgraph")]
        unnamed = node.meta.get("original_aten") is None and isinstance(node.target, torch._ops.OpOverload)
        if (
            unnamed and node.target.namespace != "_c10d_functional"
        ):  # (a collective would give its name to its operand's kernel)
            node.meta["original_aten"] = node.target


def renew_input_values(graph: fx.Graph) -> None:
    """Tell Inductor the layouts of memory that operators of the user's own get here, where it keeps to them.

    Capture has recorded them by its own sizes; symbols have other names since, and passes may have divided the operands.
    """
    for node in graph.nodes:
        if "eager_input_vals" in node.meta:
            node.meta["eager_input_vals"] = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])


def name_held(inputs: Sequence[fx.Node]) -> None:
    """Tell Inductor, by renaming them, which inputs outlive the graph.

    It takes all other inputs to be free after their last reader, and keeps a dead buffer for reuse while the peak
    allows it. Inputs freed one by one would put the estimated peak at the start, and so allow too much.
    """
    for node in inputs:
        node._rename(f"primals_{node.name}")
        node.target = node.name


@functools.cache
def order_keeper(chunks: tuple[tuple[str, str], ...] = (), copies: tuple[str, ...] = ()) -> Any:
    """Return a pass over Inductor's scheduler that keeps fusion from reordering collectives, library calls and chunks.

    Collectives and library calls keep their order. A node of one of the `chunks` ((node, its chunk) pairs) stays behind
    the chunk before it, else values of two chunks would be alive at once. A recomputed node (`copies` has their names)
    stays behind the call before it: its operands may all be there from the start, and one kernel would then recompute
    several such values that are read one after another.

    Fusion puts a group of operators where its first one was, and what the others need (a wait, a product) before it. A
    chain of control dependencies through all kernels that are not Inductor's own forbids this, and extends no buffer's
    life.
    """
    from torch._inductor import custom_graph_pass, ir
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import SchedulerNode

    base = getattr(
        custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass
    )  # torch 2.11 has only the latter

    class KeepOrder(base):  # type: ignore[misc, valid-type]
        def __call__(self, nodes: list[Any]) -> list[Any]:
            last: str | None = None
            again = frozenset(copies)
            for node in nodes:
                if not isinstance(node.node, (ir.ExternKernel, ir.TemplateBuffer)) or isinstance(
                    node.node, ir.MultiOutput
                ):
                    if isinstance(
                        node, SchedulerNode
                    ):  # (other nodes are several loops in one, which no backend rebuilds)
                        self._hold(node)
                    origin = node.node.get_origin_node() if again else None
                    if last is not None and origin is not None and origin.name in again:
                        node.add_fake_dep(WeakDep(last, last, is_fake=True))
                    continue
                own = next((b.get_name() for b in node.get_outputs()), None)
                if own is None:
                    continue
                if last is not None:
                    node.add_fake_dep(WeakDep(last, own, is_fake=True))
                last = own
            apart = _order_chunks(nodes, dict(chunks))
            if last is not None or apart:
                nodes[0].scheduler.compute_ancestors()
            return nodes

        @staticmethod
        def _hold(node: Any) -> None:
            # When the C++ backend rebuilds a kernel's loops, it forgets that the kernel reads what another wrote in
            # place (the result of a wait), and fuses it in front of the wait. It does not forget an added dependency.
            for read in sorted({d.name for d in node.read_writes.reads} & set(node.mutation_renames.values())):
                node.add_fake_dep(WeakDep(read, read, is_fake=True))

        def uuid(self) -> Any:
            return custom_graph_pass.get_hash_for_files((__file__,)), chunks, copies

    return KeepOrder()


def _order_chunks(nodes: list[Any], chunk_of: dict[str, str]) -> bool:
    """Make each node of a chunk depend on all that the chunk before it has written; return whether any node is of a
    chunk."""
    from torch._inductor.dependencies import WeakDep

    now: str | None = None
    before: list[str] = []  # buffers that the chunk before has written
    written: list[str] = []
    for node in nodes:
        of = {chunk_of[o.name] for o in node.node.get_origins() if o.name in chunk_of} if chunk_of else ()
        if len(of) != 1:
            continue
        (chunk,) = of
        if chunk != now:
            now, before, written = chunk, written, []
        for name in before:
            # (a plain ordering: no write of the node's is named, since nothing is mutated)
            node.add_fake_dep(WeakDep(name, name, is_fake=True))
        written += [b.get_name() for b in node.get_outputs()]
    return bool(written)


def _store_what_leaves_chunks(graph: fx.Graph, chunk_of: dict[str, str]) -> None:
    """Make Inductor store a value of a chunk that is read outside of it.

    It would compute a cheap one (an element that is looked up in each row) only where the parts of all chunks are put
    together, and the large values that it is computed from would live until then.
    """
    for node in graph.nodes:
        chunk = chunk_of.get(node.name)
        if chunk is not None and any(chunk_of.get(user.name) != chunk for user in node.users):
            fix_strides(node)


def compile_with_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: Any,
    is_backward: bool,
    combine: bool,
    round_each: bool,
    library: Callable[[Any], Any] = lambda kernels: kernels,
    reuse: bool = True,
    chunks: tuple[tuple[str, str], ...] = (),
    copies: tuple[str, ...] = (),
) -> tuple[Callable[[list[Any]], Sequence[Any]], str, list[Any]]:
    """Compile one graph with Inductor; return (the boxed callable, its source, the strides of its outputs).

    `library` wraps the namespace that the generated code's library calls come from. With `combine`, kernels that do not depend on each other
    become one (on CUDA, where each launch costs microseconds). With `round_each`, a fused kernel rounds to a low dtype wherever its operators
    would, one by one.

    Without `reuse`, a buffer is freed after its last use. Else Inductor keeps it for a later one of its size where its own estimate of the
    peak, which does not know of offloading, allows it. Without `reuse`, and where something is recomputed, each C++ kernel is a function of its
    own: on CPU Inductor else makes one function of all kernels between two library calls, and their results are alive at once.

    Collectives and library calls keep the graph's order: fused kernels around them do not move them, and Inductor's own reorder passes, which
    move the start of a collective next to its wait, are off. `chunks`, `copies`: see `order_keeper`.
    C++ kernels are not compiled: one that is called compiles itself alone, `rebuild_inductor` compiles all of a source.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    lower_gathers()
    choose_instructions()
    _store_what_leaves_chunks(module.graph, dict(chunks))
    keep = {
        "reorder_for_locality": False,
        "reorder_for_peak_memory": False,
        "_pre_fusion_custom_pass": order_keeper(chunks, copies),
        "combo_kernels": combine,
        "emulate_precision_casts": round_each,
        "allow_buffer_reuse": reuse,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(V.set_fake_mode(fake_mode))
        stack.enter_context(tracing(TracingContext(fake_mode)))
        stack.enter_context(inductor_config.patch(keep))
        apart = [_functions_apart] if copies or not reuse else []
        for changed in (_known_sizes, _products_where_they_are, _sums_where_they_belong, _kernels_not_compiled, *apart):
            stack.enter_context(changed())
        compiled = compile_fx_inner(module, list(inputs), is_backward=is_backward)
    if not hasattr(compiled, "output_strides"):  # (a graph without an operator is not compiled at all)
        values = [getattr(n, "meta", {}).get("val") for n in module.graph.output_node().args[0]]  # type: ignore[union-attr]
        return compiled, "", [v.stride() if isinstance(v, torch.Tensor) else None for v in values]
    if (runner := compiled.compiled_fn_runner) is not None:  # type: ignore[attr-defined]
        names = type(runner).call.__globals__
        names["extern_kernels"] = library(names["extern_kernels"])
    strides = [
        None if s is None or not all(str(i).isdecimal() for i in s) else tuple(int(i) for i in s)
        for s in compiled.output_strides
    ]
    return compiled, compiled.source_code, strides  # type: ignore[attr-defined]


@functools.cache
def lower_gathers() -> None:
    """Register zgraph's gather with Inductor as a collective, so that what it reads is not reused before its wait."""
    from torch._inductor import ir, lowering

    gather = torch.ops.zgraph.gather

    @lowering.register_lowering(gather, type_promotion_kind=None)
    def lowered(part: Any, ranks: int, group: str) -> Any:
        return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(gather.default, part, ranks, group))  # type: ignore[arg-type]

    lowering.add_layout_constraint(gather, lowering.constrain_to_fx_strides)


@contextlib.contextmanager
def _known_sizes() -> Iterator[None]:
    """Give Inductor the sizes of a graph's buffers where it decides whether to keep a dead one for a later one of its
    size.

    It only computes them where it reorders for the peak, and else counts every buffer as 0 bytes: nearly all would be
    kept.
    """
    from torch._inductor.codegen.wrapper import EfficientPeakEstimate
    from torch._inductor.memory import assign_memory_planning_info_for_scheduler_buffers
    from torch._inductor.virtualized import V

    original_init = EfficientPeakEstimate.__init__

    def counted(self: Any) -> None:
        scheduler = V.graph.scheduler
        assign_memory_planning_info_for_scheduler_buffers(scheduler.nodes, scheduler.name_to_buf)
        original_init(self)

    EfficientPeakEstimate.__init__ = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        EfficientPeakEstimate.__init__ = original_init  # type: ignore[method-assign]


@contextlib.contextmanager
def _functions_apart() -> Iterator[None]:
    """Make Inductor write each C++ kernel as a function of its own, by lowering the number of arguments at which it
    ends one."""
    from torch._inductor.codegen.cpp import CppScheduling

    most = CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM
    CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM = 0
    try:
        yield
    finally:
        CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM = most


@contextlib.contextmanager
def _sums_where_they_belong() -> Iterator[None]:
    """Correct the index of atomic additions in Inductor's C++ kernels that are tiled over two dimensions.

    Torch adds the inner loop's variable to it twice, before the addition and as it makes a vector of the index, which
    writes past the buffer's end.
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel

    store = CppTile2DKernel.store

    def moved_once(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
        atomic = mode == "atomic_add" and (config.cpp.dynamic_threads or self.num_threads != 1)
        if atomic and not self.need_vec_transpose(self.rename_indexing(index)):
            return CppVecKernel.store(self, name, index, value, mode)
        return store(self, name, index, value, mode)

    CppTile2DKernel.store = moved_once  # type: ignore[method-assign]
    try:
        keys: Any = torch.compiler.config
        with keys.patch(cache_key_tag=f"{keys.cache_key_tag} zgraph: sums"):
            yield  # (kernels made without this correction have another cache key)
    finally:
        CppTile2DKernel.store = store  # type: ignore[method-assign]


@contextlib.contextmanager
def _products_where_they_are() -> Iterator[None]:
    """Let Inductor fuse a product and a sum into one call only where the product need not wait for the sum's other
    operand.

    Else the first part of the gradient of a weight that is used twice would be computed with the last one, and its
    operands kept until then.
    """
    from torch._inductor.fx_passes import post_grad

    unfused = post_grad.should_prefer_unfused_addmm

    def moves_it(match: Any) -> bool:
        total = match.output_node()
        product = next(a for a in total.all_input_nodes if a.target is torch.ops.aten.mm.default)
        node = product.next
        while node is not total and _is_light(node):
            node = node.next
        return node is not total or bool(unfused(match))

    post_grad.should_prefer_unfused_addmm = moves_it
    try:
        yield
    finally:
        post_grad.should_prefer_unfused_addmm = unfused


def _is_light(node: fx.Node) -> bool:
    """Return whether this is a view, or an operator that fusion turns into a loop."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    views = any(a.alias_info is not None for a in node.target._schema.arguments)
    return views or torch.Tag.pointwise in node.target.tags


@contextlib.contextmanager
def _kernels_not_compiled() -> Iterator[None]:
    """Let generated code that is loaded inside define its C++ kernels without compiling them."""
    from torch._inductor.async_compile import AsyncCompile

    def later(_: Any, argtypes: Sequence[str], source_code: str) -> kernel_files.KernelSource:
        return kernel_files.KernelSource(argtypes, source_code)

    with unittest.mock.patch.object(AsyncCompile, "cpp_pybinding", later):
        yield


def rebuild_inductor(
    compiled: Any,
    library: Callable[[Any], Any],
    source: str,
    names: dict[str, Any],
    places: Sequence[kernel_files.Place] = (),
) -> tuple[Callable[[list[Any]], Sequence[Any]], dict[str, Any]]:
    """Load a source, that of `compiled` or an edited one, and add `names` to its module.

    Returns (its boxed callable, the names of its module). `library`: see `compile_with_inductor`; `places`: where kernels
    of it are that were compiled before.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    key, path = PyCodeCache.write(kernel_files.compiled_later(source))
    module = PyCodeCache.load_by_key_path(key, path, attrs={**(getattr(compiled, "constants", None) or {}), **names})
    kernel_files.compile_kernels(module.__dict__, places)
    module.__dict__["extern_kernels"] = library(module.__dict__["extern_kernels"])
    written = OrderedSet(getattr(compiled, "mutated_input_idxs", ()))
    call = align_inputs_from_check_idxs(module.call, getattr(compiled, "inputs_to_check", ()), written)
    return call, module.__dict__


@dataclass(frozen=True)
class CodeRecord:
    """What the callable of generated code needs besides its source."""

    inputs_to_check: tuple[int, ...]  # positions of the inputs whose alignment it checks
    mutated_input_idxs: tuple[int, ...]  # positions of the inputs that it writes to
    places: tuple[kernel_files.Place, ...] = ()  # where its C++ kernels are


def record_of(compiled: Any) -> CodeRecord | None:
    """Return the record of a result of `compile_with_inductor`, without the places of its kernels.

    Returns None where another process can't run its code (it holds tensors, say).
    """
    runner = getattr(compiled, "compiled_fn_runner", None)
    constants = (
        "constants",
        "frozen_param_names",
        "torchbind_constants",
        "opaque_value_type_classes",
        "cudagraph_info",
    )
    others = ("guards_expr", "disabled_cudagraphs_reason", "_defers_input_alignment", "_wrap_compiled_regions")
    if runner is None or any(getattr(compiled, name, None) for name in (*constants, *others)):
        return None
    return CodeRecord(
        tuple(int(at) for at in compiled.inputs_to_check), tuple(int(at) for at in compiled.mutated_input_idxs)
    )


def constants_of(compiled: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that the code of `compiled` holds, by their names in it."""
    return dict(getattr(compiled, "constants", None) or {})


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to what TORCH_TRACE collects, for tlparse; without TORCH_TRACE the text is not made."""
    torch._logging.trace_structured(  # type: ignore[attr-defined]
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
