"""Measurements: what kernels and operators take, beside what their bytes take at the copy ceiling of the same run."""
