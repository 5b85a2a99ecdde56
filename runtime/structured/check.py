"""What a grammar may cost, and whether one can be compiled at all, without a vocabulary.

Nothing here imports numpy: the process that takes requests asks too.
"""

import functools
from typing import TYPE_CHECKING

from ropeway.runtime.sampling.structured import StructuredOutputs
from ropeway.runtime.structured.source import grammar_source, refusal

if TYPE_CHECKING:
    from llguidance import LLParserLimits


@functools.cache
def limits() -> "LLParserLimits":
    """What one grammar may cost; those left out are llguidance's own.

    A grammar of 20,000 symbols takes a second or two to compile. A step of the parser ends after
    50,000 items or 200,000 units of the lexer's work, 15 ms at the most; a lexer's states take 1 to
    2 kB each.
    """
    from llguidance import LLParserLimits  # noqa: PLC0415

    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=20_000, verbose_errors=False)


def check_structured(structured: StructuredOutputs) -> None:
    """Raises RequestError for what can't be compiled whatever the vocabulary: no tokenizer needed.

    A grammar that passes may still be refused with the vocabulary: for a special token that this
    one lacks, or since no text matches. Takes about as long as compiling, so it is for a thread.
    """
    from llguidance import LLMatcher  # noqa: PLC0415

    source = grammar_source(structured)
    failed, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=limits())
    if failed:
        raise refusal(structured.kind, messages[0])
