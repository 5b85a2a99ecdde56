"""A form for the answer in which the calls that a request insists on surely parse."""

from ropeway.runtime.sampling.structured import StructuredOutputs
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.parsing.choose import ChatFormat
from ropeway.serving.parsing.tools import ToolUse


def constraint(
    form: ChatFormat, use: ToolUse, tokenizer: Tokenizer, prompt_end: str
) -> StructuredOutputs | None:
    """What the text must look like; None where the model is free. `prompt_end` as in
    `make_parser`."""
    return None
