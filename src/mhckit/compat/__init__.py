"""The calls of other systems, on mhckit's operators: replacing an import is enough.

One module per system, with its names, signatures, layouts, parameter names and defaults. Each says in its docstring
what differs on purpose.
"""
