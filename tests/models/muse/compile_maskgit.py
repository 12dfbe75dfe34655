"""Compiles what trains a MaskGit as one graph, and the steps that make its tokens; compares both with eager ones."""

import sys
import warnings

import torch

from helicon.models.muse.generate import Filler
from helicon.models.muse.maskgit import MaskGit
from helicon.models.muse.transformer import MaskGitTransformer

BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}


def build() -> MaskGit:
    torch.manual_seed(0)
    transformer = MaskGitTransformer(
        num_tokens=64, dim=16, seq_len=16, depth=2, heads=2, dim_head=8, t5_name=BYTES, self_cond=True
    )
    with torch.no_grad():
        transformer.token_emb.own.weight[-1] = 0  # of the mask: places differ in nothing else than their positions
        transformer.token_emb.own.weight.mul_(5)  # clear preferences, which rounding does not change
    return MaskGit(16, transformer, self_token_critic=True, no_mask_token_prob=0.1)


def losses_of(maskgit: MaskGit, compiles: bool) -> list[torch.Tensor]:
    """The losses and gradients of two batches; a graph break or a wait for the device would be an error."""
    network = torch.compile(maskgit, fullgraph=True, backend="aot_eager") if compiles else maskgit
    found = []
    for seed, texts in enumerate((["a red circle", "blue"], ["x", "longer than any other one"])):
        torch.manual_seed(seed)
        ids = torch.randint(64, (2, 16))
        losses = network(ids, **maskgit.transformer.read_texts(texts, 16), return_losses=True)
        maskgit.zero_grad()
        losses.total.backward()
        found += [*losses, *(parameter.grad for parameter in maskgit.parameters())]
    return found


def main() -> None:
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)  # the compiler's own, when it is imported
    torch.set_num_threads(1)
    torch.testing.assert_close(losses_of(build(), True), losses_of(build(), False))
    sys.stdout.write("learns\n")
    maskgit, texts = build().eval(), ["a red circle", "blue"]
    for options in ({}, {"sampler": "halton"}, {"force_not_use_token_critic": True}):
        made = []
        for filler in (Filler(compile=True), Filler()):
            maskgit.filler = filler
            made.append(maskgit.generate(texts, timesteps=4, seed=0, return_ids=True, **options))
        assert torch.equal(*made), options
    sys.stdout.write("makes\n")


if __name__ == "__main__":
    main()
