"""The reference device: the interpreter behind the device interface."""
