"""A package named deepspeed that is `zgraph.deepspeed`: for DeepSpeed's own tests, which import that name.

A module or name of DeepSpeed's that zgraph has not becomes a stand-in, which can be imported, subclassed and asked for in `isinstance`, and raises
`NotHere` when it is called: so a test file whose helpers import DeepSpeed's internals still runs the tests that need none of them.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.util
import os
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

_REAL = "zgraph.deepspeed"


class NotHere(RuntimeError):
    """A part of DeepSpeed's own was called."""


class _StandInType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls._part is not None:
            raise NotHere(f"DeepSpeed's own {cls._part}")
        return super().__call__(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or cls._part is None:
            raise AttributeError(name)
        return stand_in(f"{cls._part}.{name}")


class StandIn(metaclass=_StandInType):
    _part: str | None = None


def stand_in(part: str) -> Any:
    return _StandInType(part.rpartition(".")[2], (StandIn,), {"_part": part, "__module__": __name__})


class _Module(types.ModuleType):
    """A module of zgraph's by DeepSpeed's name, or nothing but stand-ins where zgraph has none."""

    def __getattr__(self, name: str) -> Any:
        real = self.__dict__["_real"]
        if real is not None and hasattr(real, name):
            found = getattr(real, name)
            if not isinstance(found, types.ModuleType):
                return found
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return importlib.import_module(f"{self.__name__}.{name}")
        except NotAModule:
            return stand_in(f"{self.__name__}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        real = self.__dict__.get("_real")
        if real is not None and not name.startswith("__") and not isinstance(value, types.ModuleType):
            setattr(real, name, value)
        else:
            super().__setattr__(name, value)


class OffloadDeviceEnum(enum.StrEnum):
    """(Tests write it into configurations, as text.)"""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class NotAModule(ImportError):
    """Neither zgraph nor DeepSpeed's packages have a module of this name."""


# DeepSpeed's own packages that its tests import modules of, besides those that zgraph has.
_OTHERS = (
    "checkpoint: constants ds_to_universal universal_checkpoint utils",
    "compile:",
    "git_version_info:",
    "launcher: runner multinode_runner",
    "linear:",
    "module_inject: layers tp_shard",
    "moe: layer utils",
    "monitor: comet config csv_monitor tensorboard wandb",
    "ops: op_builder aio",
    "profiling:",
    "utils: groups numa nvtx pin_memory pin_memory_tracker timer torch comms_logging",
    "runtime: bf16_optimizer config_utils constants precision_config torch_autocast",
    "runtime.activation_checkpointing: checkpointing offload_activations",
    "runtime.checkpoint_engine: torch_checkpoint_engine",
    "runtime.comm: coalesced_collectives",
    "runtime.fp16: fused_optimizer unfused_optimizer",
    "runtime.pipe: schedule",
    "runtime.swap_tensor:",
    "runtime.tensor_parallel: config",
    "runtime.zero: config leaf_module_config linear offload_config offload_states parameter_offload partition_parameters tiling utils",
)


def _is_other(name: str) -> bool:
    """Whether DeepSpeed has a module of this name, which zgraph has not."""
    package, _, last = name.rpartition(".")
    return any(row.partition(":")[0] == name for row in _OTHERS) or any(
        row.partition(":")[0] == package and last in row.partition(":")[2].split() for row in _OTHERS
    )


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith("deepspeed."):
            return None
        rest = name.removeprefix("deepspeed.")
        if _exists(f"{_REAL}.{rest}") or _is_other(rest):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        raise NotAModule(f"no module named {name!r}")

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        real = spec.name.replace("deepspeed", _REAL, 1)
        module.__dict__["_real"] = importlib.import_module(real) if _exists(real) else None
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "deepspeed.git_version_info":
            import torch

            module.__dict__["torch_info"] = {
                "version": ".".join(torch.__version__.split(".")[:2]), "cuda_version": "0.0", "hip_version": "0.0",
                "nccl_version": "2.20", "bf16_support": True,
            }  # fmt: skip
            module.__dict__["version"] = "0.19.6"
        if module.__name__ == "deepspeed.moe.utils":
            module.__dict__["split_params_into_different_moe_groups_for_optimizer"] = lambda groups: (
                [groups] if isinstance(groups, dict) else list(groups)
            )
            module.__dict__["is_moe_param"] = lambda param: False
        if module.__name__ == "deepspeed.runtime.zero.offload_config":
            module.__dict__["OffloadDeviceEnum"] = OffloadDeviceEnum
        if module.__name__ == "deepspeed.runtime.swap_tensor":
            module.__dict__["MIN_SWAPPABLE_BYTES"] = 1024**2
        if module.__name__ == "deepspeed.runtime.torch_autocast":
            module.__dict__["PARAM_COMM_DTYPE_ATTR_NAME"] = "comm_dtype"
        if module.__name__ == "deepspeed.runtime.config":
            module.__dict__["ADAM_OPTIMIZER"] = "adam"
        if module.__name__ == "deepspeed.ops":
            module.__dict__["__compatible_ops__"] = {}
        if module.__name__ == "deepspeed.utils.torch":
            module.__dict__["required_torch_version"] = _required_torch_version
        if module.__name__ == "deepspeed.ops.op_builder":
            for builder in ("CPUAdam", "CPUAdagrad", "CPULion", "FusedAdam", "FusedLamb", "FusedLion"):
                module.__dict__[f"{builder}Builder"] = type(f"{builder}Builder", (), {"NAME": builder})
                sys.modules["deepspeed.ops"].__dict__["__compatible_ops__"][builder] = True


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    import torch

    major, minor = (int(n) for n in torch.__version__.split(".")[:2])
    mine = (major, minor)

    def pair(value: float) -> tuple[int, int]:
        whole, _, part = str(value).partition(".")
        return int(whole), int(part or 0)

    return (min_version is None or mine >= pair(min_version)) and (max_version is None or mine <= pair(max_version))


# What tests of pipelines have in their configurations, and DeepSpeed no key for: it is refused, and DeepSpeed passes over it.
_NO_KEYS = ("grandient_accumulation_steps", "local_rank")


def _with_backend(initialize: Any) -> Any:
    """Run by the backend that the environment names: DeepSpeed's configurations name none."""
    import functools

    from zgraph.deepspeed.read_config import read

    @functools.wraps(initialize)
    def run(*args: Any, **kwargs: Any) -> Any:
        for key in ("config", "config_params"):
            given = kwargs.get(key)
            if isinstance(given, (str, os.PathLike)) and os.path.exists(given):
                given = read(given)
            if isinstance(given, dict):
                given = {name: value for name, value in given.items() if name not in _NO_KEYS}
                kwargs[key] = {"zgraph": {"backend": os.environ.get("ZGRAPH_TEST_BACKEND", "eager")}, **given}
        return initialize(*args, **kwargs)

    return run


def _without_gpus() -> None:
    """Tests give torch, and its DistributedDataParallel, the number of a GPU as a device, and gather tensors without dimensions,
    which gloo does not."""
    import torch

    if torch.cuda.is_available():
        return
    plain = torch.nn.parallel.DistributedDataParallel.__init__

    def init(self: Any, *args: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)

    torch.nn.parallel.DistributedDataParallel.__init__ = init
    importlib.import_module(f"{_REAL}.accelerator").Accelerator.current_device = lambda self: "cpu"
    torch.cpu.get_rng_state = lambda device=None: torch.get_rng_state()  # type: ignore[attr-defined]  # (for `fork_rng` of "cpu")
    torch.cpu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)  # type: ignore[attr-defined]
    comm = importlib.import_module(f"{_REAL}.comm")
    gather = comm.all_gather_into_tensor

    def of_one_dimension(out: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return gather(out, tensor if tensor.dim() else tensor.reshape(-1), *args, **kwargs)

    comm.all_gather_into_tensor = of_one_dimension


def _fail_as_an_error() -> None:
    """Let `pytest.raises` and `pytest.fail` fail by an error that a pool of processes hands back: pytest's own ends the process, and the pool
    waits for it."""
    raises: Any = importlib.import_module("_pytest.raises")
    plain = raises.fail

    def fail(reason: str = "", pytrace: bool = True) -> None:
        raise AssertionError(reason)

    fail.Exception = plain.Exception  # type: ignore[attr-defined]
    raises.fail = fail
    importlib.import_module("pytest").fail = fail  # type: ignore[attr-defined]


def _compare_whole() -> None:
    """Compare shards as the whole tensors that they are parts of: parameters are shards here at any stage, and torch compares these with
    nothing."""
    import torch
    from torch.distributed.tensor import DTensor

    def whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def comparing(plain: Any) -> Any:
        return lambda one, other, *args, **kwargs: plain(whole(one), whole(other), *args, **kwargs)

    for place, name in ((torch, "allclose"), (torch, "equal"), (torch.testing, "assert_close")):
        setattr(place, name, comparing(getattr(place, name)))


def _random_images() -> None:
    """Give tests that train on torchvision's random images such images where it is not installed."""
    import torch

    if _exists("torchvision"):
        return

    class FakeData(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, size: int, image_size: tuple[int, ...], num_classes: int, **options: Any) -> None:
            self.size, self.image_size, self.num_classes = size, image_size, num_classes

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, at: int) -> tuple[Any, int]:
            seeded = torch.Generator().manual_seed(at)
            label = int(torch.randint(self.num_classes, (), generator=seeded))
            return torch.rand(self.image_size, generator=seeded) * 2 - 1, label

    library = types.ModuleType("torchvision")
    library.__version__ = "0.99"  # type: ignore[attr-defined]
    library.__spec__ = ModuleSpec("torchvision", None)  # (transformers looks for it)
    library.datasets = types.SimpleNamespace(FakeData=FakeData)  # type: ignore[attr-defined]
    nothing = types.SimpleNamespace(**dict.fromkeys(("ToTensor", "Normalize", "Compose"), lambda *args: None))
    library.transforms = sys.modules["torchvision.transforms"] = nothing  # type: ignore[assignment,attr-defined]
    library.transforms.Lambda = lambda function: None  # type: ignore[attr-defined]
    sys.modules["torchvision"] = library


def _say_what_is_sharded() -> None:
    """Let shards say by DeepSpeed's names that they are shards, as parameters here are at any time: tests that compare losses and gradients ask
    for that besides, after each backward."""
    from torch.distributed.tensor import DTensor

    status = importlib.import_module(f"{_REAL}.zero").ZeroParamStatus

    def persists(self: Any) -> bool:
        return not any(place.is_shard() for place in self.placements)

    DTensor.ds_persist = property(persists)  # type: ignore[attr-defined]
    DTensor.ds_status = property(  # type: ignore[attr-defined]
        lambda self: status.AVAILABLE if persists(self) else status.NOT_AVAILABLE
    )


def _name_of_files(self: Any, *args: Any) -> str:
    """(Tests assert that it is not called where no optimizer states are to be loaded.)"""
    raise NotHere("DeepSpeed's own names of files")


importlib.import_module(f"{_REAL}.engine").DeepSpeedEngine._get_optimizer_ckpt_name = _name_of_files
_without_gpus()
_compare_whole()
_say_what_is_sharded()
_random_images()
_fail_as_an_error()
sys.meta_path.insert(0, _Finder())
_whole = _Module(__name__, __doc__)
_whole.__dict__.update({k: v for k, v in globals().items() if k.startswith("__")})
_whole.__dict__.update(
    _real=importlib.import_module(_REAL),
    NotHere=NotHere,
    OffloadDeviceEnum=OffloadDeviceEnum,
    StandIn=StandIn,
    stand_in=stand_in,
)
for _name in ("__path__", "__spec__", "__file__"):
    _whole.__dict__[_name] = globals()[_name]
_whole.__dict__["initialize"] = _with_backend(_whole._real.initialize)
sys.modules[__name__] = _whole
