"""The examination: what is looked at, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from .findings import Finding, in_a_line
from .gpu import Gpu, current_gpu, gpu_finding
from .paths import path_findings
from .selftest import self_test
from .settings import settings_finding
from .speed import speed_findings
from .triton_here import installed_triton
from .versions import (
    compiler_finding,
    extras_finding,
    host_code_finding,
    mhckit_finding,
    torch_finding,
    triton_finding,
)


def examine(progress: Callable[[str], None] = lambda what: None) -> list[Finding]:
    """Everything there is to find here, in the order of the report; ``progress`` is told what comes next."""
    findings: list[Finding] = []

    def look(what: str, part: Callable[[], Iterable[Finding]]) -> None:
        progress(what)
        for finding in _attempt(what, part):
            findings.append(finding)
            progress(f"{what}: {finding.name} {finding.status}")

    gpus: list[Gpu | None] = []
    look("GPU", lambda: _find_gpu(gpus))
    gpu = gpus[0] if gpus else None
    look("versions", lambda: _installed(gpu))
    look("paths", lambda: path_findings(gpu))
    look("self-test" if gpu is None else "self-test, which compiles kernels the first time", lambda: self_test(gpu))
    junction = next((finding for finding in findings if finding.name == "junction"), None)
    look("speed", lambda: speed_findings(gpu, junction))
    return findings


def _find_gpu(found: list[Gpu | None]) -> Iterator[Finding]:
    """Puts it into ``found``: a driver that raises leaves the rest to be looked at without one."""
    found.append(current_gpu())
    yield gpu_finding(found[0])


def _installed(gpu: Gpu | None) -> Iterator[Finding]:
    triton = installed_triton()
    yield mhckit_finding()
    yield torch_finding()
    yield triton_finding(triton, gpu)
    yield compiler_finding(triton, gpu)
    yield host_code_finding(triton, gpu)
    yield extras_finding()
    yield settings_finding(triton, gpu)


def _attempt(what: str, part: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Its findings; that it raised is one, and no reason not to look at the rest."""
    try:
        yield from part()
    except Exception as error:
        yield Finding(what, "failed", in_a_line(error), "please report this, with all of this output")
