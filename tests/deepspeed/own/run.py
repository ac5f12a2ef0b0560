"""Run DeepSpeed's own unit tests through `import zgraph.deepspeed as deepspeed`.

    python tests/deepspeed/own/run.py ~/DeepSpeed runtime/test_lr_schedulers.py v1/zero/test_zero_user_backward.py
    python tests/deepspeed/own/run.py ~/DeepSpeed                 # those of FILES
    python tests/deepspeed/own/run.py ~/DeepSpeed --system deepspeed  # the same by DeepSpeed itself, where it is installed

`~/DeepSpeed` is a checkout, or a folder with its `tests`. Nothing of it is changed: its tests are copied to a temporary folder,
beside a package named deepspeed which is zgraph's (import_path/). Each file runs in a process of its own; a test that hangs is
noted, and the file goes on after it. The table that is printed, and the JSON lines in `--results`, say of each test: passed,
skipped (by the test itself), not here (it calls a part of DeepSpeed's own that zgraph has not), failed, hung.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent

# The files that are about what `zgraph.deepspeed` has; the others test kernels, inference, compression, experts and DeepSpeed's own internals.
FILES = """
checkpoint/test_latest_checkpoint.py checkpoint/test_lr_scheduler.py checkpoint/test_other_optimizer.py checkpoint/test_pipeline.py
checkpoint/test_shared_weights.py checkpoint/test_tag_validation.py checkpoint/test_zero_optimizer.py checkpoint/test_convert_checkpoint.py
comm/test_comms_logger.py comm/test_dist.py launcher/test_ds_arguments.py launcher/test_run.py monitor/test_monitor.py pipe/test_pipe_module.py
profiling/flops_profiler/test_flops_profiler.py runtime/activation_checkpointing/test_activation_checkpointing.py
runtime/activation_checkpointing/test_activation_checkpointing_non_reentrant.py runtime/half_precision/test_dynamic_loss_scale.py
runtime/half_precision/test_fp16.py runtime/half_precision/test_zero_optim_overflow.py runtime/pipe/test_pipe.py
runtime/pipe/test_pipe_schedule.py runtime/pipe/test_topology.py runtime/test_data.py runtime/test_ds_config_dict.py
runtime/test_ds_config_model.py runtime/test_ds_initialize.py runtime/test_lr_schedulers.py runtime/test_multi_output_model.py
runtime/test_multiple_models.py runtime/test_no_sync_ctxt.py runtime/test_precision_config_dynamic_scale.py
runtime/test_precision_config_loss_scale.py runtime/test_runtime_utils.py runtime/utils/test_partition.py
runtime/zero/test_ignore_unused_parameters.py runtime/zero/test_unwrap_model.py runtime/zero/test_zero_config.py
runtime/zero/test_zero_context.py runtime/zero/test_zero_context_ancestry.py runtime/zero/test_zero_context_return.py
runtime/zero/test_zero_dynamic_class.py runtime/zero/test_zero_grad_clip.py runtime/zero/test_zero_late_module_attach.py
runtime/zero/test_zero_leaf_module.py runtime/zero/test_zero_nesting_init.py runtime/zero/test_zero_tensor_fragment.py
utils/test_init_on_device.py utils/test_partition_balanced.py v1/half_precision/test_bf16.py
v1/half_precision/test_gradient_clipping_default.py v1/half_precision/test_mixed_precision_dtype.py v1/test_engine_log_level.py
v1/zero/test_zero.py v1/zero/test_zero2_offload_multi_backward.py v1/zero/test_zero_activation_checkpoint_lifecycle.py
v1/zero/test_zero_coalesce_grad_reduction.py v1/zero/test_zero_cpu_offload_grad_accum.py v1/zero/test_zero_torch_func.py
v1/zero/test_zero_user_backward.py
""".split()  # noqa: SIM905


def main() -> int:
    args = _arguments()
    results = args.results.absolute()
    results.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="deepspeed-tests-") as folder:
        place = Path(folder)
        shutil.copytree(args.checkout / "tests", place / "tests")
        if args.system == "zgraph":
            shutil.copytree(HERE / "import_path" / "deepspeed", place / "deepspeed")
        for name in args.files or FILES:
            began = time.monotonic()
            outcomes = _run(place, name, args, results)
            counts = Counter(outcomes.values())
            print(f"{name:75} {time.monotonic() - began:6.0f} s  {_shown(counts)}", flush=True)
    everything = Counter(latest(results).values())
    print(f"in all: {_shown(everything)}")
    return int(bool(everything["failed"] + everything["hung"]))


def latest(results: Path) -> dict[str, str]:
    """The outcome of each test in a file of results. (One that has begun and not ended took its process with it.)"""
    found: dict[str, str] = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        row = json.loads(line)
        if row["outcome"] != "passed" or found.get(row["test"]) in (None, "begun"):
            found[row["test"]] = row["outcome"]
    return {test: "hung" if outcome == "begun" else outcome for test, outcome in found.items()}


def _run(place: Path, name: str, args: argparse.Namespace, results: Path) -> dict[str, str]:
    """Run one file, again after each test that hangs."""
    mine = f"unit/{name}"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(place), str(place / "tests"), str(HERE)]),
        "DEEPSPEED_TEST_RESULTS": str(results),
        "DS_UNITTEST_TIMEOUT": str(2 * args.timeout),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "4",
        "ZGRAPH_TEST_BACKEND": args.backend,
    }
    done: dict[str, str] = {}
    for _ in range(20):
        words = [sys.executable, "-m", "pytest", "-q", "-p", "recorder", "-p", "no:cacheprovider", "--tb=short", mine]
        words += ["-k", args.k] if args.k else []
        words += [word for test in done for word in ("--deselect", test)]
        with args.log.open("a") as log:
            code = _watched(words, place / "tests", environment, log, results, args.timeout)
        now = {test: outcome for test, outcome in latest(results).items() if test.startswith(mine)}
        ended = code in (0, 1, 5) and "hung" not in {o for t, o in now.items() if t not in done}
        if ended or len(now) == len(done):
            return now
        done = now
    return done


def _watched(
    words: list[str], place: Path, environment: dict[str, str], log: IO[str], results: Path, limit: float
) -> int:
    """Run pytest, and end it with all that it has started once nothing was noted for so many seconds. (Its own limit waits for ranks that hang.)"""
    session = subprocess.Popen(
        words, cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    began = time.time()
    while True:
        try:
            return session.wait(1)
        except subprocess.TimeoutExpired:
            noted = results.stat().st_mtime if results.exists() else 0.0
        if time.time() - max(noted, began) > limit:
            os.killpg(session.pid, signal.SIGKILL)
            session.wait()
            return -1


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of DeepSpeed, or a folder with its tests")
    parser.add_argument("files", nargs="*", help="test files under tests/unit; those of FILES by default")
    parser.add_argument("--system", choices=("zgraph", "deepspeed"), default="zgraph")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--timeout", type=int, default=240, help="seconds that one test may take")
    parser.add_argument(
        "--results", type=Path, default=Path("deepspeed_tests.jsonl"), help="where outcomes are written"
    )
    parser.add_argument(
        "--log", type=Path, default=Path("deepspeed_tests.log"), help="where pytest's output is written"
    )
    parser.add_argument("-k", default="", help="pytest's expression: only some tests")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
