"""`mhckit` itself: its help, its own options, and how every command ends."""

from __future__ import annotations

import contextlib
import select
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .errors import in_a_line
from .screen import is_plain

FIRST = ("doctor", "bench", "train", "inspect")  # what people want first, in this order
WRONG_USAGE = 2
INTERRUPTED = 130  # as shells count: 128 and SIGINT

WIDTH = 66  # of the line about a command
EXAMPLES = """\
  mhckit doctor
  mhckit bench --quick
  mhckit train --preset tiny --residual mhc
  mhckit inspect runs/tiny-mhc
  torchrun --nproc-per-node 8 -m mhckit train --preset 1b --data corpus/
"""
EXIT_CODES = """\
  0    done
  1    something failed; one line on stderr says what, and what to do
  2    the command line was wrong
  130  interrupted with Ctrl-C
"""


class Commands(TyperGroup):
    """The commands, with a help that reads from top to bottom, and errors in a line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; whatever it raises becomes a line on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            self._show(ctx, error, "mhckit: interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if isinstance(error, typer.Abort) or hasattr(error, "exit_code"):  # typer's own, which it shows itself
                raise
            if isinstance(error, BrokenPipeError) and _is_stdout_unread():
                _close_stdout()
            else:
                self._show(ctx, error, in_a_line(error))
            raise typer.Exit(1) from None

    def _show(self, ctx: Any, error: BaseException, line: str) -> None:
        if ctx.params["debug"]:
            traceback.print_exception(error)
        print(line, file=sys.stderr)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            print(ctx.get_help())
            ctx.exit(WRONG_USAGE)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*FIRST, *(name for name in super().list_commands(ctx) if name not in FIRST)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"{self.help}\n\n")
        formatter.write_usage(ctx.command_path, "[--debug] COMMAND ...")
        lines = [(name, self.commands[name].get_short_help_str(WIDTH)) for name in self.list_commands(ctx)]
        with formatter.section("Start here"):
            formatter.write_dl([line for line in lines if line[0] in FIRST])
        formatter.write(f"\nExamples:\n{EXAMPLES}\nExit codes:\n{EXIT_CODES}")
        with formatter.section("More commands"):
            formatter.write_dl([line for line in lines if line[0] not in FIRST])
        with formatter.section("Options"):
            formatter.write_dl([record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))])
        formatter.write("\n`mhckit COMMAND --help` tells more, with examples.\n")


def examples(*commands: str) -> str:
    """The end of a command's help."""
    return "\n".join(["Example:" if len(commands) == 1 else "Examples:", *(f"  {command}" for command in commands)])


app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    help="mhckit: Manifold-Constrained Hyper-Connections (mHC) for PyTorch, exact and fast.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from mhckit import __version__

        print(f"mhckit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """What stands before the command."""


def main() -> None:
    """Run the command that was given, and see that what it printed arrived."""
    if is_plain():
        from typer import rich_utils  # slow

        rich_utils.COLOR_SYSTEM = None  # typer's switch for the whole program
    try:
        try:
            app(prog_name="mhckit")
        finally:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except OSError as error:  # of stdout: those of commands are shown already
        _close_stdout()
        if not isinstance(error, BrokenPipeError):
            print(in_a_line(error), file=sys.stderr)
        raise SystemExit(1) from None


def _is_stdout_unread() -> bool:
    """Whether it is stdout whose reader went away (`mhckit ... | head`), and no other pipe's."""
    if not hasattr(select, "poll"):  # Windows
        return True
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)  # errors alone
        return bool(poll.poll(0))
    except (OSError, ValueError):  # no file at all
        return False


def _close_stdout() -> None:
    """Or Python would write the rest when it ends, and complain."""
    with contextlib.suppress(OSError):
        sys.stdout.close()
