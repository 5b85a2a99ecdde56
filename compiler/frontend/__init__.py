"""From a checkpoint or an nn.Module to IR."""
