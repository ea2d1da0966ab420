"""Every claim of another implementation, measured on the machine at hand: ``mhckit bench --claims``.

data.py has the claims, cases.py what they are about, naive.py what they compare with, measure.py how a figure is
measured, report.py whether it holds.
"""

from .run import run_claims

__all__ = ["run_claims"]
