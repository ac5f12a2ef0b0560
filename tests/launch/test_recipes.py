"""The recipes of examples/launch, without the systems that they are for: each node's torchrun gets what it has to, and the ranks of Ray train.

The systems' parts are played by what their documents say that these do: variables, commands, fields of their files.
"""

import contextlib
import functools
import importlib.util
import io
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import parse_args

import zgraph

RECIPES = Path(__file__).parents[2] / "examples" / "launch"


@pytest.fixture
def seen_by_torchrun(monkeypatch):
    """What torchrun takes from a command line and the variables PET_… of its process."""

    def seen(words, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert words[0] == "torchrun"
        parsed = parse_args(words[1:])
        return {
            "nodes": parsed.nnodes,
            "node": int(parsed.node_rank),
            "ranks": parsed.nproc_per_node,
            "address": f"{parsed.master_addr}:{parsed.master_port}",
            "script": Path(parsed.training_script).name,
        }

    return seen


def four_nodes(address):
    return [{"nodes": "4", "node": node, "ranks": "8", "address": address, "script": "train.py"} for node in range(4)]


@pytest.fixture
def shell(tmp_path):
    """Runs lines of a shell's, in which `torchrun` writes down its arguments: those of each call."""
    (tmp_path / "torchrun").write_text(
        '#!/bin/bash\nfor word in "$@"; do printf "%q " "$word"; done >> called\necho >> called\n'
    )

    def run(lines, programs=None, **variables):
        for name, text in (programs or {}).items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        for program in tmp_path.iterdir():
            program.chmod(0o755)
        (tmp_path / "called").unlink(missing_ok=True)
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        subprocess.run(["bash", "-c", lines], env=environ, cwd=tmp_path, check=True, timeout=60)
        return [["torchrun", *shlex.split(line)] for line in (tmp_path / "called").read_text().splitlines()]

    return run


def test_slurm_starts_a_torchrun_on_each_node(shell, seen_by_torchrun):
    text = (RECIPES / "slurm.sbatch").read_text()
    options = dict(line.split()[1:] for line in text.splitlines() if line.startswith("#SBATCH"))
    assert options == {
        "--job-name": "zgraph",
        "--ntasks-per-node": "1",
        "--gpus-per-node": "8",
        "--cpus-per-task": "64",
    }
    srun = """[[ "$1 $2 $3" == "--cpus-per-task 64 --kill-on-bad-exit=1" ]] || exit 9
shift 3; for node in 0 1 2 3; do SLURM_NODEID=$node "$@" || exit; done"""
    scontrol = '[[ "$*" == "show hostnames gpu[07-10]" ]] && printf "gpu%s\\n" 07 08 09 10'
    variables = {
        "SLURM_JOB_NODELIST": "gpu[07-10]",
        "SLURM_NNODES": "4",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_JOB_ID": "1234567",
    }
    calls = shell(text, {"srun": srun, "scontrol": scontrol}, **variables)
    assert [seen_by_torchrun(words, {}) for words in calls] == four_nodes("gpu07:29567")


def test_skypilot_starts_a_torchrun_on_each_node(shell, seen_by_torchrun):
    recipe = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    assert recipe.keys() == {"name", "num_nodes", "resources", "workdir", "setup", "run"} and recipe["num_nodes"] == 4
    _, _, gpus = recipe["resources"]["accelerators"].partition(":")
    found = []
    for node in range(4):
        variables = {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NUM_GPUS_PER_NODE": gpus}
        (words,) = shell(recipe["run"], SKYPILOT_NODE_IPS="10.0.0.4\n10.0.0.5\n10.0.0.6\n10.0.0.7", **variables)
        found.append(seen_by_torchrun(words, {}))
    assert found == four_nodes("10.0.0.4:29500")


def test_kubeflow_starts_a_torchrun_in_each_pod(seen_by_torchrun):
    """(Kubeflow Trainer's torch plugin sets these variables, by the completion index of each pod.)"""
    recipe = yaml.safe_load((RECIPES / "kubeflow.yaml").read_text())
    assert (recipe["apiVersion"], recipe["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert recipe["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    name, trainer = recipe["metadata"]["name"], recipe["spec"]["trainer"]
    assert trainer.keys() == {"image", "numNodes", "numProcPerNode", "command", "resourcesPerNode"}
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": trainer["numProcPerNode"]}}
    address = f"{name}-node-0-0.{name}"
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": "29500",
    }
    pods = [variables | {"PET_NODE_RANK": str(node)} for node in range(trainer["numNodes"])]
    assert [seen_by_torchrun(trainer["command"], pod) for pod in pods] == four_nodes(f"{address}:29500")


def test_the_training_operator_starts_a_torchrun_in_each_pod(seen_by_torchrun):
    """(It tells pods of an address and of their ranks only where there is a master, whose rank is 0.)"""
    recipe = yaml.safe_load((RECIPES / "pytorchjob.yaml").read_text())
    assert (recipe["apiVersion"], recipe["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec, name = recipe["spec"], recipe["metadata"]["name"]
    replicas = {kind: entry["replicas"] for kind, entry in spec["pytorchReplicaSpecs"].items()}
    assert replicas.keys() == {"Master", "Worker"} and replicas["Master"] == 1 and isinstance(spec["nprocPerNode"], str)
    found = []
    for node in range(sum(replicas.values())):
        template = spec["pytorchReplicaSpecs"]["Worker" if node else "Master"]["template"]["spec"]
        (container,) = template["containers"]
        assert container["name"] == "pytorch" and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert [mount["name"] for mount in container["volumeMounts"]] == [v["name"] for v in template["volumes"]]
        variables = {
            "PET_NNODES": str(sum(replicas.values())),
            "PET_NPROC_PER_NODE": spec["nprocPerNode"],
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": f"{name}-master-0",
            "PET_MASTER_PORT": "23456",
        }
        found.append(seen_by_torchrun(container["command"], variables))
    assert found == four_nodes(f"{name}-master-0:23456")


def trained_by_ray():
    """The recipe's own function on this rank, in the process group that Ray has made, and what it printed."""
    ray, train, of_torch = (types.ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch"))
    train.ScalingConfig = of_torch.TorchTrainer = object
    of_torch.get_device = lambda: torch.device("cpu")
    stubs = {"ray": ray, "ray.train": train, "ray.train.torch": of_torch}
    sys.modules.update(stubs)
    try:
        spec = importlib.util.spec_from_file_location("ray_train", RECIPES / "ray_train.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        printed = io.StringIO()
        module.zgraph = types.SimpleNamespace(
            compile=zgraph.compile, AdamW=zgraph.AdamW, Plan=functools.partial(zgraph.Plan, backend="eager")
        )
        with contextlib.redirect_stdout(printed):
            module.train()
    finally:
        for name in stubs:
            del sys.modules[name]
    return printed.getvalue()


@pytest.mark.slow
def test_rays_workers_train(two):
    first, other = two.run(trained_by_ray)
    losses = [float(line.split()[-1]) for line in first.splitlines()]
    assert len(losses) == 10 and len(set(losses)) > 5 and all(0 < loss < 2 for loss in losses) and not other
