"""The numbers that define a decoder, read from a Hugging Face config.json and checked.

Both spellings of rope settings are read: `rope_scaling` beside `rope_theta`, and the newer
`rope_parameters`; within them both `rope_type` and `type`. A value that makes no sense is a
CheckpointError here, before a module is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ropeway.compiler.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "divided")
_SCALED_FROM_ORIGINAL = ("yarn", "llama3")
_LIMITS = {
    "num_hidden_layers": 1024,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 26,
    "sliding_window": 1 << 26,
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: `kind` is one of ROPE_TYPES; lengths count tokens.

    `original_length` is the length the model was trained for before scaling. Fields that a kind
    doesn't use keep their defaults. `divisors` slow each frequency by a number of its own
    ("divided": how GGUF files store llama3's scaling). `attention_factor` None means the kind's own
    formula.
    """

    kind: str
    theta: float
    original_length: int
    factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class DecoderConfig:
    """A pre-norm decoder with rotary attention and a gated MLP.

    `windows` has one entry a layer: 0 for full attention, w when a token sees itself and the w-1
    tokens before it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_positions: int
    rope: RopeConfig
    windows: tuple[int, ...]
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive int from a config within sane limits; `default` None makes the key required."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise CheckpointError(f"config.json: '{key}' is missing; the model can't be built")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: '{key}' is {value!r}; expected a positive integer")
    limit = _LIMITS.get(key)
    if limit is not None and value > limit:
        raise CheckpointError(f"config.json: '{key}' is {value}; more than {limit} isn't credible")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive finite float from a config; `default` None makes the key required."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise CheckpointError(f"config.json: '{key}' is missing; rope can't be computed")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise CheckpointError(f"config.json: '{key}' is {value!r}; expected a positive number")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A bool from a config."""
    value = config.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: '{key}' is {value!r}; expected true or false")
    return value


def read_rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Rope settings of a config in either spelling; unknown kinds are a CheckpointError."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"config.json: rope settings are {settings!r}; expected an object")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"config.json: rope type {kind!r} is unknown; known are {', '.join(ROPE_TYPES)}"
        )
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(
            f"config.json: partial_rotary_factor {partial!r} isn't part of this architecture"
        )
    original = max_positions
    if kind in _SCALED_FROM_ORIGINAL:
        original = integer(settings, "original_max_position_embeddings", max_positions)
        original = integer(config, "original_max_position_embeddings", original)
    theta = number(settings, "rope_theta", number(config, "rope_theta", 10000.0))
    rope = RopeConfig(kind=kind, theta=theta, original_length=original)
    if kind == "default":
        return rope
    if kind == "divided":
        return replace(rope, divisors=_divisors(settings))
    optional = {
        key: number(settings, key, 0.0) or None
        for key in ("attention_factor", "mscale", "mscale_all_dim")
    }
    return RopeConfig(
        kind=kind,
        theta=theta,
        original_length=original,
        factor=number(settings, "factor", max_positions / original if kind == "yarn" else None),
        attention_factor=optional["attention_factor"],
        beta_fast=number(settings, "beta_fast", 32.0),
        beta_slow=number(settings, "beta_slow", 1.0),
        mscale=optional["mscale"],
        mscale_all_dim=optional["mscale_all_dim"],
        truncate=flag(settings, "truncate", True),
        low_freq_factor=number(settings, "low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=number(settings, "high_freq_factor", None if kind == "llama3" else 4.0),
    )


def _divisors(settings: Mapping[str, Any]) -> tuple[float, ...]:
    values = settings.get("divisors")
    if not isinstance(values, list) or not all(isinstance(v, float) and v > 0 for v in values):
        raise CheckpointError("config.json: 'divisors' must list one number a frequency")
    return tuple(values)


def layer_windows(config: Mapping[str, Any], num_layers: int, *, first: int) -> tuple[int, ...]:
    """Sliding windows by layer: from `layer_types`, else `sliding_window` from layer `first` on."""
    window = config.get("sliding_window")
    window = 0 if window is None else integer(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if i >= first else 0 for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: 'layer_types' must list {num_layers} layers")
    known = {"full_attention": 0, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise CheckpointError(f"config.json: layer type {kind!r} is unknown")
        if kind == "sliding_attention" and not window:
            raise CheckpointError("config.json: layers slide but 'sliding_window' isn't set")
    return tuple(known[kind] for kind in kinds)


def read_config(
    config: Mapping[str, Any],
    *,
    windows: tuple[int, ...] | None = None,
    max_positions: int | None = None,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderConfig:
    """The part of a config that all four architectures share; arguments carry the rest.

    `max_positions`, `head_dim` and `kv_heads` are the architecture's defaults for absent keys.
    """
    heads = integer(config, "num_attention_heads")
    hidden = integer(config, "hidden_size")
    layers = integer(config, "num_hidden_layers")
    kv = integer(config, "num_key_value_heads", kv_heads or heads)
    if heads % kv:
        raise CheckpointError(f"config.json: {heads} heads can't share {kv} key/value heads")
    dim = integer(config, "head_dim", head_dim or max(1, hidden // heads))
    if dim % 2:
        raise CheckpointError(f"config.json: head_dim {dim} is odd; rope rotates pairs")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"config.json: hidden_act {activation!r}; expected 'silu'")
    positions = integer(config, "max_position_embeddings", max_positions)
    rope = read_rope(config, positions)
    if rope.divisors and len(rope.divisors) != dim // 2:
        raise CheckpointError(f"config.json: {len(rope.divisors)} divisors for {dim // 2} angles")
    return DecoderConfig(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=dim,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        activation=activation,
        max_positions=positions,
        rope=rope,
        windows=windows if windows is not None else (0,) * layers,
        tie_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )
