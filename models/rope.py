"""Rotary position embeddings and their scalings, as plain functions of positions.

Everything is float32 and differs by position only, so a compiler can tabulate it. `dynamic` gives
position p the frequencies of a sequence of p+1 tokens: what a decoder sees that generates token by
token.
"""

import math

import torch

from ropeway.models.config import RopeConfig


def rope_tables(
    config: RopeConfig, head_dim: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, f32[..., head_dim/2] each, of integer `positions` [...].

    The attention scaling of yarn is multiplied in.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if config.kind == "dynamic":
        angles = positions.float()[..., None] * _dynamic_frequencies(config, head_dim, positions)
    else:
        angles = positions.float()[..., None] * _frequencies(config, head_dim, steps)
    scaling = _attention_scaling(config)
    return angles.cos() * scaling, angles.sin() * scaling


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of `x` [..., head_dim] by `cos` and `sin` [..., head_dim/2]."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def _frequencies(config: RopeConfig, head_dim: int, steps: torch.Tensor) -> torch.Tensor:
    inverse = 1.0 / (config.theta**steps)
    if config.kind == "linear":
        return inverse / config.factor
    if config.kind == "divided":
        return inverse / torch.tensor(config.divisors, dtype=torch.float32)
    if config.kind == "llama3":
        return _llama3_frequencies(config, inverse)
    if config.kind == "yarn":
        return _yarn_frequencies(config, head_dim, config.theta**steps)
    return inverse


def _dynamic_frequencies(
    config: RopeConfig, head_dim: int, positions: torch.Tensor
) -> torch.Tensor:
    """f32[..., head_dim/2]: the base grows with the length once it passes the trained one."""
    length = (positions + 1).clamp(min=config.original_length).float()[..., None]
    stretch = config.factor * length / config.original_length - (config.factor - 1)
    base = config.theta * stretch ** (head_dim / (head_dim - 2))
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (base**steps)


def _llama3_frequencies(config: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelength = 2 * math.pi / inverse
    smooth = (config.original_length / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / config.factor + smooth * inverse
    scaled = torch.where(
        wavelength > config.original_length / low, inverse / config.factor, between
    )
    return torch.where(wavelength < config.original_length / high, inverse, scaled)


def _yarn_frequencies(config: RopeConfig, head_dim: int, waves: torch.Tensor) -> torch.Tensor:
    """Blends kept and slowed frequencies by how often a dimension turns in the trained length."""

    def dimension(rotations: float) -> float:
        turns = config.original_length / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1.0 / (config.factor * waves)) * ramp + (1.0 / waves) * (1 - ramp)


def _attention_scaling(config: RopeConfig) -> float:
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        top = _magnitude(config.factor, config.mscale)
        return top / _magnitude(config.factor, config.mscale_all_dim)
    return _magnitude(config.factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
