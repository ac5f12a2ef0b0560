"""The arguments that DeepSpeed adds to a script's own."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, which only scripts read, and `--deepspeed_config PATH`, with their older names."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's configuration")
    group.add_argument("--deepspeed", action="store_true", help="for the script: initialize by the configuration")
    group.add_argument(
        "--deepspeed_config", type=str, default=None, help="the path of a DeepSpeed configuration (JSON)"
    )
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser
