"""What looking inside a large model costs: dump of a 48-layer Llama at world 512, a bundle of it, the difference of two of its passes, its page.

    python benchmarks/inspection.py [--layers 48] [--world 512] [--out FOLDER]

Each command runs in a process of its own, as a user runs it; seconds are the wall clock's, memory is the process's most (its resident set). One
thread. First paint is Chromium's own figure (headless; left out where there is none).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine

RESULTS = Path(__file__).parent / "results"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
PLAN = 'precision = "bf16"\n[mesh]\ndp = -1\n[optimizer]\nname = "AdamW"\nlr = 1e-3\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--world", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = measure(Path(folder), args.layers, args.world)
    (args.out / "inspection.md").write_text(text)
    print(text)


def measure(folder: Path, layers: int, world: int) -> str:
    (folder / "llama").mkdir()
    (folder / "llama/config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
    (folder / "plan.toml").write_text(PLAN)
    model = [f"hf:{folder / 'llama'}", "--plan", str(folder / "plan.toml"), "--world", str(world)]
    bundle, page = str(folder / "bundle"), str(folder / "report.html")
    rows = [
        ("dump of the model", 90.0, command("dump", *model, "-o", str(folder / "dump.txt"))),
        ("bundle of the model", None, command("dump", *model, "--format", "bundle", "-o", bundle)),
        ("diff of two passes of the bundle", 5.0, command("diff", bundle, "--from", "regather", "--to", "overlap")),
        (
            "explain of a parameter, of the bundle",
            None,
            command("explain", bundle, "model.layers.7.mlp.up_proj.weight"),
        ),
        ("memory of the bundle", None, command("memory", bundle)),
        ("report of the bundle", None, command("report", bundle, "-o", page)),
        ("--help", 0.3, command("--help")),
    ]
    nodes = (folder / "dump.txt").read_text().splitlines()[0]
    lines = [
        "# Looking inside a large model",
        "",
        "`python benchmarks/inspection.py`",
        "",
        f"{nodes.removeprefix('# ')}",
        "",
    ]
    lines += ["| command | seconds | at most | GiB at most |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name} | {t:.2f} | {'' if goal is None else goal} | {size / 2**30:.2f} |" for name, goal, (t, size) in rows
    ]
    size = Path(page).stat().st_size
    lines += [
        "",
        f"The page has {size / 1e6:.1f} MB; {painted(Path(page), folder)}",
        "",
        f"Conditions: {machine.conditions()}, one thread.",
        "",
    ]
    return "\n".join(lines)


def command(*words: str) -> tuple[float, int]:
    """(seconds, bytes of its resident set at most) of `zgraph …`."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "zgraph", *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"zgraph {' '.join(words)} failed")
    return time.perf_counter() - start, used.ru_maxrss * 1024


def painted(page: Path, folder: Path) -> str:
    """When Chromium first painted the page, in words."""
    try:
        from selenium import webdriver
    except ImportError:
        return "first paint was not measured (no selenium)."
    options = webdriver.ChromeOptions()
    for word in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        f"user-data-dir={folder / 'profile'}",
    ):
        options.add_argument(f"--{word}")
    for word in (
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "disable-quic",
    ):
        options.add_argument(f"--{word}")
    try:
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    except Exception as error:
        return f"first paint was not measured ({type(error).__name__})."
    try:
        driver.get(page.as_uri())
        time.sleep(3)
        first = driver.execute_script("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
    finally:
        driver.quit()
    return f"first contentful paint after {first / 1e3:.2f} s (at most 3)."


if __name__ == "__main__":
    main()
