"""The examples run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_finetune_deepseek_v4(tmp_path: Path) -> None:
    script = ROOT / "examples" / "finetune_deepseek_v4.py"
    options = ["--text", str(ROOT / "README.md"), "--steps", "3", "--output", str(tmp_path)]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loss " in done.stdout
    assert (tmp_path / "model.safetensors").exists()


def test_demo(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "examples" / "demo.py"), "--steps", "2", "--out", str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "mHC, 4 streams" in done.stdout and f"picture: {tmp_path / 'demo.png'}" in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
