"""Environment variables that change what runs."""

from __future__ import annotations

import importlib

from .findings import Finding
from .gpu import Gpu
from .triton_here import Triton, is_interpreted


def settings_finding(triton: Triton, gpu: Gpu | None) -> Finding:
    """Interpreted, kernels are slow and their bfloat16 is wrong: nothing to use on a GPU by accident."""
    can_tune = gpu is not None and triton.usable
    tunes = can_tune and importlib.import_module("mhckit.kernels._autotune").is_enabled()
    values = {"TRITON_INTERPRET": is_interpreted(), "MHCKIT_AUTOTUNE": tunes}
    seen = ", ".join(f"{name} is set" for name, is_set in values.items() if is_set)
    if values["TRITON_INTERPRET"]:
        advice = "unset TRITON_INTERPRET: interpreted kernels are slow, and bfloat16 is wrong in them"
        return Finding("settings", "warning" if gpu is None else "failed", seen, advice, values)
    if tunes:
        advice = "the first launch of each kernel searches: time nothing before"
        return Finding("settings", "warning", seen, advice, values)
    return Finding("settings", "ok", "none of the environment changes what runs", values=values)
