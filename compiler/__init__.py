"""The compiler: checkpoint to IR, IR through passes, IR to artifact. Import its parts by name."""
