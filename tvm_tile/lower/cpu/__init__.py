"""CPU lowering: tile IR to flat vectorised TIR for LLVM."""
