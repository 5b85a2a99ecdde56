"""Our model definitions against transformers', at every position, in float32."""

import pytest
import torch
from support.zoo import (
    ORIGINAL,
    OURS,
    ROPES,
    oracle_logits,
    oracle_logits_decoding,
    some_ids,
    tiny_config,
    tiny_model,
)

from ropeway.compiler.errors import CheckpointError
from ropeway.models.registry import build_model

LENGTH = 4 * ORIGINAL


def own_logits(kind: str, rope: str, spelling: str, ids: torch.Tensor) -> torch.Tensor:
    """Logits of our module with the weights of transformers' one."""
    model = build_model(tiny_config(kind, rope, spelling=spelling))
    model.load_state_dict(tiny_model(kind, rope).state_dict(), assign=True, strict=True)
    with torch.no_grad():
        return model(ids[None].long())[0]


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("rope", [rope for rope in ROPES if rope != "dynamic"])
@pytest.mark.parametrize("kind", OURS)
def test_every_position_agrees(kind: str, rope: str, spelling: str) -> None:
    """64 positions: 0, 1, orig-1, orig and orig*factor-1 are among them."""
    ids = some_ids(LENGTH)
    wanted = oracle_logits(tiny_model(kind, rope), ids)
    got = own_logits(kind, rope, spelling, ids)
    assert wanted.abs().max() > 1
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", OURS)
def test_dynamic_rope_agrees_with_decoding_token_by_token(kind: str) -> None:
    ids = some_ids(LENGTH)
    wanted = oracle_logits_decoding(tiny_model(kind, "dynamic"), ids)
    got = own_logits(kind, "dynamic", "rope_parameters", ids)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_scaled_ropes_differ_from_the_default() -> None:
    """The oracle isn't blind: each variant changes the logits at the last position."""
    ids = some_ids(LENGTH)
    plain = oracle_logits(tiny_model("llama"), ids)
    for rope in ROPES:
        if rope != "default":
            changed = own_logits("llama", rope, "rope_parameters", ids)
            assert (changed[-1] - plain[-1]).abs().max() > 1e-2, rope


@pytest.mark.parametrize(("window", "same_at"), [(7, 6), (8, 7)])
def test_the_window_counts_the_token_itself(window: int, same_at: int) -> None:
    """A window of w leaves position w-1 as with full attention and changes position w."""
    ids = some_ids(12)
    config = tiny_config("mistral", sliding_window=window, num_hidden_layers=1)
    state = tiny_model("mistral", sliding_window=window, num_hidden_layers=1).state_dict()
    logits = []
    for changes in ({}, {"sliding_window": None}):
        model = build_model(config | changes)
        model.load_state_dict(state, assign=True)
        with torch.no_grad():
            logits.append(model(ids[None].long())[0])
    torch.testing.assert_close(logits[0][: same_at + 1], logits[1][: same_at + 1])
    assert (logits[0][same_at + 1] - logits[1][same_at + 1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "heads"),
        ({"head_dim": 7}, "odd"),
        ({"hidden_act": "mystery"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral' is unknown"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_parameters": [1]}, "rope settings"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "abacus"}, "abacus"),
        ({"hidden_size": None}, "missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_absurd_configs_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        build_model(tiny_config("llama") | changes)
