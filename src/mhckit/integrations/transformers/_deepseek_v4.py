"""DeepSeek-V4: Sinkhorn connections, a learned head."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as original

from mhckit.modules import Streams
from mhckit.modules.streams import as_streams
from mhckit.recipe import Recipe, softmax_start

from ._shared import Connection, Layer, LearnedHead


class DeepseekV4HyperConnection(Connection, original.DeepseekV4HyperConnection):
    replaced = original.DeepseekV4HyperConnection

    @staticmethod
    def make_recipe(module: Any) -> Recipe:
        return sinkhorn_recipe(module, "deepseek_v4")

    def returned(self, h: Tensor, streams: Streams) -> tuple[Tensor, ...]:
        return as_post_comb_collapsed(h, streams)


class DeepseekV4DecoderLayer(Layer, original.DeepseekV4DecoderLayer):
    replaced = original.DeepseekV4DecoderLayer

    def forward(self, hidden_states: Any, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        h, streams = self.attn_hc(as_streams(hidden_states))
        attended, _ = self.self_attn(self.input_layernorm(h), **kwargs)
        h, streams = self.ffn_hc(streams.write(attended))
        return self.handed_on(streams.write(self.mlp(self.post_attention_layernorm(h), input_ids=input_ids)))


class DeepseekV4HyperHead(LearnedHead, original.DeepseekV4HyperHead):
    replaced = original.DeepseekV4HyperHead

    @staticmethod
    def make_recipe(module: Any) -> Recipe:
        norm_eps = module.input_norm.eps
        return Recipe.preset("deepseek_v4", streams=module.hc_mult, norm_eps=norm_eps, pre_eps=module.eps)


def sinkhorn_recipe(connection: Any, preset: str) -> Recipe:
    return Recipe.preset(
        preset,
        streams=connection.hc_mult,
        iterations=connection.hc_sinkhorn_iters,
        pre_eps=connection.hc_eps,
        norm_eps=connection.input_norm.eps,
        **softmax_start(connection.hc_eps),
    )


def as_post_comb_collapsed(h: Tensor, streams: Streams) -> tuple[Tensor, ...]:
    """As the connections of DeepSeek-V4 and GLM-5-next return them: comb is [in, out]."""
    assert streams.mix is not None and streams.mix.res is not None
    return streams.mix.post, streams.mix.res.transpose(-1, -2), h


REPLACEMENTS = (DeepseekV4HyperConnection, DeepseekV4DecoderLayer, DeepseekV4HyperHead)
