"""What each op means: a function on torch tensors, computed in float32. The oracle of all targets.

Only this package, the interpreter and the weight functions import torch among the ops.
"""
