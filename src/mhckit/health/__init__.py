"""Is the residual of a model with hyper-connections in good shape? Numbers for a log, sampled while it trains."""

from .health import Health
from .matrices import mean_mixing_matrices

__all__ = ["Health", "mean_mixing_matrices"]
