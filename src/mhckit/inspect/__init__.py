"""What happens inside a model with hyper-connections: numbers, findings in plain language, and a page of pictures."""

from .inspection import inspect_source
from .measured import Finding, Inspection, Spread, Sublayer, from_json, to_json

__all__ = ["Finding", "Inspection", "Spread", "Sublayer", "from_json", "inspect_source", "to_json"]
