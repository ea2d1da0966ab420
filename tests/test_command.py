"""The command itself, started as people start it."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = "import sys; sys.modules[{name!r}] = None; import runpy; runpy.run_module('mhckit', run_name='__main__')"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_without_its_extra_it_says_what_to_install(name: str) -> None:
    done = _run("-c", WITHOUT.format(name=name))
    assert done.returncode == 1
    assert done.stderr == f'mhckit\'s commands need {name}: pip install "mhckit[cli]"\n'


def test_another_missing_module_is_not_taken_for_it() -> None:
    done = _run("-c", WITHOUT.format(name="mhckit.cli.root"))
    assert done.returncode == 1 and "Traceback" in done.stderr and "pip install" not in done.stderr


def test_help_lists_the_commands() -> None:
    done = _run("-m", "mhckit", "--help")
    assert done.returncode == 0, done.stderr
    for command in ("bench", "doctor", "train", "inspect", "compare", "export"):
        assert f" {command} " in done.stdout
