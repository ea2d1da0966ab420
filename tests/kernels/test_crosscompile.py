"""Real compilation without a GPU: every kind of recipe with 4 streams for sm_90, and a sample of the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "crosscompile.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, timeout=1200)


def test_kernels_compile_fit_and_do_not_spill() -> None:
    result = _run("check", "--workers", "2")
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert ", 0 problems" in result.stdout


def test_the_check_can_fail() -> None:
    """It sees a kernel that spills, one that fuses products into sums across threads, one with wrong offsets, and one
    that issues its loads late.
    """
    code = f"""
import dataclasses
import sys
sys.path.insert(0, {str(TOOL.parent)!r})
import crosscompile
from mhckit import Recipe
stack_allowed, crosscompile._stack_allowed = crosscompile._stack_allowed, lambda launch: 0
case = crosscompile.Configuration(("junction",), Recipe.preset("deepseek_v4"), channels=256)
launches = crosscompile.launches_of("junction", case)
launch = next(launch for launch in launches if launch.name == "streams_bwd")
compiled = crosscompile.compile_launch(launch, "sm_90")
found = crosscompile.problems(launch, compiled)
assert len(found) == 1 and "bytes of stack" in found[0], found
for name in ("write_project", "write_project_hopper"):
    launch = next(launch for launch in launches if launch.name == name)
    found = crosscompile.problems(launch, dataclasses.replace(compiled, stack=500))
    assert len(found) == 1 and "500 bytes of stack" in found[0], (name, found)
assert not launch.runs_on("sm_80") and launch.runs_on("sm_90")
case = dataclasses.replace(case, without=("f_bias",))
launch = next(launch for launch in crosscompile.launches_of("junction", case) if launch.name == "streams_bwd_hopper")
found = crosscompile.problems(launch, dataclasses.replace(compiled, stack=8))
assert len(found) == 1 and "8 bytes of stack" in found[0], found
crosscompile._stack_allowed = stack_allowed
rows = crosscompile.Configuration(("junction",), Recipe.preset("deepseek_v4"), channels=257, optional=False)
launches = [launch for launch in crosscompile.launches_of("junction", rows) if launch.kernel.is_gluon()]
assert {{launch.name for launch in launches}} == set(crosscompile.ROWS_BEGIN_ANYWHERE)
for launch in launches:
    found = crosscompile.problems(launch, dataclasses.replace(compiled, stack=16))
    assert len(found) == 1 and "16 bytes of stack" in found[0], (launch.name, found)
case = dataclasses.replace(case, hopper_forms=False)
assert not any(launch.kernel.is_gluon() for launch in crosscompile.launches_of("junction", case))
copy, dot = "ttg.async_copy_global_to_local %x", "ttng.warp_group_dot %a"
assert crosscompile._loads_first(f"{{copy}} scf.for {{copy}} {{dot}}")
assert not crosscompile._loads_first(f"{{copy}} scf.for {{copy}} {{dot}} {{copy}}")
shuffled = ["SHFL.BFLY PT, R5, R2, 0x10, 0x1f", "MOV R7, R1", "FFMA R5, R0, R0, R5"]
assert crosscompile._fused_sums(shuffled) == 1
assert crosscompile._fused_sums([shuffled[0], "FADD R5, R2, R5", shuffled[2]]) == 0
widened = ["mul.wide.u32 %rd39, %r4, 16777216;", "or.b64 %rd40, %rd39, %rd38;", "mov.b64 {{_, %r5}}, %rd40;"]
assert crosscompile._lost_truncations(chr(10).join(widened)) == 1
assert crosscompile._lost_truncations(chr(10).join(["mul.wide.u32 %rd39, %r4, 2;", *widened[1:]])) == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_sass_prints_what_the_compiler_made() -> None:
    result = _run("sass", "--operator", "sinkhorn")
    assert result.returncode == 0, result.stderr[-3000:]
    header, *rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert {"registers", "stack", "shared", "SHFL", "STL", "LDL", "FFMA", "HMMA"} <= set(header)
    assert [row[0] for row in rows] == ["sinkhorn", "sinkhorn"] and all(int(row[1]) > 8 for row in rows)
    assert any(int(row[header.index("SHFL")]) > 0 for row in rows)
