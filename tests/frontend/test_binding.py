"""Pairing parameters with tensors: ties, prefixes, leftovers; nothing wrong stays silent."""

import pytest
import torch
from torch import nn

from ropeway.compiler.errors import CheckpointError
from ropeway.compiler.frontend.checkpoints.binding import bind
from ropeway.compiler.frontend.imported import TensorDict


class Tied(nn.Module):
    """An embedding and a head, one parameter if `tie`."""

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.lm_head = nn.Linear(3, 5, bias=False)
        if tie:
            self.lm_head.weight = self.embed.weight


EMBED, HEAD = torch.full((5, 3), 1.0), torch.full((5, 3), 2.0)


def source(**tensors: torch.Tensor) -> TensorDict:
    return TensorDict({name.replace("__", "."): tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("tie", "stored", "values"),
    [
        (True, {"embed__weight": EMBED}, (1.0, 1.0)),
        (True, {"lm_head__weight": HEAD}, (2.0, 2.0)),
        (True, {"embed__weight": EMBED, "lm_head__weight": EMBED.clone()}, (1.0, 1.0)),
        (False, {"embed__weight": EMBED, "lm_head__weight": HEAD}, (1.0, 2.0)),
    ],
)
def test_heads_are_what_the_checkpoint_says(
    tie: bool, stored: dict[str, torch.Tensor], values: tuple[float, float]
) -> None:
    bound = bind(Tied(tie), source(**stored), tied=tie)
    got = tuple(float(bound.get(name)[0, 0]) for name in ("embed.weight", "lm_head.weight"))
    assert got == values


@pytest.mark.parametrize(
    ("tie", "stored", "words"),
    [
        (False, {"embed__weight": EMBED}, "no 'lm_head.weight'.*tie_word_embeddings"),
        (True, {"embed__weight": EMBED, "lm_head__weight": HEAD}, "differ"),
        (True, {}, "lacks"),
        (True, {"embed__weight": EMBED[:4]}, r"shape \[4, 3\].*\[5, 3\]"),
        (True, {"embed__weight": EMBED.to(torch.int8)}, "int8"),
        (True, {"embed__weight": EMBED, "more": HEAD}, "doesn't have, e.g. 'more'"),
        (True, {"embed__weight": EMBED, "embed__qweight": HEAD}, "quantized"),
    ],
)
def test_anything_else_is_refused(tie: bool, stored: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        bind(Tied(tie), source(**stored), tied=tie)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused_when_read(bad: float) -> None:
    broken = EMBED.clone()
    broken[2, 1] = bad
    bound = bind(Tied(True), source(embed__weight=broken), tied=True)
    with pytest.raises(CheckpointError, match=r"'embed\.weight' holds NaN or infinity"):
        bound.get("lm_head.weight")


def test_a_base_model_prefix_may_be_missing() -> None:
    module = nn.ModuleDict({"model": nn.ModuleDict({"layer": nn.Linear(2, 2, bias=False)})})
    bound = bind(module, source(layer__weight=torch.eye(2)), prefix="model", tied=False)
    assert torch.equal(bound.get("model.layer.weight"), torch.eye(2))
