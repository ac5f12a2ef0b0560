"""`zgraph ckpt`: shows, verifies, compares, converts and exports checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgraph.cli.options import JsonOption, OutputOption
from zgraph.cli.output import CHECK_FAILED, give, progress, table
from zgraph.errors import CheckpointError, TargetError
from zgraph.names import did_you_mean
from zgraph.units import shown_bytes

if TYPE_CHECKING:
    from zgraph.checkpoint.comparison import Comparison, Different

ckpt = typer.Typer(
    help="Look at checkpoints, check, compare and convert them. No model is needed, and no rank started.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
SHOWN = 20  # tensors that differ, in the text
SYSTEMS = ("zgraph", "dcp", "deepspeed")
LAYOUTS = {"universal": "universal", "1": 1, "2": 2, "3": 3}

PathArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A checkpoint, or a folder of them, of zgraph or another system.", show_default=False
    ),
]
SourceArgument = Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint of any system.", show_default=False)]
TagOption = Annotated[
    str | None,
    typer.Option("--tag", metavar="TAG", help="Which checkpoint of the folder. [default: the one saved last]"),
]
FilterOption = Annotated[
    str | None,
    typer.Option("--filter", metavar="GLOB", help="Only tensors whose names match, with or without 'model.'."),
]


@ckpt.command()
def inspect(
    path: PathArgument,
    tag: TagOption = None,
    pattern: FilterOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what a checkpoint is, what it was saved by, and its tensors; of a folder, which checkpoints it has."""
    from dataclasses import asdict

    from zgraph.checkpoint.contents import contents, tags_of
    from zgraph.checkpoint.detect_format import open_checkpoint

    data = contents(open_checkpoint(path, tag), pattern) | {"tags": [asdict(t) for t in tags_of(path)]}
    give(_plain(data), _inspected(data), as_json, output)


def _inspected(data: dict[str, Any]) -> str:
    facts: dict[str, Any] = {
        "kind": data["kind"],
        "folder": data["folder"],
        "steps": data["steps"] if not data["skipped"] else f"{data['steps']}, {data['skipped']} of them skipped",
        "samples": data["samples"],
        "saved by": _ranks(data),
        "plan": _plan(data["plan"]),
        "loss scale": _shown(data["loss_scale"]),
        "client state": ", ".join(data["client_keys"]) or None,
    }
    lines = [f"{name:12}  {value}" for name, value in facts.items() if value is not None]
    if data["tags"]:
        lines += ["", table(("tag", "steps", "on disk", ""), [_tag(t) for t in data["tags"]])]
    totals = [(kind, t["tensors"], shown_bytes(t["bytes"])) for kind, t in data["totals"].items() if t["tensors"]]
    lines += ["", table(("kind", "tensors", "bytes"), totals)]
    rows = [(t["name"], t["dtype"], str(t["shape"]), t["blocks"], shown_bytes(t["bytes"])) for t in data["tensors"]]
    return "\n".join([*lines, "", table(("tensor", "dtype", "shape", "blocks", "bytes"), rows)])


def _tag(tag: dict[str, Any]) -> tuple[str, ...]:
    steps = "" if tag["steps"] is None else str(tag["steps"])
    size = "" if tag["bytes"] is None else shown_bytes(tag["bytes"])
    return tag["tag"], steps, size, "latest" if tag["latest"] else "damaged" if tag["damaged"] else ""


def _ranks(data: dict[str, Any]) -> str | None:
    mesh = ", ".join(f"{dim} {size}" for dim, size in data["mesh"].items())
    if not mesh and data["world"] == 1:  # (1 may also mean that the number is not known)
        return None
    return f"{data['world']} rank(s)" + (f", mesh {mesh}" if mesh else "")


def _plan(plan: dict[str, Any] | None) -> str | None:
    """Return text with the fields of a plan that differ from the defaults; None without a plan."""
    from zgraph.plan.plan import Plan

    default = Plan().model_dump(mode="json")
    return (
        None if plan is None else _shown({k: v for k, v in plan.items() if v != default.get(k)}) or "the default plan"
    )


def _shown(values: dict[str, Any] | None) -> str | None:
    """Return a dict as one line of text."""
    return None if values is None else ", ".join(f"{k} {json.dumps(v)}" for k, v in values.items())


def _plain(data: Any) -> Any:
    """Return data as JSON can store it: infinities and NaN become texts."""
    if isinstance(data, dict):
        return {k: _plain(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(v) for v in data]
    return data if not isinstance(data, float) or abs(data) < float("inf") else str(data)


@ckpt.command()
def verify(
    path: PathArgument,
    tag: TagOption = None,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint of the folder.")] = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read all of a checkpoint and compare it with its checksums, where it has some.

    Exits with 1 if it is damaged.
    """
    from zgraph.checkpoint.contents import damage, tags_of
    from zgraph.checkpoint.folder import LATEST

    if every and tag is not None:
        raise typer.BadParameter("--tag or --all, not both")
    place = path if tag is None else path / tag
    if not place.exists():
        raise CheckpointError("there is no checkpoint here", where=str(place), why="there is no such file or folder")
    wanted: list[str | None] = [tag]
    if every:
        wanted = [*(t.tag for t in tags_of(path)), *([None] if (path / LATEST).exists() else [])]
        if not wanted:
            hint = "--all is for a folder of checkpoints of zgraph's"
            raise CheckpointError("the folder has no checkpoints", where=str(path), hint=hint)
    rows = []
    with progress(f"reading {path}") as say:
        for one in wanted:
            source, problem = damage(path, one, say)
            size = sum(info.nbytes for info in source.tensors.values()) if source is not None else 0
            rows.append({"tag": one, "ok": problem is None, "bytes": size, "problem": problem})
    ok = all(row["ok"] for row in rows)
    lines = []
    for row in rows:
        name = row["tag"] or (LATEST if every else str(path))
        if row["ok"]:
            lines.append(f"{name}: whole, {shown_bytes(float(row['bytes'] or 0))} of tensors")
        else:
            lines += [f"{name}: damaged", *(f"  {line}" for line in str(row["problem"]).splitlines())]
    give({"ok": ok, "checkpoints": rows}, "\n".join(lines), as_json, output)
    if not ok:
        raise typer.Exit(CHECK_FAILED)


@ckpt.command()
def compare(
    one: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, or a folder of them.", show_default=False)],
    other: Annotated[Path, typer.Argument(metavar="B", help="The one to compare it with.", show_default=False)],
    pattern: FilterOption = None,
    every: Annotated[bool, typer.Option("--all", help="Name every tensor that differs, not the first twenty.")] = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints bit for bit: which tensors differ, and how far.

    Exits with 1 if they differ. Of a folder the last one is taken; name FOLDER/TAG for another. With --filter only tensors are compared.
    """
    from zgraph.checkpoint.comparison import compare as run
    from zgraph.checkpoint.detect_format import open_checkpoint

    sources = open_checkpoint(one), open_checkpoint(other)
    with progress("comparing") as say:
        comparison = run(*sources, pattern, say)
    give(
        _plain(comparison.to_json()),
        _compared(comparison, str(one), str(other), None if every else SHOWN),
        as_json,
        output,
    )
    if not comparison.equal:
        raise typer.Exit(CHECK_FAILED)


def _compared(comparison: Comparison, one: str, other: str, shown: int | None) -> str:
    lines = [f"{key}: {a} in {one}, {b} in {other}" for key, (a, b) in comparison.known.items()]
    for place, names in zip((one, other), comparison.only, strict=True):
        if names:
            lines += [f"only in {place}: {len(names)}", *(f"  {n}" for n in names[:shown])]
            lines += ["  …"] if len(names[:shown]) < len(names) else []
    if comparison.different:
        rows = [_row(d) for d in comparison.different[:shown]]
        head = ("tensor", "", "differing", "first at", "largest", "relative")
        lines += [f"different: {len(comparison.different)}", table(head, rows)]
        lines += ["…"] if len(rows) < len(comparison.different) else []
    return "\n".join([*lines, f"{comparison.same} tensors are equal, bit for bit"])


def _row(tensor: Different) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    share = "" if tensor.differing is None else f"{tensor.differing} of {tensor.elements}"
    at = "" if tensor.first is None else str(list(tensor.first))
    return (tensor.name, tensor.why, share, at, number(tensor.largest), number(tensor.relative))


@ckpt.command()
def convert(
    path: SourceArgument,
    to: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.", show_default=False)],
    tag: TagOption = None,
    system: Annotated[
        str,
        typer.Option("--to", metavar="SYSTEM", help="zgraph, dcp (torch.distributed.checkpoint's own) or deepspeed."),
    ] = SYSTEMS[0],
    layout: Annotated[
        str,
        typer.Option("--layout", metavar="LAYOUT", help="Of DeepSpeed's: universal, or the ZeRO stage 1, 2 or 3."),
    ] = "universal",
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            min=1,
            help="For DeepSpeed's stages: the number of data-parallel ranks. [default: those that saved it]",
        ),
    ] = None,
    named: Annotated[
        str | None, typer.Option("--as", metavar="TAG", help="The tag to write. [default: stepN]", show_default=False)
    ] = None,
) -> None:
    """Make a checkpoint of zgraph's, torch.distributed.checkpoint's or DeepSpeed's of one of any system: weights, optimizer, counts."""
    if system not in SYSTEMS:
        raise TargetError(f"nothing is converted to {system!r}", where="--to", hint=did_you_mean(system, SYSTEMS))
    if layout not in LAYOUTS:
        raise TargetError(f"DeepSpeed has no layout {layout!r}", where="--layout", hint=", ".join(LAYOUTS))
    from zgraph.checkpoint.convert import convert as run
    from zgraph.checkpoint.detect_format import open_checkpoint

    source = open_checkpoint(path, tag)
    chosen = named or f"step{source.known.steps or 0}"
    with progress(f"converting {source.folder}"):
        written_path = run(source, to, chosen, to=system, layout=LAYOUTS[layout], ranks=ranks)  # type: ignore[arg-type]
    typer.echo(f"wrote {written_path}", err=True)


@ckpt.command()
def export(
    path: SourceArgument,
    to: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.", show_default=False)],
    tag: TagOption = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16. [default: the weights' own]"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FOLDER",
            help="Its config.json says which model of transformers' it is, and goes along.",
        ),
    ] = None,
    most: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Bytes of tensors in a file at most.")
    ] = "5GB",
) -> None:
    """Write a checkpoint's weights as safetensors, one tensor at a time: with --config, what `from_pretrained` reads.

    A wider dtype than that of the weights is taken from their fp32 masters.
    """
    from zgraph.checkpoint.detect_format import open_checkpoint
    from zgraph.checkpoint.write_pretrained import export as run
    from zgraph.cli.transformers_target import empty

    source = open_checkpoint(path, tag)
    like = empty(config) if config is not None else None
    with progress(f"exporting {source.folder}") as say:
        files = run(source, to, dtype=dtype, max_shard_size=most, like=like, say=say)
    for file in files:
        typer.echo(f"wrote {file}", err=True)
