"""What the compiler makes of the kernels, run on an emulated GPU of Hopper's kind: right, free of hazards, the same
bits. Those written in Gluon, which Triton's interpreter does not know, run without a GPU here alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from races import HANDED_ON, places_of

from mhckit.kernels._hopper_launch import HAS_GLUON

SCRIPT = Path(__file__).with_name("emulated.py")
pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="kernels for Hopper are written for one version of Triton")
PLAIN_F1, F1 = "write_project_kernel", "write_project_hopper_kernel"
PLAIN_J, J = "streams_bwd_kernel", "streams_bwd_hopper_kernel"
EIGHT = {"write_project_eight_kernel", "streams_bwd_eight_kernel"}


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TERM": "dumb", "COLUMNS": "1000"}
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def _passes(*arguments: object) -> list[str]:
    """The kernels that ran."""
    result = _run(*arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.split()


@pytest.mark.parametrize(("recipe", "channels", "without"), [
    ("deepseek_v4", 256, "f_bias"),  # a norm, and a weight folded into phi
    ("deepseek_v4", 257, "f_bias"),
    ("deepseek_v41", 256, "f_bias"),  # sums the gradient of the read weights, too, unless there is a norm
    ("deepseek_v41", 257, "f_bias,out_norm_weight"),
    ("hy_v4", 256, "f_bias"),  # keeps every stream as it is
    ("hy_v4", 257, "f_bias"),
    ("projection", 257, "f_bias,norm_weight"),
    ("mhc_lite", 256, "f_bias,out_norm_weight"),  # 32 rows of phi
    ("mhc_lite", 257, "f_bias"),  # for which J has no room
])  # fmt: skip
def test_every_kind_of_recipe_in_the_forms_for_hopper(recipe: str, channels: int, without: str) -> None:
    """A group of tokens that is whole, and one that is hardly there; rows that are aligned, and that begin anywhere."""
    options = ("--tokens", 35, "--channels", channels, "--without", without, "--many")
    launched = _passes("accuracy", "junction", recipe, *options)
    assert F1 in launched and (PLAIN_J if (recipe, channels) == ("mhc_lite", 257) else J) in launched


@pytest.mark.parametrize(("tokens", "channels"), [
    (1, 129), (66, 130), (65, 132), (70, 384), (66, 362), (35, 367), (3, 1155),
])  # fmt: skip
def test_sizes_in_the_forms_for_hopper(tokens: int, channels: int) -> None:
    """One token, several programs, groups that are not there; several steps, of which the last may have less than a
    vector of channels, sums over channels, and programs that share them.
    """
    options = ("--tokens", tokens, "--channels", channels, "--without", "f_bias,out_norm_weight")
    assert J in _passes("accuracy", "junction", "deepseek_v4", *options)


@pytest.mark.parametrize(("recipe", "tokens", "channels", "without"), [
    ("deepseek_v4", 70, 128, "f_bias"),  # several programs, a norm, and a weight folded into phi
    ("deepseek_v41", 5, 384, "f_bias,out_norm_weight"),  # sums the gradient of the read weights, too
    ("deepseek_v41", 1, 128, "f_bias"),
])  # fmt: skip
def test_eight_streams(recipe: str, tokens: int, channels: int, without: str) -> None:
    options = ("--tokens", tokens, "--channels", channels, "--without", without, "--streams", 8)
    launched = _passes("accuracy", "junction", recipe, *options)
    assert set(launched) >= EIGHT


def test_whoever_takes_turns() -> None:
    """Warps in another order."""
    options = ("--tokens", 3, "--channels", 257, "--without", "f_bias", "--seed", 1)
    assert J in _passes("accuracy", "junction", "deepseek_v41", *options)


@pytest.mark.parametrize(("operator", "channels"), [
    ("enter", 200), ("enter", 257), ("leave", 200), ("coefficients", 200), ("project", 257), ("pre", 257),
    ("post", 200), ("head", 257), ("expand", 200),
])  # fmt: skip
def test_every_operator_in_plain_triton(operator: str, channels: int) -> None:
    launched = _passes("accuracy", operator, "deepseek_v4", "--tokens", 5, "--channels", channels)
    assert launched and not {F1, J} & set(launched)


@pytest.mark.parametrize("options", [
    ("deepseek_v4", "--channels", 256),  # a bias of f
    ("deepseek_v4", "--channels", 64, "--dtype", "float32"),
    ("deepseek_v4", "--channels", 64, "--dtype", "float16"),
    ("deepseek_v4", "--channels", 64, "--streams", 2),
    ("deepseek_v4", "--channels", 64, "--streams", 8),
    ("megatron", "--channels", 192),
    ("mhc_lite", "--channels", 192),
])  # fmt: skip
def test_junctions_in_plain_triton(options: tuple[object, ...]) -> None:
    launched = _passes("accuracy", "junction", *options, "--tokens", 5)
    assert PLAIN_F1 in launched and PLAIN_J in launched


@pytest.mark.parametrize(("tokens", "channels", "rows"), [(1, 128, 24), (70, 384, 24), (33, 256, 32), (5, 1152, 9)])
def test_both_forms_of_f1_have_the_same_bits(tokens: int, channels: int, rows: int) -> None:
    _passes("forms", tokens, channels, "--rows", rows)


@pytest.mark.parametrize(("channels", "streams"), [(384, 4), (257, 4), (256, 8)])
def test_j_has_the_same_bits_however_programs_share_the_channels(channels: int, streams: int) -> None:
    _passes("shares", channels, "--streams", streams)


@pytest.mark.parametrize(("channels", "streams"), [(128, 4), (129, 4), (128, 8)])
def test_a_token_alone_and_in_a_batch(channels: int, streams: int) -> None:
    launched = _passes("alone", channels, "--streams", streams)
    assert set(launched) >= (EIGHT if streams == 8 else {PLAIN_F1 if channels % 8 == 0 else F1, J})


@pytest.mark.parametrize(("channels", "streams"), [(256, 4), (257, 4), (362, 4), (256, 8)])
def test_nan_stays_in_its_token(channels: int, streams: int) -> None:
    """Where rows begin anywhere, a step's last places hold what follows its channels: the next token's row."""
    launched = _passes("strange", channels, "--streams", streams)
    assert set(launched) >= (EIGHT if streams == 8 else {F1, J})


@pytest.mark.parametrize(("what", "message"), [
    ("fence of y in F1", "error nan"),  # the tensor cores read what may not have been stored
    ("fence of phi in F1", "error nan"),
    ("fence of barriers in F1", "without a fence"),
    ("fence of J", "without a fence"),
    ("fence of F1 for eight streams", "without a fence"),
    ("fence of J for eight streams", "without a fence"),
    ("matrices of J for eight streams", "allowed; relative error"),
    ("rows of dz in J", "allowed; relative error"),
    ("rows of staged dz in J", "allowed; relative error"),
    ("ends of rows in F1", "error nan"),
    ("ends of rows in J", "error nan"),
    ("ends of steps in F1", "error nan"),
    ("ends of phi in F1", "error nan"),
    ("ends of dots in F1", "a sum of tensor cores was overwritten"),
    ("ends of dots in P", "error nan"),
])  # fmt: skip
def test_what_is_broken_is_seen(what: str, message: str) -> None:
    result = _run("broken", what)
    assert result.returncode != 0 and message in result.stderr, result.stderr[-3000:]


@pytest.mark.parametrize(("what", "pair"), [("F1", 1), ("J", 2), ("J for eight streams", 3)])
def test_groups_whose_warps_do_not_meet(what: str, pair: int) -> None:
    """Of what they hand on one access is found, of those that racecheck takes for races where the warps do meet."""
    result = _run("broken", f"meetings of groups in {what}")
    message = " ".join(result.stderr.split())
    assert result.returncode != 0 and "nothing orders the two" in message, result.stderr[-3000:]
    for places in places_of(HANDED_ON[pair]):
        assert any(place in message.rsplit("Hazard:")[-1] for place in places), (places, message[-500:])
