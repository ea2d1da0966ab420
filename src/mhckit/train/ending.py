"""What a run leaves behind when it ends: its report. That none could be written is said, and fails no run."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mhckit.health import mean_mixing_matrices
from mhckit.modules import HyperConnection

from .build import attention_backend
from .data import batch
from .distributed import forward_alone
from .report import write_report
from .run_folder import RunFolder, read_metrics
from .step import Stepper


def leave_report(folder: RunFolder, stepper: Stepper, say: Callable[[str], None], remark: str = "") -> None:
    """Write report.html from all lines of the run, also those from before it was interrupted; in the first process."""
    if stepper.here.rank:
        return
    matrices = None
    try:
        matrices = _mixing_matrices(stepper)
    except Exception as error:
        say(f"the report has no mixing matrices: {_in_a_line(error)}")
    try:
        path = write_report(folder.report, stepper.config, read_metrics(folder.metrics_file), matrices, remark)
        say(f"report: {path}")
    except Exception as error:
        say(f"no report was written: {_in_a_line(error)}")


def _mixing_matrices(stepper: Stepper) -> dict[str, Tensor] | None:
    """Of one sequence that is held out. Not of a model that other processes hold parts of: they have left already."""
    config, here, model = stepper.config, stepper.here, stepper.model
    if config.model.recipe is None or here.world > 1:
        return None
    tokens = stepper.corpus.validation
    pair = batch(tokens, seq_len=config.seq_len, batch_size=1, seed=config.seed, step=0, rank=0, world=1)
    inputs, targets = (tensor.to(here.device) for tensor in pair)
    with forward_alone(model), attention_backend(config, here):
        matrices = mean_mixing_matrices(model, inputs, targets)
    names = [name for name, module in model.named_modules() if isinstance(module, HyperConnection)]
    return dict(zip(names, matrices.unbind(), strict=True))


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
