"""Tiny random models of the families that mhckit patches, far from any symmetric or trivial parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedModel
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration
from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
from transformers.models.hy_v4.modeling_hy_v4 import HYV4ForCausalLM

VOCABULARY, TOKENS = 97, 19

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    moe_intermediate_size=16,
    num_attention_heads=4,
    q_lora_rank=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=4,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v4": dict(
        num_hidden_layers=4,
        num_key_value_heads=1,
        head_dim=16,
        o_groups=2,
        o_lora_rank=8,
        sliding_window=8,
        num_nextn_predict_layers=0,
        partial_rotary_factor=0.5,
        hc_sinkhorn_iters=7,
    ),
    "glm5_next": dict(
        num_hidden_layers=4,  # the last is the first with full attention, and with experts
        intermediate_size=24,
        num_key_value_heads=4,
        kv_lora_rank=16,
        v_head_dim=8,
        qk_nope_head_dim=8,
        index_kpool=2,
        linear_head_dim=8,
        linear_num_heads=4,
    ),
    "hy_v4": dict(
        num_hidden_layers=3,
        intermediate_size=24,
        num_key_value_heads=4,
        head_dim=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        hc_magnitude=1.5,
    ),
}
FAMILIES = tuple(_OF_FAMILY)
_VISION = dict(
    depth=1, hidden_size=16, num_heads=2, out_hidden_size=32, intermediate_size=16, projection_intermediate_size=16,
    image_size=28,
)  # fmt: skip

# No choice among experts or positions, which a rounding could tip.
WITHOUT_CHOICES: dict[str, Any] = dict(num_experts_per_tok=4, index_topk=32)


def tiny_config(family: str, **options: Any) -> Any:
    fields = _COMMON | _OF_FAMILY[family] | options
    if family == "glm5_next":
        return Glm5NextConfig(text_config=fields, vision_config=_VISION)
    return (DeepseekV4Config if family == "deepseek_v4" else HYV4Config)(**fields)


def tiny(family: str, *, seed: int = 0, own_initialisation: bool = False, **options: Any) -> PreTrainedModel:
    """Experts run one by one: the grouped product that transformers prefers has no float64."""
    torch.manual_seed(seed)
    classes = dict(deepseek_v4=DeepseekV4ForCausalLM, glm5_next=Glm5NextForConditionalGeneration, hy_v4=HYV4ForCausalLM)
    model = classes[family](tiny_config(family, **options))
    model.set_experts_implementation("eager")
    return model.eval() if own_initialisation else randomise(model, seed).eval()


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            value *= parameter.shape[-1] ** -0.5
        parameter.copy_(1 + 0.2 * value if "norm" in name else value)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # which experts a token goes to: different ones
            buffer.copy_(torch.rand(len(buffer), 4, generator=generator).argsort(1)[:, : buffer.shape[1]])
    return model


def token_ids(batch: int = 2, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def logits_and_gradients(model: Any, ids: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of the language model's loss for every parameter that takes part."""
    model.zero_grad()
    output = model(input_ids=ids, labels=ids, use_cache=False, **inputs)
    output.loss.backward()
    gradients = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), gradients
