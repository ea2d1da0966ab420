"""Hooks of mkdocs: what pages link to in the repository becomes part of the site.

Pages link to each other, to the README and to results by their paths in the repository, so that the same links work
where the files are browsed and on a site that is read from disk. The site has these files below repository/.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
RESULTS = "benchmarks/results"
PLACE = "repository"

_LINK = re.compile(r"(\]\()([^)\s#:]+)")


def on_files(files: Files, config: Any) -> Files:
    for path in PAGES:
        files.append(File.generated(config, f"{PLACE}/{path}", abs_src_path=str(ROOT / path)))
    results = sorted(path.name for path in (ROOT / RESULTS).glob("*.jsonl"))
    for name in results:
        files.append(File.generated(config, f"{PLACE}/{RESULTS}/{name}", abs_src_path=str(ROOT / RESULTS / name)))
    listing = "# Measured results\n\n" + "".join(f"- [{name}]({name})\n" for name in results)
    files.append(File.generated(config, f"{PLACE}/{RESULTS}/index.md", content=listing))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with every link to a file of the repository led to where the site has that file."""
    here = page.file.src_uri
    at = here.removeprefix(f"{PLACE}/") if here.startswith(f"{PLACE}/") else f"docs/{here}"

    def on_the_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(at), link[2]))
        target = path.removeprefix("docs/") if path.startswith("docs/") else f"{PLACE}/{path}"
        target = f"{PLACE}/{RESULTS}/index.md" if path == RESULTS else target
        known = files.get_file_from_path(target) is not None
        return link[1] + (posixpath.relpath(target, posixpath.dirname(here)) if known else link[2])

    return _LINK.sub(on_the_site, markdown)
