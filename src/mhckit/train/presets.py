"""Runs with a name, and a config from a preset, a YAML file and flags, each winning over the one before."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mhckit.models import MODEL_PRESETS, ModelConfig

from .config import TrainConfig
from .fields import convert, convert_all, refuse_unknown


def _shape(seq_len: int, batch_size: int, grad_accum: int, max_steps: int) -> dict[str, int]:
    return {"seq_len": seq_len, "batch_size": batch_size, "grad_accum": grad_accum, "max_steps": max_steps}


_LARGE = {"loss": "chunked", "checkpoint_every": 500, "eval_every": 500, "health_every": 100}
# What differs from the defaults of TrainConfig, which are those of tiny. The large ones are starting points, not tuned;
# at a length of 4096 their micro-batches are of eight sequences on one GPU, and of one on eight GPUs.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "deep": _LARGE | _shape(256, 32, 1, 2000) | {"lr": 1e-3, "warmup_steps": 100},
    "120m": _LARGE | _shape(1024, 256, 8, 10000) | {"lr": 1e-3, "warmup_steps": 500},
    "1b": _LARGE | _shape(4096, 128, 16, 20000) | {"lr": 4e-4, "warmup_steps": 1000},
    "3b": _LARGE | _shape(4096, 320, 40, 30000) | {"lr": 8e-4, "warmup_steps": 2000},
    "9b": _LARGE | _shape(4096, 512, 64, 50000) | {"lr": 6e-4, "warmup_steps": 2000},
    "27b": _LARGE | _shape(4096, 1280, 160, 50000) | {"lr": 4e-4, "warmup_steps": 2000},
}
_DTYPES = {"tiny": "float32"}
MODEL_FIELDS = frozenset(field.name for field in dataclasses.fields(ModelConfig))
_OPTIONS = {name: name for name in ("preset", "scale", *(field.name for field in dataclasses.fields(TrainConfig)))}
del _OPTIONS["model"]


def load_config(file: Path | str | None = None, /, **flags: Any) -> TrainConfig:
    """A config by name.

        load_config(preset="deep", residual="hc", lr=5e-4)
        load_config("run.yaml", max_steps=100)

    Args:
        file: YAML: fields of TrainConfig, those of its model under ``model``, and ``preset`` and ``scale``.
        flags: the same, with the model's fields beside the others; they win over the file's.
    """
    values = read_yaml(Path(file)) if file is not None else {}
    refuse_unknown(values, {**_OPTIONS, "model": "model", **{name: f"model.{name}" for name in MODEL_FIELDS}})
    for name in MODEL_FIELDS & values.keys():
        raise ValueError(f"{name} is an option of the model: write model.{name}")
    model = values.pop("model", None) or {}
    if not isinstance(model, dict):
        raise TypeError(f"model must be a map of options, got {model!r}")
    refuse_unknown(flags, {**_OPTIONS, **{name: name for name in MODEL_FIELDS}})
    model.update({name: flags.pop(name) for name in sorted(MODEL_FIELDS & flags.keys())})
    return _build({**values, **flags}, model)


def _build(values: dict[str, Any], model: dict[str, Any]) -> TrainConfig:
    preset = convert("preset", values.pop("preset", "tiny"), str)
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    scale = convert("scale", values.pop("scale", 1.0), float)
    shape = MODEL_PRESETS[preset].replace(dtype=_DTYPES.get(preset, "bfloat16"))
    shape = shape if scale == 1 else shape.scaled(scale)
    shape = shape.replace(**convert_all(ModelConfig, model, "model."))
    named = {"run_name": _name(preset, scale, str(shape.residual))}
    return TrainConfig(model=shape, **{**named, **PRESETS[preset], **values})


def _name(preset: str, scale: float, residual: str) -> str:
    kind = residual if "=" not in residual else "recipe"
    return f"{preset}{'' if scale == 1 else f'-x{scale:g}'}-{kind}"


def read_yaml(path: Path) -> dict[str, Any]:
    yaml = _yaml()
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a map of options, got {type(values).__name__}")
    return values


def to_yaml(config: TrainConfig) -> str:
    return _yaml().safe_dump(config.to_dict(), sort_keys=False, default_flow_style=False)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("configurations are YAML, which needs pyyaml: pip install 'mhckit[train]'") from error
    return yaml
