"""Other engines measured against Ropeway, alternating in one run: `make bench-peers`."""
