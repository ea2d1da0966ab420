"""Hugging Face transformers: DeepSeek-V4, GLM-5-next and Hy-V4 with mhckit's operators.

from mhckit.integrations.transformers import apply

model = apply(AutoModelForCausalLM.from_pretrained(name))
"""

from ._auto import AutoModelForCausalLM
from ._patch import apply, register, restore, unregister

__all__ = ["AutoModelForCausalLM", "apply", "register", "restore", "unregister"]
