"""Whatever a program depends on is in the key that it is kept by: one thing changed, and it is made anew."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from sweeps import sweep

import zgraph
from zgraph.cache import conditions
from zgraph.cache.store import Store
from zgraph.torch_compat import inductor_code, torch_settings

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(1))
        self.factor = 2.0

    def forward(self, x):
        x = torch.tanh(self.up(x)) * self.factor
        return (x * self.scale).sum()
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Compiles a model for a call, and says how many steps are kept then."""
    monkeypatch.setenv("ZGRAPH_CACHE", str(tmp_path / "cache"))
    store = Store(tmp_path / "cache" / "programs")

    def run(source=MODEL, change=lambda model: None, x=None, **plan):
        path = tmp_path / "net.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("net", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        model = module.Net()
        change(model)
        plan = {"mesh": {"dp": 1}, "zero": 0, "backend": "eager", **plan}
        zgraph.compile(model, zgraph.Plan(**plan), inputs=(torch.ones(4, 6) if x is None else x,))
        return sum(found.kind == "step" for found in store.entries())

    return run


@pytest.fixture
def fresh():
    """What is looked up once in a process is looked up anew."""
    functions = (conditions._versions, conditions.source, conditions._processor)
    yield
    for function in functions:
        function.cache_clear()


def test_the_same_once_more_is_found(kept):
    assert kept() == 1
    assert kept() == 1


@sweep(
    "change",
    [
        {"source": MODEL.replace("torch.tanh", "torch.sigmoid")},
        {"source": MODEL.replace("x = torch.tanh", "\n        x = torch.tanh")},
        {"change": lambda model: setattr(model, "factor", 3.0)},
        {"change": lambda model: model.scale.resize_(1, 1)},
        {"change": lambda model: model.up.bias.requires_grad_(False)},
        {"change": lambda model: model.double(), "x": torch.ones(4, 6, dtype=torch.double)},
        {"change": lambda model: model.eval()},
        {"x": torch.ones(5, 6)},
        {"x": torch.ones(4, 6, requires_grad=True)},
        {"precision": "bf16"},
        {"mesh": {"replicate": 1, "dp": 1}},
        {"zero": 2},
        {"hardware": "h100-80g"},
    ],
    ids=[
        "a line",
        "where a line is",
        "a number",
        "a buffer's shape",
        "a frozen weight",
        "a dtype",
        "eval",
        "a shape",
        "an input's gradient",
        "precision",
        "mesh",
        "plan",
        "hardware",
    ],
    quick=6,
)
def test_another_model_call_or_plan_is_another_program(kept, change):
    assert kept() == 1
    assert kept(**change) == 2


@sweep("name", ["TORCHINDUCTOR_FREEZING", "OMP_NUM_THREADS", "CXX", "TRITON_PTXAS_PATH"], quick=2)
def test_another_environment_is_another_program(kept, monkeypatch, name):
    assert kept() == 1
    monkeypatch.setenv(name, "17")
    assert kept() == 2


@sweep("what", ["torch", "python", "source", "processor", "threads", "products", "autocast", "config"], quick=4)
def test_another_state_of_the_machine_or_of_torch_is_another_program(kept, monkeypatch, fresh, what):
    assert kept() == 1
    conditions._versions.cache_clear()
    match what:
        case "torch":
            monkeypatch.setattr(torch, "__version__", "2.99.0")
        case "python":
            monkeypatch.setattr(conditions.platform, "python_implementation", lambda: "another")
        case "source":
            monkeypatch.setattr(conditions, "source", lambda: "another")
        case "processor":
            conditions._processor.cache_clear()
            monkeypatch.setattr(conditions, "text_of", lambda path: "flags : none\n")
        case "threads":
            monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
        case "products":
            monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
        case "autocast":
            before = torch.get_autocast_dtype("cpu")
            torch.set_autocast_dtype("cpu", torch.float16)
            try:
                assert kept() == 2
            finally:
                torch.set_autocast_dtype("cpu", before)
            return
        case "config":
            with torch._inductor.config.patch({"max_fusion_size": 7}):
                assert kept() == 2
            return
    assert kept() == 2


def test_a_setting_that_is_code_of_somebodys_own_keeps_nothing(kept, caplog):
    from torch._inductor.lowering import lowerings

    caplog.set_level("INFO", "zgraph")
    with torch._inductor.config.patch({"post_grad_custom_post_pass": lambda graph: None}):
        assert kept() == 0
    target = torch.ops.aten.tanh.default
    before = lowerings[target]
    lowerings[target] = lambda x: before(x)
    try:
        assert kept() == 0
    finally:
        lowerings[target] = before
    assert caplog.text.count("not kept for later processes") == 2
    assert kept() == 1


def test_every_variable_that_inductor_reads_is_known():
    root = Path(torch.__file__).parent
    files = [*(root / "_inductor").rglob("*.py"), *(root / "_functorch").rglob("*.py"), root / "_dynamo/config.py"]
    read = re.compile(r"(?:environ(?:\.get)?|getenv)[\(\[]\s*\"(\w+)\"|env_name_(?:default|force)=\[?\"(\w+)\"")
    found = {a or b for file in files for a, b in read.findall(file.read_text())}
    assert len(found) > 100
    theirs = {"CUDA_HOME", "HOME", "PATH", "USERNAME", "TMPDIR", *conditions.IGNORED}
    left = (n for n in found if not conditions.is_read(n) and n not in theirs)
    assert sorted(n for n in left if not n.startswith(conditions.IGNORED_PREFIXES)) == []


def test_what_torchrun_sets_for_its_ranks_changes_no_program(kept, monkeypatch):
    assert kept() == 1
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "17")
    assert kept() == 1


def test_zgraphs_own_lowering_is_no_stranger():
    """(That of gathers over gloo, which Inductor knows once something was compiled.)"""
    inductor_code.lower_gathers()
    torch_settings.refuse_own_tables()


ATTENTION = MODEL.replace(
    "x = torch.tanh(self.up(x)) * self.factor",
    "x = self.up(x).view(1, 2, -1, 3)\n        x = nn.functional.scaled_dot_product_attention(x, x, x)",
)
REACH = 1


def near(batch, head, query, key):
    return (query - key).abs() <= REACH


def test_a_mask_function_that_is_another_one_now(kept, monkeypatch):
    attention = {"*": f"{__name__}:near"}
    assert kept(ATTENTION, attention=attention) == kept(ATTENTION, attention=attention) == 1
    monkeypatch.setattr(sys.modules[__name__], "REACH", 2)
    assert kept(ATTENTION, attention=attention) == 2


def never(node) -> bool:
    return False


def test_what_a_policy_of_ones_own_decides_is_not_kept(kept):
    assert kept(recompute=f"{__name__}:never") == 0
