"""What `mhckit inspect` does with inspections: files in a folder, a table on the screen, JSON."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from mhckit.train.atomic import written_whole

from .inspection import inspect_source
from .measured import Inspection, from_json, to_json

PAGE, PICTURE, DATA, COMPARISON = "report.html", "report.png", "report.json", "comparison.html"
_STYLES = {"wrong": "bold red", "note": "yellow", "good": "green"}


def check_report(folder: Path, *sources: str | None) -> None:
    """Before any model is read: an error if its report could not be drawn, or would be written into a source."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f'{PICTURE} is drawn by matplotlib: pip install "mhckit[viz]", or ask for --json')
    target = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out must be a folder, and {folder} is a file")
    for source in sources:
        path = Path(source).resolve() if source is not None else None
        if path is None or not path.exists():
            continue
        inside = path.is_dir() and (target == path or path in target.parents)
        if inside or path in (target / name for name in (PAGE, PICTURE, DATA, COMPARISON)):
            raise ValueError(f"nothing is written into what is inspected, and --out {folder} lies in {source}")


def inspect_other(name: str, **options: Any) -> Inspection:
    """What to compare with: a model, or the report.json of an earlier inspection."""
    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        return inspect_source(name, **options)
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def write_reports(inspection: Inspection, other: Inspection | None, folder: Path) -> list[Path]:
    """Page, picture and data of an inspection, and a page beside another one; returns their paths.

    All are made before the first is put in its place, and each takes it whole.
    """
    from .comparison import write_comparison
    from .figures import write_picture
    from .page import write_page

    names = [PAGE, PICTURE, DATA]
    with tempfile.TemporaryDirectory() as draft:
        drafts = Path(draft)
        write_page(inspection, drafts / PAGE)
        write_picture(inspection, drafts / PICTURE)
        (drafts / DATA).write_text(to_json(inspection), encoding="utf-8")
        if other is not None:
            write_comparison(inspection, other, drafts / COMPARISON)
            names.append(COMPARISON)
        for name in names:
            with written_whole(folder / name) as place:
                shutil.copyfile(drafts / name, place)
    return [folder / name for name in names]


def as_table(inspection: Inspection) -> Table:
    """A line per finding. Names come from the model: they are shown as text, whatever they hold."""
    table = Table.grid(padding=(0, 2))
    for finding in inspection.findings:
        style = _STYLES.get(finding.level, "")
        table.add_row(Text(finding.level, style=style), _printable(finding.text))
    return table


def _printable(text: str) -> Text:
    return Text("".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text))


def as_json(inspection: Inspection, other: Inspection | None) -> str:
    """One object, or a list of two."""
    return to_json(inspection) if other is None else f"[{to_json(inspection)}, {to_json(other)}]"
