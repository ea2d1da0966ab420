"""`mhckit doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .root import app, examples
from .screen import screen, watcher


@app.command(
    short_help="Examine this machine: versions, GPU, a self-test, speed.",
    epilog=examples("mhckit doctor", "mhckit doctor --json > doctor.json"),
)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Examine this machine: versions, GPU, which implementation runs and why, a self-test of every operator, speed.

    The exit code is 0 if all is well, warnings included, and 1 if something failed; what to do stands below each.
    """
    from mhckit.doctor import examine, exit_code
    from mhckit.doctor.report import as_data, as_table, summary

    with watcher().status("examining") as status:
        findings = examine(status.update)
    if as_json:
        print(json.dumps(as_data(findings)))
    else:
        console = screen()
        console.print(as_table(findings))
        console.print(summary(findings), markup=False)
    raise SystemExit(exit_code(findings))
