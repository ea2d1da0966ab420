"""The weights of a model in one safetensors file, whole whatever they were sharded over."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from .atomic import written_whole
from .manifest import as_json
from .together import on_first_rank
from .weights import read_weights


def export_safetensors(
    source: str | Path | nn.Module, file: str | Path, *, config: dict[str, Any] | None = None
) -> Path:
    """Write the weights of a checkpoint or of a model; all processes call this, rank 0 writes.

    The file's metadata has the config as JSON under "config", and the step of a checkpoint under "step". An existing
    file is replaced, in one go.

    Args:
        source: a checkpoint, which is verified first, or a model.
        file: where to.
        config: None takes that of the checkpoint (its part "model" if there is one), or the attribute ``config`` of the
            model, a dataclass.
    """
    file = Path(file)
    if isinstance(source, nn.Module):
        model_config = _config_of(source) if config is None else config
        weights: Any = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        on_first_rank(lambda: _write(weights, file, model_config, {}))
    else:
        path = Path(source)
        on_first_rank(lambda: _export_checkpoint(path, file, config))
    return file


def _export_checkpoint(path: Path, file: Path, config: dict[str, Any] | None) -> None:
    weights, manifest = read_weights(path)
    of_model: dict[str, Any] = manifest.config.get("model", manifest.config)
    _write(weights, file, of_model if config is None else config, {"step": str(manifest.step)})


def _write(weights: dict[str, Tensor], file: Path, config: dict[str, Any], facts: dict[str, str]) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("export needs safetensors: pip install 'mhckit[train]'") from error
    contiguous = {name: weight.detach().contiguous() for name, weight in weights.items()}
    metadata = {"format": "pt", "config": json.dumps(as_json(config))} | facts
    with written_whole(file) as temporary:
        save_file(contiguous, temporary, metadata=metadata)


def _config_of(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(getattr(model, "module", model), "config", None)
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ValueError("the model has no dataclass in its attribute config: give config=")
    return dataclasses.asdict(config)
