"""What runs in each engine's own environment: one module an engine, each a program.

A module brings a class that loads its engine and hands it to `serving.serve`; everything else is
shared. Only the standard library and the engine itself may be imported here.
"""
