"""Inductor: its joint passes, its decompositions, and the code that it generates."""

from __future__ import annotations

import contextlib
import functools
import os
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing


def inductor_joint_passes(module: fx.GraphModule, fake_mode: Any, *, pads: bool) -> None:
    """Inductor's own passes over a joint graph (random operators become functions of seeds, patterns are replaced).

    With `pads` products on CUDA whose rows don't begin at multiples of 16 bytes are padded (of a head of 50,257 words, say). Torch decides that
    by the clock, which would differ between ranks; here their sizes decide. It asks of sizes that are symbols, too: these programs are not padded.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    by_sizes = unittest.mock.patch.object(pad_mm, "_should_pad", _worth_padding)
    with V.set_fake_mode(fake_mode), config.patch(shape_padding=pads), by_sizes:
        joint_graph_passes(module)


def _worth_padding(match: Any, one: torch.Tensor, other: torch.Tensor, *rest: Any) -> bool:
    """Whether a product computes longer than it reads and writes, on accelerators with about 100 operations to an element: a padded copy is
    of the order of the latter."""
    rows, inner, columns = *one.shape[-2:], other.shape[-1]
    return bool(rows * inner * columns > 100 * (rows * inner + inner * columns + rows * columns))


@contextlib.contextmanager
def eager_random_numbers() -> Iterator[None]:
    """Inductor's programs made inside draw what plain PyTorch draws (by itself Inductor has a generator of its own)."""
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield


def inductor_decompositions() -> dict[Any, Any]:
    """The decompositions that Inductor needs at capture."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def draws_by_seed(target: Any) -> bool:
    """Is this operator one of Inductor's for seeds, and random numbers of them? Their plain implementations draw others than its code does."""
    prims = torch.ops.prims
    return target in (prims.inductor_seeds.default, prims.inductor_random.default, prims.inductor_randint.default)


def drawn_by_inductor(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """What Inductor's code draws for such an operator."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if target is torch.ops.prims.inductor_seeds.default:
        count, device = args
        seeds = torch.empty(count, dtype=torch.int64, device=device)
        return torch.ops.aten.randint.low_out(-(2**63), 2**63 - 1, [count], out=seeds)  # type: ignore[no-any-return]
    seed = next(a for a in args if isinstance(a, torch.Tensor))
    mode = FakeTensorMode()
    graph = fx.Graph()
    given = graph.placeholder("seed")
    given.meta["val"] = mode.from_tensor(seed)
    made = graph.call_function(target, tuple(given if a is seed else a for a in args), kwargs)
    with mode:
        made.meta["val"] = target(*(given.meta["val"] if a is seed else a for a in args), **kwargs)
    graph.output((made,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    function, _, _ = compile_with_inductor(module, [given.meta["val"]], mode, False, False, False)
    return function([seed])[0]  # type: ignore[no-any-return]


def name_origins(graph: fx.Graph) -> None:
    """Let Inductor's comments name this graph's own nodes, and its kernels the operators that passes inserted."""
    from torch.fx.traceback import NodeSource

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        node.meta.pop("from_node", None)
        node.meta["from_node"] = [NodeSource(node, "zgraph")]
        unnamed = node.meta.get("original_aten") is None and isinstance(node.target, torch._ops.OpOverload)
        if unnamed and node.target.namespace != "_c10d_functional":  # (else it names the kernel of its operand)
            node.meta["original_aten"] = node.target


def name_held(inputs: Sequence[fx.Node]) -> None:
    """Tell Inductor, by their names, which inputs outlive the graph. It takes all others to be free behind their last reader, and holds a
    buffer for a later one of its size as long as that is not above the peak: which weights, let go one by one, would put at the start."""
    for node in inputs:
        node._rename(f"primals_{node.name}")
        node.target = node.name


@functools.cache
def order_keeper(chunks: tuple[tuple[str, str], ...] = (), copies: tuple[str, ...] = ()) -> Any:
    """A pass over Inductor's scheduler that lets no fusion move collectives and library calls past each other, nor what is of one of the
    `chunks` (the names of nodes, each with that of its chunk) past the chunk before it: two chunks' values would be there at once. Nor
    does one move what is computed again (the names of `copies`) past a call before it: it may need nothing that is not there from the
    start, and several such values, read one after another, would be made by one kernel.

    Fusion puts a group of operators where the first of them stood, and what the others need (a wait, a product) before
    that. A chain of control dependencies through all kernels that are not Inductor's own forbids this; it extends no
    buffer's life.
    """
    from torch._inductor import custom_graph_pass, ir
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import SchedulerNode

    base = getattr(
        custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass
    )  # torch 2.11: the latter

    class KeepOrder(base):  # type: ignore[misc, valid-type]
        def __call__(self, nodes: list[Any]) -> list[Any]:
            last: str | None = None
            again = frozenset(copies)
            for node in nodes:
                if not isinstance(node.node, (ir.ExternKernel, ir.TemplateBuffer)) or isinstance(
                    node.node, ir.MultiOutput
                ):
                    if isinstance(node, SchedulerNode):  # (else many loops as one, which no backend takes anew)
                        self._hold(node)
                    made = node.node.get_origin_node() if again else None
                    if last is not None and made is not None and made.name in again:
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
            # Of a kernel that reads what another wrote in place (what was waited for), the C++ backend forgets so when it takes its loops
            # anew, and fuses it in front of the wait: unless it has a dependency that was added.
            for read in sorted({d.name for d in node.read_writes.reads} & set(node.mutation_renames.values())):
                node.add_fake_dep(WeakDep(read, read, is_fake=True))

        def uuid(self) -> Any:
            return custom_graph_pass.get_hash_for_files((__file__,)), chunks, copies

    return KeepOrder()


def _order_chunks(nodes: list[Any], chunk_of: dict[str, str]) -> bool:
    """Let each node of a chunk depend on all that the chunk before it has written; return whether there are such nodes."""
    from torch._inductor.dependencies import WeakDep

    now: str | None = None
    before: list[str] = []  # what the chunk before has written
    written: list[str] = []
    for node in nodes:
        of = {chunk_of[o.name] for o in node.node.get_origins() if o.name in chunk_of} if chunk_of else ()
        if len(of) != 1:
            continue
        (chunk,) = of
        if chunk != now:
            now, before, written = chunk, written, []
        for name in before:
            # (nothing is mutated: it names no write of the node's)
            node.add_fake_dep(WeakDep(name, name, is_fake=True))
        written += [b.get_name() for b in node.get_outputs()]
    return bool(written)


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
    """(the boxed callable, its source, the strides of its outputs) of Inductor's compilation of one graph.

    `library` gives what its library calls are made of, for what it would make them of. With `combine` kernels that do not depend on
    each other become one (on CUDA, where each launch costs microseconds).
    Without `reuse` a buffer is freed where it dies: Inductor else holds it for the next of its size, where its own estimate of the peak, which
    knows of no homes, allows it. Then, and where something is computed again, each kernel is a function of its own: on CPU Inductor else
    makes one of all between two library calls, and their results are there at once.
    With `round_each` a fused kernel rounds to a low dtype wherever its operators would, one by one.
    The order of collectives and library calls is that of the graph: what fuses around them does not move them, and
    Inductor's own reorder passes are off (they move the start of a collective next to its wait). `chunks`, `copies`: see `order_keeper`.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    lower_gathers()
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
        stack.enter_context(_known_sizes())
        stack.enter_context(_products_where_they_are())
        stack.enter_context(_sums_where_they_belong())
        if copies or not reuse:
            stack.enter_context(_functions_apart())
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
    """Let Inductor know that zgraph's gather is a collective: what it reads is not used again before its wait."""
    from torch._inductor import ir, lowering

    gather = torch.ops.zgraph.gather

    @lowering.register_lowering(gather, type_promotion_kind=None)
    def lowered(part: Any, ranks: int, group: str) -> Any:
        return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(gather.default, part, ranks, group))  # type: ignore[arg-type]

    lowering.add_layout_constraint(gather, lowering.constrain_to_fx_strides)


@contextlib.contextmanager
def _known_sizes() -> Iterator[None]:
    """Let Inductor know the sizes of a graph's buffers where it weighs whether one may be held for a later one of its size. It only
    finds them where it reorders for the peak, and else takes all that a graph makes for nothing: nearly every buffer would be held."""
    from torch._inductor.codegen.wrapper import EfficientPeakEstimate
    from torch._inductor.memory import assign_memory_planning_info_for_scheduler_buffers
    from torch._inductor.virtualized import V

    made = EfficientPeakEstimate.__init__

    def counted(self: Any) -> None:
        scheduler = V.graph.scheduler
        assign_memory_planning_info_for_scheduler_buffers(scheduler.nodes, scheduler.name_to_buf)
        made(self)

    EfficientPeakEstimate.__init__ = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        EfficientPeakEstimate.__init__ = made  # type: ignore[method-assign]


@contextlib.contextmanager
def _functions_apart() -> Iterator[None]:
    """Let Inductor make a function of each C++ kernel: what it puts together it ends where a function has too many arguments."""
    from torch._inductor.codegen.cpp import CppScheduling

    most = CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM
    CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM = 0
    try:
        yield
    finally:
        CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM = most


@contextlib.contextmanager
def _sums_where_they_belong() -> Iterator[None]:
    """Let Inductor's C++ kernels add to the places that they mean: in one that is tiled over two dimensions, torch moves the index of an atomic
    addition by the inner loop's variable twice, once before and once as it makes a vector of it. That writes past the buffer's end."""
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
            yield  # (kernels that were made without this are of another key)
    finally:
        CppTile2DKernel.store = store  # type: ignore[method-assign]


@contextlib.contextmanager
def _products_where_they_are() -> Iterator[None]:
    """Let Inductor make one call of a product and the sum with something else only where the product need not wait for that: the first part
    of the gradient of a weight that is used twice would be computed where the last one is, and its operands held until then."""
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
    """Whether this is a view, or an operator of which fusion makes a loop."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    views = any(a.alias_info is not None for a in node.target._schema.arguments)
    return views or torch.Tag.pointwise in node.target.tags


def rebuild_inductor(
    compiled: Any, library: Callable[[Any], Any], source: str, names: dict[str, Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """The boxed callable of `compiled` with another `source` (its own one, changed) and `names` in the source's module. `library`: see
    `compile_with_inductor`."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    key, path = PyCodeCache.write(source)
    module = PyCodeCache.load_by_key_path(key, path, attrs={**(getattr(compiled, "constants", None) or {}), **names})
    module.__dict__["extern_kernels"] = library(module.__dict__["extern_kernels"])
    written = OrderedSet(getattr(compiled, "mutated_input_idxs", ()))
    return align_inputs_from_check_idxs(module.call, getattr(compiled, "inputs_to_check", ()), written)


@dataclass(frozen=True)
class CodeRecord:
    """What the callable of generated code needs besides its source: positions of the inputs whose alignment it looks at, of those that it writes
    to, and the `libraries` of its C++ kernels, as paths within Inductor's cache folder."""

    inputs_to_check: tuple[int, ...]
    mutated_input_idxs: tuple[int, ...]
    libraries: tuple[str, ...] = ()


def record_of(compiled: Any) -> CodeRecord | None:
    """The record of what `compile_with_inductor` gave; None where its code can't be run by another process (it holds tensors, say)."""
    runner = getattr(compiled, "compiled_fn_runner", None)
    held = ("constants", "frozen_param_names", "torchbind_constants", "opaque_value_type_classes", "cudagraph_info")
    others = ("guards_expr", "disabled_cudagraphs_reason", "_defers_input_alignment", "_wrap_compiled_regions")
    if runner is None or any(getattr(compiled, name, None) for name in (*held, *others)):
        return None
    folder = os.path.realpath(inductor_folder())
    paths = []
    for value in type(runner).call.__globals__.values():
        of = getattr(getattr(value, "__self__", None), "__file__", None)
        if isinstance(of, str) and of.endswith(".so"):
            path = os.path.relpath(os.path.realpath(of), folder)
            if path.startswith(os.pardir):
                return None
            paths.append(path)
    return CodeRecord(
        tuple(int(at) for at in compiled.inputs_to_check),
        tuple(int(at) for at in compiled.mutated_input_idxs),
        tuple(sorted(set(paths))),
    )


def constants_of(compiled: Any) -> dict[str, torch.Tensor]:
    """The tensors that the code of `compiled` holds, by their names in it."""
    return dict(getattr(compiled, "constants", None) or {})


def inductor_folder() -> str:
    """Where Inductor keeps what it has made."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text among what TORCH_TRACE collects, for tlparse; without TORCH_TRACE nothing is made."""
    torch._logging.trace_structured(  # type: ignore[attr-defined]
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
