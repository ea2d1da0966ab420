"""AutoModelForCausalLM whose models compute their hyper-connections with mhckit."""

from __future__ import annotations

from typing import Any

import transformers

from ._patch import apply


class AutoModelForCausalLM(transformers.AutoModelForCausalLM):
    """`transformers.AutoModelForCausalLM`, with `apply` called on what it returns.

    For other auto classes, or for options of `apply`, call it yourself: ``apply(AutoModel.from_pretrained(name))``.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
        apply(model)
        return loaded

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        return apply(transformers.AutoModelForCausalLM.from_config(*args, **kwargs))
