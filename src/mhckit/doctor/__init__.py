"""mhckit doctor: what is installed, which implementation runs, whether it is right and fast, and what to do if not."""

from .examine import examine
from .findings import Finding, exit_code

__all__ = ["Finding", "examine", "exit_code"]
