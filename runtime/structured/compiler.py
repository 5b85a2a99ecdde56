"""Grammars of one model's vocabulary: the bridge from its tokenizer, and a cache by content."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.structured import FIELD, StructuredOutputs
from ropeway.runtime.structured.grammar import Grammar
from ropeway.runtime.structured.source import grammar_source
from ropeway.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CACHED_GRAMMARS = 128


class GrammarCompiler:
    """Compiles what requests ask of their text; safe to call from several threads.

    llguidance is imported, and the vocabulary's trie is built, when the first grammar comes: a
    quarter of a second for 50,000 tokens.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer] | None,
        vocab_size: int,
        eos_ids: Sequence[int] = (),
    ) -> None:
        """`tokenizer` gives the model's when the first grammar comes; None: it has none. Of
        `vocab_size` logits those beyond the tokenizer's ids are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = [token for token in eos_ids if token < vocab_size]
        self._bridge: LLTokenizer | None = None
        self._building = threading.Lock()
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        self._looking = threading.Lock()

    def compile(self, structured: StructuredOutputs) -> Grammar:
        """The grammar, from the cache when it was compiled before.

        Raises RequestError, naming the field, for one that can't be compiled, that is too large or
        that nothing matches, and for a model whose tokenizer can't be constrained.
        """
        given: Any = structured
        if not isinstance(given, StructuredOutputs):
            raise RequestError(FIELD, f"must be a StructuredOutputs, not {type(given).__name__}")
        source = grammar_source(structured)
        with self._looking:
            if found := self._cache.get(source):
                self._cache.move_to_end(source)
                return found
        grammar = Grammar.compile(self._vocabulary(), source, structured.kind)
        with self._looking:
            self._cache[source] = grammar
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return grammar

    def _vocabulary(self) -> "LLTokenizer":
        if self._tokenizer is None:
            raise RequestError(FIELD, "this model has no tokenizer: compile it from a checkpoint")
        if not self._eos_ids:
            raise RequestError(FIELD, "this model has no end token, which a form of text needs")
        with self._building:
            if self._bridge is None:
                from llguidance import LLTokenizer  # noqa: PLC0415

                try:
                    self._bridge = LLTokenizer(
                        self._tokenizer().serialized(),
                        n_vocab=self._vocab_size,
                        eos_token=self._eos_ids,
                    )
                except ValueError as error:
                    raise RequestError(
                        FIELD, f"this model's tokenizer can't be constrained: {error}"
                    ) from error
            return self._bridge
