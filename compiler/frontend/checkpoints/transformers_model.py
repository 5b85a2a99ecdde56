"""transformers' own class for a config.json, built without its weights and without remote code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ropeway.compiler.errors import CheckpointError
from ropeway.compiler.frontend.checkpoints.hf_directory import label

# Above these, building the module would take hours and all memory before a tensor is missed.
_LIMITS = {"num_hidden_layers": 1024, "num_experts": 4096, "num_local_experts": 4096}
_UNFILLED = (torch.empty, torch.rand, torch.randn, torch.empty_like, torch.empty_strided)


class _WithoutParameters(TorchFunctionMode):
    """Puts what torch.empty and random factories make on meta: parameters, which are big.

    Everything computed (rope frequencies, scales, masks) stays real: the importer evaluates it.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in _UNFILLED:
            options["device"] = "meta"
        return func(*args, **options)


def build_transformers_model(path: Path, config: Mapping[str, Any]) -> nn.Module:
    """A causal LM on meta for a directory whose `model_type` isn't one of ours.

    Raises CheckpointError when transformers is absent, doesn't know the type or needs remote code.
    """
    kind = config.get("model_type")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise CheckpointError(
            f"{label(path)}/config.json: model_type {kind!r} needs transformers, which isn't "
            "installed: pip install 'ropeway[import]'"
        ) from error
    if config.get("auto_map") and not _known(kind):
        raise CheckpointError(
            f"{label(path)}/config.json: model_type {kind!r} needs code from the checkpoint, which "
            "is never run; build the module yourself and pass it"
        )
    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=False)
        _check_sizes(path, settings)
        with _WithoutParameters(), torch.device("cpu"):
            model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    except CheckpointError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        raise CheckpointError(
            f"{label(path)}/config.json: transformers can't build a causal LM of model_type "
            f"{kind!r} ({type(error).__name__}: {first[:160]})"
        ) from error
    assert isinstance(model, nn.Module)
    return model.eval()


def _check_sizes(path: Path, settings: Any) -> None:
    for key, limit in _LIMITS.items():
        value = getattr(settings, key, None)
        if isinstance(value, int) and value > limit:
            raise CheckpointError(
                f"{label(path)}/config.json: '{key}' is {value}; more than {limit} isn't credible"
            )


def _known(kind: Any) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    return kind in CONFIG_MAPPING
