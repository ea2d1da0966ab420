"""Models of transformers, from a folder or from the hub: safetensors alone, and no code but that of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mhckit.train.errors import in_one_line

from .source import Source

TOKENIZER = "tokenizer.json"
SHOWN_WEIGHTS = 3


def open_transformers(name: str, device: torch.device) -> Source:
    """A model that `mhckit.integrations.transformers` knows, computed with mhckit."""
    try:
        import transformers

        from mhckit.integrations.transformers import apply
    except ImportError as error:
        raise ImportError(f"{name} needs transformers: pip install 'mhckit[transformers]' ({error})") from error
    config = _config(transformers, name)
    loader = _loader(transformers, config, name)
    model = apply(_loaded(loader, config, name)).to(device).eval()
    text, tokenizer = config.get_text_config(), _tokenizer(transformers, name)
    return Source(
        kind="transformers",
        model=model,
        loss=lambda tokens: _loss(model, tokens),
        vocab_size=text.vocab_size,
        longest=getattr(text, "max_position_embeddings", None),
        tokenizer=tokenizer,
        tokenizer_known=tokenizer is not None,
        facts={
            "transformers": transformers.__version__,
            "model type": str(config.model_type),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
    )


def _config(transformers: Any, name: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # what checks the fields raises a class of its own
        raise ValueError(f"{name} has no config.json that transformers can use: {in_one_line(error)}") from error


def _loader(transformers: Any, config: Any, name: str) -> Any:
    """The class to load with. A model without weights is patched first: one that cannot be need not be downloaded."""
    from mhckit.integrations.transformers import apply

    for loader in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in loader._model_mapping:
            empty = _without_weights(loader, config, name)
            try:
                apply(empty)
            except ValueError as error:
                raise ValueError(f"{name} has no hyper-connections that mhckit knows: {error}") from error
            return loader
    raise ValueError(f"{name} is a {config.model_type}, and inspect looks at language models with hyper-connections")


def _without_weights(loader: Any, config: Any, name: str) -> Any:
    try:
        with torch.device("meta"):
            return loader.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever the code of a model does with sizes that it did not expect
        raise ValueError(f"no model can be made from the config.json of {name}: {in_one_line(error)}") from error


def _loaded(loader: Any, config: Any, name: str) -> Any:
    try:
        model, info = loader.from_pretrained(
            name, config=config, use_safetensors=True, trust_remote_code=False, dtype="auto", output_loading_info=True
        )
    except Exception as error:  # safetensors raises a class of its own, transformers several
        raise ValueError(f"the safetensors of {name} could not be loaded: {in_one_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - SHOWN_WEIGHTS} more" if len(missing) > SHOWN_WEIGHTS else ""
        raise ValueError(f"{name} lacks weights of its model: {', '.join(missing[:SHOWN_WEIGHTS])}{more}")
    return model


def _tokenizer(transformers: Any, name: str) -> Path | None:
    """The file that comes with the model; None without one."""
    try:
        found = transformers.utils.cached_file(name, TOKENIZER, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return None if found is None else Path(found)


def _loss(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss
