"""What the importer doesn't know is refused in one line: the op, its source line, what to do."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.zoo import save_tiny, tiny_model
from torch import nn
from torch.nn import functional

from ropeway.compiler.driver.import_model import import_model
from ropeway.compiler.errors import CheckpointError, ImportModelError, InputError


class Toy(nn.Module):
    """One attention between an embedding and a head; `body` is what is under test."""

    def __init__(self, body: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)
        self.body = body

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids), ids))


def attend(x: torch.Tensor, **options: object) -> torch.Tensor:
    heads = x.view(1, x.shape[1], 2, 4).transpose(1, 2)
    out = functional.scaled_dot_product_attention(heads, heads, heads, **options)
    return out.transpose(1, 2).reshape(1, x.shape[1], 8)


def square(x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(x.shape[1])
    return at[:, None] - at[None, :]


REFUSED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], str]] = {
    "unknown op": (lambda x, ids: torch.erfinv(x), r"aten\.erfinv.*test_refusals\.py:\d+"),
    "two-sided attention": (lambda x, ids: attend(x), "only causal models compile"),
    "odd mask": (
        lambda x, ids: attend(x, attn_mask=(square(x) >= 0) & (square(x) % 2 == 0)),
        "neither causal nor a causal sliding",
    ),
    "future": (lambda x, ids: attend(x, attn_mask=square(x) >= -1), "neither causal nor"),
    "alibi": (
        lambda x, ids: attend(x, attn_mask=torch.where(square(x) >= 0, -0.5 * square(x), -1e9)),
        "adds biases to scores",
    ),
    "mask by token": (
        lambda x, ids: attend(x, attn_mask=(square(x) >= 0) & (ids[:, None, :] != 3)),
        r"aten\.ne.*isn't supported on values that depend on tokens",
    ),
    "hand-made attention": (
        lambda x, ids: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
        "scaled_dot_product_attention",
    ),
    "mean over tokens": (lambda x, ids: x + x.mean(1, keepdim=True), "mixes positions"),
    "first token": (lambda x, ids: x + x[:, :1], "slice of the sequence"),
    "shift": (lambda x, ids: x + torch.roll(x, 1, 1), r"aten\.roll"),
    "flattened": (lambda x, ids: x + x.reshape(1, -1)[:, :1, None], "merges or splits tokens"),
    "branch on values": (lambda x, ids: x if bool(x.sum() > 0) else -x, "can't be traced"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unknown_structures_are_refused_by_name(kind: str) -> None:
    body, words = REFUSED[kind]
    with pytest.raises(ImportModelError, match=words) as caught:
        import_model(Toy(body), dtype="f32", max_model_len=64)
    assert "\n" not in str(caught.value)
    assert str(Path(__file__).parent) not in str(caught.value)


def test_the_toy_itself_imports() -> None:
    imported = import_model(Toy(lambda x, ids: attend(x, is_causal=True)), max_model_len=64)
    assert imported.vocab_size == 20
    assert imported.architecture == "Toy"
    locs = {op.loc for op in imported.module.fn.ops}
    assert all("test_refusals.py:" in loc for loc in locs)
    assert not any(loc.startswith("/") for loc in locs)


def test_a_module_on_meta_has_no_values() -> None:
    with torch.device("meta"):
        module = Toy(lambda x, ids: x)
    with pytest.raises(CheckpointError, match="meta device"):
        import_model(module)


def test_a_model_without_sdpa_says_so() -> None:
    from transformers import BloomConfig, BloomForCausalLM  # noqa: PLC0415

    model = BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ImportModelError, match="scaled_dot_product_attention"):
        import_model(model)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (3, "int is neither a path"),
        ("/no/such/place", "no such file or directory"),
        ("nothing-here", "no such file or directory"),
        ("some-org/some-model", "can't be fetched|huggingface_hub"),
    ],
)
def test_what_is_not_a_model_is_refused(
    model: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=words) as caught:
        import_model(model)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_other_dtypes_and_lengths_are_refused() -> None:
    module = Toy(lambda x, ids: attend(x, is_causal=True))
    with pytest.raises(InputError, match="dtype"):
        import_model(module, dtype="int4")
    with pytest.raises(InputError, match="max_model_len"):
        import_model(module, max_model_len=1)


@pytest.mark.parametrize(
    ("rope", "longest"),
    # The config's 64 tokens, 4 times as many, and yarn's 16 original ones, times 4.
    [("default", 64), ("llama3", 64), ("linear", 256), ("yarn", 64), ("dynamic", None)],
)
@pytest.mark.parametrize("ours", [True, False])
def test_lengths_beyond_the_model_are_refused(
    rope: str, longest: int | None, ours: bool, tmp_path: Path
) -> None:
    model: object = save_tiny(tmp_path / "m", "llama", rope) if ours else tiny_model("llama", rope)
    if longest is None:
        assert import_model(model, max_model_len=1000).max_model_len == 1000  # type: ignore[arg-type]
        return
    assert import_model(model, max_model_len=longest).max_model_len == longest  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"max_model_len: {longest + 1} .* at most {longest},"):
        import_model(model, max_model_len=longest + 1)  # type: ignore[arg-type]


def test_yarn_reaches_beyond_the_configs_length() -> None:
    model = tiny_model("llama", "yarn", max_position_embeddings=16)
    assert import_model(model, max_model_len=64).max_model_len == 64
    with pytest.raises(InputError, match=r"made for 16 .* reaches 64 by its rope scaling"):
        import_model(model, max_model_len=65)


def test_a_mixture_of_experts_is_called_so() -> None:
    class Config:
        num_local_experts = 4

    toy = Toy(lambda x, ids: x * torch.topk(x, 1).values)
    toy.config = Config()  # type: ignore[assignment]
    with pytest.raises(ImportModelError, match=r"Toy is a mixture of experts .*aten\.topk"):
        import_model(toy)


def test_a_class_is_no_model() -> None:
    with pytest.raises(InputError, match="Linear is a class: pass an instance"):
        import_model(nn.Linear)  # type: ignore[arg-type]


def test_torch_logs_nothing_beside_the_error(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    try:
        with pytest.raises(ImportModelError, match=r"\[3, 3\]\. Its forward"):
            import_model(nn.Linear(3, 3))
    finally:
        log.removeHandler(caplog.handler)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_float64_modules_are_refused() -> None:
    with pytest.raises(ImportModelError, match=r"is f64|is float64"):
        import_model(Toy(lambda x, ids: attend(x, is_causal=True)).double())
