"""One module an op: its :class:`~tvm_tile.ops.registry.OpSpec`, with the reference in plain torch."""
