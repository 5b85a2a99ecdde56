"""Run any state of a module on one random sequence, so that states can be compared.

Whatever stage a module is at, the same question is asked of it: the logits of every token of one
sequence. A module before fuse-attention gets ids and positions; a paged one also gets caches filled
with NaN and a scrambled block table; one that takes rows is asked for all of them. The weights are
random: each weight expression of the starting module counts as one unknown tensor, so passes may
rewrite expressions, but the result must be made of those unknowns.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch

from ropeway.compiler.errors import RunError
from ropeway.compiler.ir.graph import Function, Module, Value
from ropeway.compiler.ir.printer import print_expr
from ropeway.compiler.ir.types import CacheType, DType, TensorType
from ropeway.compiler.ir.weights import Apply, Ckpt, WeightExpr
