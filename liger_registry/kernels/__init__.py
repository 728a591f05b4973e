"""Device code in vendor-neutral Triton, one operation a file, with the functions that launch it.

These modules import Triton and are imported on first use; heuristics and costs live beside them in modules that do not,
because registering an implementation needs those alone.
"""
