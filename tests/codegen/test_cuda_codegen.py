"""CUDA code without a GPU: the programs that run on CPU are lowered for an H200, their Triton kernels are compiled for
sm_90, and small ones run in Triton's interpreter. Needs a CPU build of torch (see `cuda/fake_h200.py`)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[1] / "cuda"
sys.path.insert(0, str(HERE))
import cases  # noqa: E402
import fake_h200  # noqa: E402

sys.path.remove(str(HERE))
REASON = fake_h200.why_not()

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

ONE_RANK = [name for name, (_, _, _, world) in cases.CASES.items() if world == 1]


def script(name: str, *args: str) -> None:
    done = subprocess.run([sys.executable, str(HERE / name), *args], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("h200")


@pytest.fixture(scope="module")
def lowered(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Each case's forward and backward: their code, and what became of its kernels."""
    script("lower.py", str(folder))
    return json.loads((folder / "lowered.json").read_text())


@pytest.mark.parametrize("case", cases.CASES)
def test_programs_become_triton_kernels_that_compile_for_sm90(
    case: str, lowered: dict[str, list[dict[str, Any]]]
) -> None:
    for part in lowered[case]:
        assert part["devices"] == ["cuda:0"]
        names = {name for name, _, _ in part["kernels"]}
        assert names and all(name.startswith("triton_") for name in names)
        assert names == {made["kernel"] for made in part["compiled"]}, "each kernel has a cubin"
        for made in part["compiled"]:
            assert made["target"].startswith(".target sm_90") and made["cubin"] > 0
            print(
                f"{part['name']} {made['kernel']}: {made.get('reg', '?')} registers, {made.get('local', '?')} B local memory"
            )


def test_collectives_of_cuda_code_are_in_the_programs_order(lowered: dict[str, list[dict[str, Any]]]) -> None:
    kinds = ("gather_", "scatter_")  # (the forward starts all the backward's gathers)
    for part, kind in zip(lowered["bfloat16, ZeRO-3 on 8 ranks"], kinds, strict=True):
        assert part["communication"] == part["expected"]
        assert any(name.startswith(kind) for name in part["expected"])


def code_of(part: dict[str, Any]) -> list[str]:
    """The generated function's lines, without checks and what is only said."""
    lines = part["source"].splitlines()
    begin = next(i for i, line in enumerate(lines) if re.match(r"\s*def call\(", line))
    code = [line.strip() for line in lines[begin + 1 :]]
    return [line for line in code if not line.startswith(("#", "assert_"))]


def test_a_bucket_is_one_collective_of_cuda_code(lowered: dict[str, list[dict[str, Any]]]) -> None:
    forward, backward = ("\n".join(code_of(part)) for part in lowered["bfloat16, ZeRO-3 on 8 ranks"])
    for code, kind, buckets, least in (
        (forward + backward, "all_gather_into_tensor", 4, 6),  # of two layers, and again for the backward
        (backward, "reduce_scatter_tensor", 2, 8),
    ):
        found = re.findall(rf"= torch\.ops\._c10d_functional\.{kind}_coalesced\.default\(\[(.*)\], ", code)
        assert len(found) == buckets
        assert all(len(re.findall(r"layers_\d\w+|buf\d+", members)) >= least for members in found)


def test_nothing_touches_what_a_transfer_of_cuda_code_reads_or_writes_before_its_wait(
    lowered: dict[str, list[dict[str, Any]]],
) -> None:
    """On CUDA a wait is all that holds the computing stream back: a read, or another use of the memory, would be a race."""
    checked = 0
    for part in lowered["bfloat16, ZeRO-3 on 8 ranks"]:
        code = code_of(part)
        waits = {m[1]: i for i, line in enumerate(code) if (m := re.search(r"wait_tensor\.default\((\w+)\)", line))}
        for result, at in waits.items():
            for line in code[:at]:
                if re.search(rf"\b{result}\b", line):
                    takes = rf"^{result} = (\w+\[\d+\]|torch\.ops\._c10d_functional\.\w+\.default\(.*\))$"
                    assert re.match(rf"{takes}|^[\w, ]+ = args$", line), line
                    checked += 1
        for i, line in enumerate(code):
            started = re.match(r"(buf\d+) = torch\.ops\._c10d_functional\.(?!wait)\w+\.default\((.*)\)$", line)
            if started is None:
                continue
            results = [started[1], *re.findall(rf"(buf\d+) = {started[1]}\[\d+\]", "\n".join(code))]
            first = min((waits[r] for r in results if r in waits), default=len(code))
            for operand in re.findall(r"\bbuf\d+\b", started[2]):
                between = [other for other in code[i + 1 : first] if re.search(rf"\b{operand}\b", other)]
                assert not [b for b in between if "# reuse" in b or ".run(" in b or "out=" in b], between
                checked += 1
    assert checked > 40


def test_cuda_code_fuses_norms_activations_residuals_and_casts(
    lowered: dict[str, list[dict[str, Any]]],
) -> None:
    forward, backward = (
        [set(operators) for _, operators, _ in part["kernels"]] for part in lowered["bfloat16, ZeRO-3 on 8 ranks"]
    )
    assert any({"add", "native_layer_norm", "_to_copy"} <= k for k in forward), (
        "residual, norm and the next product's cast"
    )
    assert any({"embedding", "rsqrt", "_to_copy"} <= k for k in forward), "RMS norm"
    assert any({"silu", "mul", "_to_copy"} <= k for k in forward)
    assert any({"silu", "mul", "_to_copy"} <= k for k in backward)
    for part in lowered["bfloat16, ZeRO-3 on 8 ranks"]:
        assert {name for name, _ in part["library"]} <= {
            "extern_kernels.mm",
            "extern_kernels.bmm",
            "extern_kernels.addmm",
        }


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_updates_of_several_parameters_are_one_kernel(
    precision: str, lowered: dict[str, list[dict[str, Any]]]
) -> None:
    """A launch costs as much as a megabyte's update: 16 parameters take at most 5 of them."""
    chunks = lowered[f"update, {precision}"]
    updates = [c for c in chunks if any("addcdiv" in operators for _, operators, _ in c["kernels"])]
    assert sorted(len(c["params"]) for c in updates) == [3, 4, 16]
    for chunk in updates:
        assert sum(calls for _, _, calls in chunk["kernels"]) <= 1 + len(chunk["params"]) // 4
    for chunk in chunks:
        for made in chunk["compiled"]:
            assert made["target"].startswith(".target sm_90") and made["cubin"] > 0


@pytest.fixture(scope="module")
def interpreted(folder: Path, lowered: dict[str, Any]) -> dict[str, dict[str, Any]]:
    script("interpret.py", str(folder), *ONE_RANK)
    return json.loads((folder / "interpreted.json").read_text())


@pytest.mark.parametrize("case", ONE_RANK)
def test_cuda_code_computes_the_models_numbers(case: str, interpreted: dict[str, dict[str, Any]]) -> None:
    """Errors are against float64. In float32: at most 1e-5. In bfloat16: no worse than plain PyTorch in bfloat16, whose
    roundings differ but cost as much (a fused kernel keeps float32 inside)."""
    found = interpreted[case]
    mine = {"loss": found["loss"], **found["gradients"]}
    plain = {"loss": found["loss of plain PyTorch"], **found["gradients of plain PyTorch"]}
    bound = 1e-5 if "float32" in case else 0.0
    for name, error in mine.items():
        assert error <= max(bound, 1.5 * plain[name]), name
    assert len(mine) == 10


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("on", ["host", "device"])
def test_moves_of_cuda_code_are_the_programs_and_reach_the_host(
    world: int, on: str, lowered: dict[str, list[dict[str, Any]]]
) -> None:
    parts = lowered[f"offload, {world}, {on}"]
    for part in parts:
        assert part["calls"] == part["wanted"]
        assert part["devices"] in ([], ["cpu", "cuda:0"])
    step, update = ({kind for part in some for kind in part["calls"]} for some in (parts[:2], parts[2:]))
    assert step == {"fetch", "offload", "moved_"}
    assert update == ({"fetch", "store", "moved_"} if on == "device" else {"fetch", "moved_"})
    assert all(part["compiled"] for part in parts[:2])
    assert any(part["compiled"] for part in parts[2:])
