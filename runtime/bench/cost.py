"""What one token costs on the cpu target, read off the plan: the weights of its GEMMs."""

import math

from ropeway.compiler.artifact.reader import Artifact
from ropeway.compiler.errors import InputError
from ropeway.compiler.targets.cpu.plan import ITEM_SIZES, TEMPLATE_FILE, decode_template
from ropeway.runtime.bench.plan_cost import packed_matrix
from ropeway.runtime.bench.suite import ModelCost


def model_cost(artifact: Artifact) -> ModelCost:
    """Bytes and flops of a token's GEMMs; norms, attention and lookups are left out.

    A prompt token is counted without the head, which only wanted rows go through. Raises
    InputError when the artifact holds no CPU plan.
    """
    if artifact.manifest.target != "cpu":
        raise InputError(
            f"{artifact.path}: compiled for {artifact.manifest.target}; the bench measures "
            f"programs compiled for cpu"
        )
    template = decode_template(artifact.read(TEMPLATE_FILE))
    body, head, size = 0, 0, 0
    for step in template.steps:
        matrix = packed_matrix(template, step)
        if matrix is None:
            continue
        items = math.prod(matrix.shape)
        size += items * ITEM_SIZES[matrix.dtype]
        if step.operands["y"].index == template.logits.index:
            head += 2 * items
        else:
            body += 2 * items
    return ModelCost(weight_bytes=size, decode_flops=body + head, prompt_flops=body)
