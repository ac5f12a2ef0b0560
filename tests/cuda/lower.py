"""`lower.py FOLDER`: programs of `cases.py` to Triton code for an H200 in FOLDER, each kernel compiled for sm_90.

Writes `lowered.json`: for each case its parts' code, inputs and outputs, what was launched and compiled.
"""

from __future__ import annotations

import os
import sys

os.environ["ZGRAPH_FAKE_H200"] = "1"
import fake_h200  # isort: skip  # (before torch)

import json
import re
from pathlib import Path

import cases
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import zgraph
from zgraph.build.planned_step import programs, update_program
from zgraph.codegen.inductor import adopt_strides, compile_inductor, launches
from zgraph.codegen.partition import split
from zgraph.codegen.update_chunks import compile_chunk, compile_chunks
from zgraph.passes.analysis.simulator import bucket_of
from zgraph.program import collectives, transfers_to_host
from zgraph.program.node import info
from zgraph.program.program import Program


def expected(program: Program) -> list[str]:
    """The collectives in the program's order; of a bucket, which is one, its first start."""
    joined = {m for n in program.graph.nodes if collectives.is_start(n) for m in bucket_of(n)[1:]}
    found = [n for n in program.graph.nodes if collectives.is_start(n) or collectives.is_wait(n)]
    return [n.name for n in found if n not in joined]


def lower(name: str, folder: Path) -> list[dict[str, object]]:
    layers, dtype, zero, world = cases.CASES[name]
    with torch.device("meta"):
        model = cases.Model(layers, dtype)
    plan = zgraph.Plan(mesh={"dp": world}, zero=zero)
    parts = split(programs(model, plan, (cases.tokens().to("meta"),), world).program)
    group = {"dp": str(dist.group.WORLD.group_name)}
    made = []
    with fake_h200.generating_only(folder):
        forward = compile_inductor(parts.forward, group)
        adopt_strides(parts.backward, forward)
        backward = compile_inductor(parts.backward, group, is_backward=True)
    for executable in (forward, backward):
        program = executable.program
        devices = {str(v.device) for n in program.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)}
        made.append({
            "name": program.name, "source": executable.source, "devices": sorted(devices),
            "inputs": [(p.role.value, p.name) for p in program.inputs],
            "outputs": [(p.role.value, p.name) for p in program.outputs],
            "kernels": [(k.name, k.operators, k.calls) for k in executable.kernels],
            "library": [(k.name, k.calls) for k in executable.library],
            "communication": [n.name for n in launches(executable.source, program) if collectives.is_start(n) or collectives.is_wait(n)],
            "expected": expected(program),
            "compiled": fake_h200.compile_kernels(executable.source, program.name),
        })  # fmt: skip
    return made


def lower_offload(world: int, on: str, folder: Path) -> list[dict[str, object]]:
    """A step and its update of which all lies in the host's memory (but parameters, where the update is made there): each part's moves
    as the program and as its code has them."""
    layers, dtype, _, _ = next(iter(cases.CASES.values()))
    with torch.device("meta"):
        model = cases.Model(layers, dtype)
    kinds = ("activations", "optimizer", *(["parameters"] if on == "device" else []))
    away = {"least_bytes": 1, "update_on": on, **dict.fromkeys(kinds, "cpu")}
    plan = zgraph.Plan(mesh={"dp": world}, zero=3, optimizer=zgraph.AdamW(), offload=away)
    parts = split(programs(model, plan, (cases.tokens().to("meta"),), world).program)
    update = update_program(model, plan, world).program
    group = {"dp": str(dist.group.WORLD.group_name)}
    with fake_h200.generating_only(folder):
        forward = compile_inductor(parts.forward, group)
        adopt_strides(parts.backward, forward)
        backward = compile_inductor(parts.backward, group, is_backward=True)
        chunks = compile_chunks(update, lambda part: compile_chunk(part, group)).executables
    found = []
    for executable in (forward, backward, *chunks):
        program = executable.program
        calls = re.findall(r"torch\.ops\.zgraph\.(fetch|offload|store|moved_)\.default\(", executable.source)
        wanted = [str(n.target).split(".")[1] for n in program.nodes if transfers_to_host.is_host_transfer(n)]
        ends = {
            n.target: {str(n.args[0].meta["val"].device), str(n.meta["val"].device)}
            for n in program.nodes
            if n.target in (transfers_to_host.FETCH, transfers_to_host.OFFLOAD)
        }
        found.append({
            "name": program.name, "calls": calls, "wanted": [w.replace("moved", "moved_") for w in wanted],
            "devices": sorted({d for pair in ends.values() for d in pair}),
            "compiled": fake_h200.compile_kernels(executable.source, program.name),
        })  # fmt: skip
    return found


def lower_update(precision: str, folder: Path) -> list[dict[str, object]]:
    """Each chunk of an update with clipping and an average, of 20 matrices and 3 vectors."""
    with torch.device("meta"):
        model = torch.nn.Module()
        model.matrices = torch.nn.ParameterList(torch.empty(64, 48) for _ in range(20))
        model.vectors = torch.nn.ParameterList(torch.empty(64) for _ in range(3))
    plan = zgraph.Plan(optimizer=zgraph.AdamW(), grad_clip=1.0, ema=0.9, precision=precision)
    program = update_program(model, plan, 1).program
    with fake_h200.generating_only(folder):
        made = compile_chunks(program, lambda part: compile_chunk(part, {}))
    compiled = {id(e.function): fake_h200.compile_kernels(e.source, e.program.name) for e in made.executables}
    return [
        {
            "params": sorted({p for n in c.executable.program.nodes if (p := info(n).param) and n.op != "placeholder"}),
            "kernels": [(k.name, k.operators, k.calls) for k in c.executable.kernels],
            "compiled": compiled.get(id(c.executable.function), []),
        }
        for c in made.chunks
    ]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    found = {name: lower(name, target) for name in cases.CASES}
    found |= {f"update, {precision}": lower_update(precision, target) for precision in ("fp32", "fp16")}
    for on in ("host", "device"):
        found |= {f"offload, {world}, {on}": lower_offload(world, on, target) for world in (1, 2)}
    (target / "lowered.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # the stand-in for the device has nothing to tear down
