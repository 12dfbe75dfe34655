"""Compiles whole evaluations of a velocity, for two lengths, and compares what they make with what plain ones make."""

import sys
import warnings

import torch

from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.model import VoiceBox
from helicon.models.voicebox.solving import Evaluator


def build() -> ConditionalFlowMatcherWrapper:
    torch.manual_seed(0)
    voicebox = VoiceBox(
        num_cond_tokens=7, dim_in=5, dim=16, depth=2, heads=2, dim_head=8, dim_cond_emb=8, time_hidden_dim=12, text_depth=1
    )  # fmt: skip
    with torch.no_grad():
        for parameter in voicebox.parameters():  # gates are closed at first
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1))
    return ConditionalFlowMatcherWrapper(voicebox)


def main() -> None:
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)  # the compiler's own, when it is imported
    torch.set_num_threads(1)
    flow, compiling = build(), Evaluator(compile=True)
    ids = torch.randint(7, (2, 3))
    for lengths in ([9, 9], [9, 6]):
        made = []
        for evaluator in (compiling, Evaluator()):
            flow.evaluator = evaluator
            made.append(flow.draw(text_token_ids=ids, lengths=lengths, steps=3, cond_scale=2.0, seed=0).features)
        torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)
    assert len(compiling._sessions) == 2
    assert (
        torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    )  # for each length one, of all that an evaluation does
    sys.stdout.write("speaks\n")


if __name__ == "__main__":
    main()
