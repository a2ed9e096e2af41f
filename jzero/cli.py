"""The command ``jzero``: a subcommand a function, each of which imports what it needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    Args:
      argv: arguments after the program's name; None: the process's.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="jzero", description="ZeRO for JAX")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_launch(commands)
    _add_report(commands, chosen=words[:1] == ["report"])
    options = parser.parse_args(words)
    return options.run(options)


def _add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "launch",
        help="start several processes of a program on this machine",
        description=(
            "Start several processes of a program on this machine, pass their output on with "
            "their number in front, and end all when one fails. The program calls "
            "jzero.distributed.initialize()."
        ),
        usage="jzero launch -n N [options] -- PROGRAM [ARGUMENT ...]",
    )
    add = parser.add_argument
    add("-n", "--processes", type=_at_least(1), required=True, metavar="N", help="how many")
    add(
        "--devices-per-process",
        type=_at_least(1),
        metavar="D",
        help="devices of each: simulated ones on CPU; default: one accelerator, or the CPU",
    )
    add(
        "--restarts",
        type=_at_least(0),
        default=0,
        metavar="K",
        help="start again after a failure, at most K times, with the processes that were not lost; "
        "the program continues from its newest checkpoint (default: 0)",
    )
    add(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="between asking processes to end and killing them (default: 10)",
    )
    add("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM [ARGUMENT ...]")
    parser.set_defaults(run=lambda options: _launch(parser, options))


def _launch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from jzero._launch import launch

    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        parser.error("no program to run; write it after --, such as -- python train.py")
    if not options.grace >= 0:
        parser.error(f"--grace {options.grace} must be a number of seconds, at least 0")
    return launch(
        program,
        processes=options.processes,
        devices_per_process=options.devices_per_process,
        restarts=options.restarts,
        grace=options.grace,
    )


def _add_report(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], chosen: bool
) -> None:
    parser = commands.add_parser(
        "report",
        help="tell what a training step takes on a machine, from compiling alone",
        description=(
            "Compile the training step of a ready model for a machine that need not be there, and "
            "tell its memory, its traffic, what overlaps, and how long a step takes at best. "
            "Your own model: jzero.report in Python."
        ),
    )
    if not chosen:  # its arguments know the ready models, and those JAX, which launch is without
        return
    from jzero import _report_cli

    _report_cli.add_arguments(parser)
    parser.set_defaults(run=_report_cli.run)


def _at_least(low: int):
    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} must be at least {low}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
