"""torch.export graph to token-major IR."""
