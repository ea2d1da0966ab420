"""Measurements: what every kernel and operator takes, beside what its bytes take at the copy ceiling of the same run."""
