"""Inpainting and outpainting: a marked region is made anew, and nothing else."""

import pytest
import torch
from torch.nn import functional as F

from models.muse.small_maskgit import TEXTS, build, each_sampler, inputs_of, tokenizer


@each_sampler
def test_a_region_is_painted_again_and_the_rest_stays(sampler: str):
    maskgit = build(vae=tokenizer())
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    repaint = torch.zeros(2, 16, 16, dtype=torch.bool)
    repaint[0, :6, 3:9], repaint[1, 15, 15] = True, True
    seen = inputs_of(maskgit)
    made = maskgit.generate(TEXTS, images=images, repaint=repaint, sampler=sampler, timesteps=3, seed=0)
    everywhere = repaint[:, None].expand_as(images)
    assert torch.equal(made[~everywhere], images[~everywhere]) and (made != images)[everywhere].any()
    cells = torch.zeros(2, 4, 4, dtype=torch.bool)
    cells[0, :2, :3], cells[1, 3, 3] = True, True  # every cell that a marked pixel lies in
    assert torch.equal((seen[0][:2] == 64).view(2, 4, 4), cells)
    ids, kept = (
        maskgit.generate(TEXTS, images=images, repaint=repaint, timesteps=3, return_ids=True),
        maskgit.tokenize(images),
    )
    assert torch.equal(ids[~cells], kept[~cells])
    nothing = maskgit.generate(TEXTS, images=images, repaint=torch.zeros_like(repaint), sampler=sampler, timesteps=2)
    assert torch.equal(nothing, images)


def test_a_picture_is_extended_over_its_edge():
    maskgit = build(vae=tokenizer())
    small = torch.rand(1, 3, 16, 8, generator=torch.Generator().manual_seed(1))
    repaint = torch.ones(1, 16, 16, dtype=torch.bool)
    repaint[..., :8] = False
    made = maskgit.generate(["a"], images=F.pad(small, (0, 8)), repaint=repaint, timesteps=2, batch_size=2)
    assert made.shape == (2, 3, 16, 16) and torch.equal(made[..., :8], small.expand(2, -1, -1, -1))
    assert not torch.equal(made[0], made[1])


def test_one_picture_may_have_several_regions():
    maskgit, picture = build(vae=tokenizer()), torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    repaint = torch.zeros(3, 16, 16, dtype=torch.bool)
    for row in range(3):
        repaint[row, 4 * row : 4 * row + 4] = True
    made = maskgit.generate(["a"], images=picture, repaint=repaint, timesteps=2, seed=0)
    assert made.shape == (3, 3, 16, 16)
    assert torch.equal((made != picture).any(dim=1).any(dim=2), repaint.any(dim=2))


def test_a_region_that_does_not_fit_is_refused():
    maskgit, images = build(vae=tokenizer()), torch.rand(1, 3, 16, 16)
    with pytest.raises(ValueError, match="belong together"):
        maskgit.generate(["a"], images=images)
    with pytest.raises(ValueError, match="repaint is"):
        maskgit.generate(["a"], images=images, repaint=torch.ones(1, 8, 8, dtype=torch.bool))
    for mask in (torch.ones(1, 16, 16), torch.ones(1, 1, 16, 16, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"repaint must be booleans \[b, h, w\]"):
            maskgit.generate(["a"], images=images, repaint=mask)
    with pytest.raises(ValueError, match="2 and 3 pictures"):
        maskgit.generate(["a", "b"], images=images, repaint=torch.ones(3, 16, 16, dtype=torch.bool))
