"""The commands under one name, and how all of them report an error.

Exit codes: 0 all is well, 1 a check failed, 2 wrong usage or an error. A `ZgraphError` is for the user: it is printed
to stderr in full, without a traceback. Any other exception is a bug of zgraph and keeps its traceback.
"""

from __future__ import annotations

import errno
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from zgraph._version import __version__
from zgraph.cli.bisect import bisect
from zgraph.cli.cache import cache
from zgraph.cli.calibrate import calibrate
from zgraph.cli.check import check
from zgraph.cli.ckpt import ckpt
from zgraph.cli.diff import diff
from zgraph.cli.dump import DumpCommand, dump
from zgraph.cli.env import env
from zgraph.cli.explain import explain
from zgraph.cli.forecast import forecast
from zgraph.cli.launch import launch
from zgraph.cli.memory import memory
from zgraph.cli.passes import passes
from zgraph.cli.plan import plan
from zgraph.cli.precompile import precompile
from zgraph.cli.report import report
from zgraph.cli.repro import repro
from zgraph.cli.timeline import timeline
from zgraph.cli.verify import verify
from zgraph.errors import ZgraphError

USAGE_ERROR = 2


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ZgraphError as error:
            notes = [f"  {note}" for note in getattr(error, "__notes__", ())]
            typer.echo("\n".join([f"zgraph: {error}", *notes]), err=True)
            raise typer.Exit(USAGE_ERROR) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise
            typer.echo(f"zgraph: the output can't be written: {error.strerror}", err=True)
            raise typer.Exit(USAGE_ERROR) from error

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # in the order of their registration


app = typer.Typer(
    cls=_Commands,
    name="zgraph",
    help="A compiler for training steps. These commands look at what it makes of a model, on CPU, for any"
    " number of ranks, without starting any.",
    epilog="TARGET is 'package.module:factory', a callable that returns (model, inputs); hf:DIR, a folder with a"
    " transformers config.json; the name of an example, such as train_lm; or, where programs are looked at, a bundle: the folder that a run"
    " writes with ZGRAPH_BUNDLE=FOLDER set. Exit codes: 0 all is well, 1 a check failed, 2 wrong usage or an error.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(cls=DumpCommand)(dump)
app.command()(diff)
app.command()(passes)
app.command()(explain)
app.command()(memory)
app.command()(timeline)
app.command()(report)
app.command()(plan)
app.command()(check)
app.command()(verify)
app.command()(bisect)
app.command()(repro)
app.command()(env)
app.command()(forecast)
app.command()(calibrate)
app.command()(precompile)
app.command()(cache)
app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})(launch)
app.add_typer(ckpt, name="ckpt")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zgraph {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line on `sys.argv` and exit."""
    app(prog_name="zgraph")
