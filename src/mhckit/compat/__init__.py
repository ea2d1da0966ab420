"""The calls of other systems, on mhckit's operators: replacing an import is enough.

One module per system, with its names, signatures, layouts, parameter names and defaults. Each says in its docstring
what differs on purpose.

The modules compile as one graph (torch.compile with fullgraph=True). So do the functions once they were called, outside
of compilation, with the same number of streams and settings; before that they break the graph.
"""
