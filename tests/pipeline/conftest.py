import pytest
from support.decoder_text import Shape, decoder_text

from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ops.text import read_module


@pytest.fixture
def module() -> Module:
    """One layer of a decoder, as imported."""
    return read_module(decoder_text(Shape(layers=1)))
