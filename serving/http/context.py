"""What every endpoint is given: the engine's client, the settings, the counters."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ropeway.serving.errors import ApiError
from ropeway.serving.settings import ServerSettings

if TYPE_CHECKING:
    from ropeway.serving.http.log import Log
    from ropeway.serving.http.metrics import Metrics
    from ropeway.serving.process.client import EngineClient


@dataclass(slots=True)
class ServerContext:
    """One server. `started` is in seconds since the epoch, as OpenAI's `created` fields are."""

    client: "EngineClient"
    settings: ServerSettings
    metrics: "Metrics"
    log: "Log"
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests may call the model. Raises ApiError 503 while that isn't known yet."""
        return self.settings.served_model_name or (self.client.info.model,)

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.model_names[0]

    def check_model(self, name: str | None) -> str:
        """The name to answer with for a request's `model`; None means the only one there is.

        Raises ApiError 404, as OpenAI does, for a name that isn't served.
        """
        if name is None:
            return self.model_name
        if name in self.model_names:
            return name
        raise ApiError(
            404,
            f"model: {name!r} isn't served here, but {', '.join(map(repr, self.model_names))}",
            param="model",
            code="model_not_found",
        )
