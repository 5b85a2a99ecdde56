"""Which of several choices are answered."""

from collections.abc import Sequence

from ropeway.runtime.outputs import CompletionOutput


def best(choices: Sequence[CompletionOutput], n: int) -> Sequence[CompletionOutput]:
    """The n choices with the highest logprob a token, best first; all in their order if n is all.

    That is what OpenAI's best_of documents. Equal ones keep their order.
    """
    if n == len(choices):
        return choices

    def mean(choice: CompletionOutput) -> float:
        return (choice.cumulative_logprob or 0.0) / max(len(choice.token_ids), 1)

    return sorted(choices, key=mean, reverse=True)[:n]
