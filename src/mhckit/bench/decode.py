"""Inference: what a junction takes when a model decodes, a few tokens at a time and without gradients.

A chain of LINKS junctions is captured in one CUDA graph, and the time of a replay divided by their number. Every link
has parameters of its own, and the L2 cache is flushed before each replay: phi comes from memory, as in a model, whose
sublayers read their weights between any two junctions. The streams are in the cache, where the link before has just
left them.

Beside it the reference, which is plain torch: in such a graph, compiled in such a graph, and launched by the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor

import mhckit
from mhckit import Mix, Recipe
from mhckit.ops.junction import junction_reference
from mhckit.testing import Call

from .cases import DECODE_BATCH, DECODE_TARGETS, Case
from .chain import Chain, Junction
from .correctness import TOLERANCE_OF_OTHERS, check, check_same_bits
from .launches import device_events
from .results import refusal
from .step import Implementation, mhckit_outputs, used_outputs
from .timing import captured, median_microseconds

LINKS = 20
INPUTS = "a chain: parameters of every link from memory, streams as the link before left them"
COMPILED, HOST = "reference, compiled", "reference, no graph"


@torch.no_grad()
def measure_decode(recipe: str, case: Case, rep: int) -> list[dict[str, Any]]:
    """A line per implementation; nothing is timed unless tokens get the bits that they get in a large batch."""
    call = case.call("junction", recipe=recipe)
    check(mhckit_outputs, call, gradients=False)
    check_same_bits(_batch(recipe, case.channels), case.tokens)
    chain, facts = Chain(call, LINKS), {"kind": "decode", **case.facts(), "recipe": recipe}
    target = {"target_microseconds": DECODE_TARGETS[case.tokens]} if case.tokens in DECODE_TARGETS else {}
    own = _measured(chain, mhckit.junction, rep) | {"same_bits_in": DECODE_BATCH} | target
    reference = _measured(chain, reference_junction, rep)
    lines = [
        facts | {"implementation": "mhckit"} | own,
        facts | {"implementation": "reference"} | reference,
        facts | {"implementation": HOST} | reference | _timed(chain, reference_junction, rep, graph=False),
    ]
    if case.compiled:
        try:
            compiled = compiled_reference()
            check(_outputs_of(compiled), call, TOLERANCE_OF_OTHERS, gradients=False)
            lines.append(facts | {"implementation": COMPILED} | _measured(chain, compiled, rep))
        except Exception as error:
            lines.append(refusal(f"{COMPILED}, {recipe}, {case}", error))
    return lines


def _measured(chain: Chain, junction: Junction, rep: int) -> dict[str, Any]:
    launches = len(device_events(lambda: chain.run(junction, links=1)))
    timed = _timed(chain, junction, rep, graph=True)
    return {**timed, "launches": launches, "links": LINKS, "inputs": INPUTS}


def _timed(chain: Chain, junction: Junction, rep: int, *, graph: bool) -> dict[str, Any]:
    def run() -> object:
        return chain.run(junction)

    microseconds = median_microseconds(captured(lambda: run) if graph else run, rep) / LINKS
    return {"microseconds": round(microseconds, 2), "graph": graph}


def _batch(recipe: Recipe | str, channels: int) -> Call:
    return Case(DECODE_BATCH, channels).call("junction", recipe=recipe)


def reference_junction(
    x: Tensor, f: Tensor, mix: Mix, phi: Tensor, scale: Tensor, bias: Tensor, *, recipe: Recipe
) -> tuple[Tensor, Tensor, Mix]:
    """The formula that specifies the operator: torch.compile does not look into the operator itself."""
    y, x_in, pre, post, res, *_ = junction_reference(
        x=x,
        f=f,
        f_bias=None,
        shifted_pre=mix.pre if recipe.shifted else None,
        post=mix.post,
        res=mix.res,
        phi=phi,
        scale=scale,
        bias=bias,
        norm_weight=None,
        out_norm_weight=None,
        out_norm_eps=1e-6,
        out_dtype=x.dtype,
        recipe=recipe,
    )
    return y, x_in, Mix(pre, post, res.contiguous())  # with other strides the next link would be compiled again


def compiled_reference() -> Junction:
    """For the one shape that it is then called with."""
    torch.compiler.reset()
    return torch.compile(reference_junction, dynamic=False, fullgraph=True)


def _outputs_of(junction: Junction) -> Implementation:
    def outputs(call: Call) -> tuple[Tensor, ...]:
        y, x_in, (pre, post, res) = Chain(call, 1).run(junction)
        return used_outputs(tuple(part for part in (y, x_in, pre, post, res) if part is not None), call.recipe)

    return outputs


@torch.no_grad()
def compile_kernels(recipe: str, channels: int) -> None:
    """Leaves in Triton's cache what mhckit launches for any number of tokens."""
    check_same_bits(_batch(recipe, channels), 1)


@torch.no_grad()
def compile_reference(recipe: str, case: Case) -> None:
    """Leaves in Inductor's cache what `measure_decode` will ask for; in one thread, as many processes do so."""
    with inductor.patch(compile_threads=1):
        Chain(case.call("junction", recipe=recipe), 1).run(compiled_reference())
