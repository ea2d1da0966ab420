"""Forward and backward of a whole model of transformers, with its own hyper-connections and with mhckit's.

A random DeepSeek-V4 of middling size with few layers and experts, as eager as people run it. Whatever the connections
cost is seen beside everything else that a model does. A small model waits for the host: the time of its kernels is then
less than that of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mhckit.integrations.transformers import apply, restore
from mhckit.testing import relative_error

from .launches import device_events
from .results import Line, append_lines
from .timing import environment, median_microseconds, peak_extra_bytes

# What of the model is mhckit's, least first.
VARIANTS: dict[str, dict[str, bool] | None] = {
    "transformers": None,
    "connections and head": dict(junction=False),
    "layers": dict(),
    "across layers": dict(across_layers=True),
}
# How far the logits of two bfloat16 runs may be apart, in relative norm: each rounds in its own places, and a rounding
# may tip the choice of an expert. Exactness is tested elsewhere, in float32.
TOLERANCE = 0.1


def random_model(hidden: int, layers: int, device: str = "cuda") -> Any:
    """bfloat16, with the parameters of the connections in float32."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    heads = max(1, hidden // 128)
    config = DeepseekV4Config(
        vocab_size=1024,
        hidden_size=hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=128,
        q_lora_rank=hidden // 4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        o_groups=min(heads, 4),
        o_lora_rank=hidden // 4,
        index_n_heads=4,
        index_head_dim=64,
        index_topk=64,
        sliding_window=128,
        num_nextn_predict_layers=0,
        partial_rotary_factor=0.5,
        max_position_embeddings=8192,
    )
    model: Any = DeepseekV4ForCausalLM(config)
    model.to(device, torch.bfloat16)
    for module in model.modules():
        if "Hyper" in type(module).__name__:
            module.float()
    return model.train()


def measure(model: Any, ids: Tensor, rep: int) -> Iterator[Line]:
    """A line per variant; one whose logits are not the model's own is refused."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        output = model(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        return output.logits.detach()

    expected = step()
    for variant, options in VARIANTS.items():
        restore(model) if options is None else apply(model, **options)
        line: Line = {"kind": "model", "family": "deepseek_v4", "variant": variant}
        error = relative_error(step(), expected)
        if not error < TOLERANCE:
            yield {**line, "kind": "refused", "error": error}
            continue
        memory, kernels = peak_extra_bytes(step), sum(event.microseconds for event in device_events(step))
        yield {
            **line,
            "milliseconds": round(median_microseconds(step, rep) / 1e3, 3),
            "kernel_milliseconds": round(kernels / 1e3, 3),
            "peak_extra_bytes": memory,
        }
    restore(model)


def run_whole_model(
    hidden: int, layers: int, batch: int, tokens: int, output: Path | None, commit: str, console: Console
) -> list[Line]:
    import transformers

    size = {"hidden": hidden, "layers": layers, "batch": batch, "tokens": tokens}
    base = {**environment(commit), "transformers": transformers.__version__, "dtype": "bfloat16", **size}
    model = random_model(hidden, layers)
    ids = torch.randint(0, 1024, (batch, tokens), device="cuda")
    lines = [{**base, **line} for line in measure(model, ids, rep=2000)]
    if output is not None:
        append_lines(output, lines)
    console.print(_table(lines))
    return lines


def _table(lines: list[Line]) -> Table:
    title = "DeepSeek-V4, hidden {hidden}, {layers} layers, {batch} x {tokens} tokens, forward and backward"
    table = Table(
        "hyper-connections of", "ms", "of kernels", "faster", "peak MB", title=title.format(**lines[0]), box=None
    )
    first = lines[0].get("milliseconds")
    for line in lines:
        if line["kind"] == "refused":
            table.add_row(line["variant"], f"refused: logits differ by {line['error']:.1%}")
            continue
        faster = f"{first / line['milliseconds']:.2f}x" if first else ""
        times = (f"{line[name]:.2f}" for name in ("milliseconds", "kernel_milliseconds"))
        table.add_row(line["variant"], *times, faster, f"{line['peak_extra_bytes'] / 1e6:.0f}")
    return table
