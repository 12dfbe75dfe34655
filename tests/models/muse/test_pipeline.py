from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import helicon
from helicon.models.muse.maskgit import MaskGit
from helicon.models.muse.pictures import Picture, PictureMaker
from helicon.models.muse.pipeline import Muse, pil_images
from helicon.models.muse.transformer import MaskGitTransformer
from helicon.models.muse.vqgan import VQGanVAE

BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
TEXTS = ["a", "bb"]


def maskgit(image_size: int, cond_image_size: int | None = None, channels: int = 3, **condition: Any) -> MaskGit:
    torch.manual_seed(image_size)
    vae = VQGanVAE(dim=8, layers=2, encdec_resnet_groups=4, codebook_size=16, channels=channels)
    condition = condition or {"t5_name": BYTES}
    transformer = MaskGitTransformer(
        num_tokens=16, dim=20, seq_len=(image_size // 4) ** 2, depth=1, heads=2, dim_head=6, **condition
    )
    return MaskGit(image_size, transformer, vae=vae, cond_image_size=cond_image_size)


def steps_of(network: MaskGit) -> list[int]:
    steps: list[int] = []
    network.transformer.register_forward_pre_hook(lambda module, inputs: steps.append(len(inputs[0])))
    return steps


def test_two_pictures_from_two_texts():
    muse = Muse(maskgit(16), maskgit(32, 16))
    pictures = muse(TEXTS, timesteps=2)
    assert isinstance(pictures, list) and [picture.size for picture in pictures] == [(32, 32)] * 2
    large, small = muse(TEXTS, timesteps=2, return_lowres=True)
    assert ([p.size for p in large], [p.size for p in small]) == ([(32, 32)] * 2, [(16, 16)] * 2)
    tensors = muse(TEXTS, timesteps=2, return_lowres=True, return_pil_images=False, seed=0)
    assert [tuple(t.shape) for t in tensors] == [(2, 3, 32, 32), (2, 3, 16, 16)]
    expected = muse.base_maskgit.generate(TEXTS, timesteps=2, seed=0)
    assert torch.equal(tensors[1], expected)
    assert torch.equal(tensors[0], muse.superres_maskgit.generate(TEXTS, cond_images=expected, timesteps=2, seed=0))


def test_each_stage_has_its_number_of_steps():
    muse = Muse(maskgit(16), maskgit(32, 16))
    base, superres = steps_of(muse.base_maskgit), steps_of(muse.superres_maskgit)
    muse(TEXTS, timesteps=3, superres_timesteps=2, cond_scale=1.0)
    assert (base, superres) == ([2] * 3, [2] * 2)
    muse(TEXTS, timesteps=4)
    assert (base[3:], superres[2:]) == ([4] * 4, [4] * 4)


def test_colours_are_clamped_before_they_become_bytes(monkeypatch: pytest.MonkeyPatch):
    """D-X5: in the reference 1.02 becomes pixel 4, bright speckle in dark."""
    picture = torch.tensor([[1.02, -0.02], [1.0, 0.5]]).expand(1, 3, 2, 2)
    assert np.asarray(pil_images(picture)[0])[..., 0].tolist() == [[255, 0], [255, 128]]
    muse = Muse(maskgit(16), maskgit(32, 16))
    vae = muse.superres_maskgit.vae
    monkeypatch.setattr(vae, "decode_from_ids", lambda ids: torch.full((len(ids), 3, 32, 32), 1.02))
    assert all((np.asarray(picture) == 255).all() for picture in muse(TEXTS, timesteps=1))


def test_grey_pictures():
    muse = Muse(maskgit(16, channels=1), maskgit(32, 16, channels=1))
    assert [picture.mode for picture in muse(["a"], timesteps=1)] == ["L"]


def test_saved_is_loaded_with_all_stages(tmp_path: Path):
    muse = Muse(maskgit(16), maskgit(32, 16))
    muse.save_pretrained(tmp_path / "muse")
    loaded: Any = helicon.load(tmp_path / "muse")
    one, other = (m(TEXTS, timesteps=2, seed=1, return_pil_images=False) for m in (muse, loaded))
    assert torch.equal(one, other)


def test_the_second_must_enlarge():
    with pytest.raises(ValueError, match="cond_image_size"):
        Muse(maskgit(16), maskgit(32))
    with pytest.raises(ValueError, match=r"base makes pictures of 16 pixels .* enlarge those of 8: pair stages"):
        Muse(maskgit(16), maskgit(32, 8))


def test_the_second_need_not_read_what_the_first_does():
    superres = maskgit(32, 16, condition_on_text=False, cond_num_tokens=16)
    how = {"timesteps": 2, "seed": 0, "return_lowres": True, "return_pil_images": False}
    large, small = Muse(maskgit(16), superres)(TEXTS, negative_texts=["c"], **how)
    assert torch.equal(large, superres.generate(cond_images=small, timesteps=2, seed=0))
    large, _ = Muse(maskgit(16, num_classes=3), superres)(None, classes=[0, 2], **how)
    assert large.shape == (2, 3, 32, 32)
    with pytest.raises(ValueError, match="does not take texts"):
        Muse(maskgit(16, condition_on_text=False), maskgit(32, 16))(TEXTS, **how)


def test_negative_texts_that_tell_pictures_apart_are_among_the_words_of_each():
    make = lambda *negative: PictureMaker(maskgit(16), texts=["a"], negative_texts=list(negative), timesteps=1)
    maker = make("b", "c")
    assert maker.prompts == ["a, not b", "a, not c"] and len(maker.make([0, 1], seed=0)) == 2
    assert make("b").prompts == ["a"]


@pytest.mark.parametrize(("suffix", "mode"), [(".png", "RGBA"), (".jpg", "RGB"), (".webp", "RGBA")])
def test_a_transparent_picture_is_written_on_white_where_its_file_has_no_transparency(
    tmp_path: Path, suffix: str, mode: str
):
    Picture(torch.zeros(4, 8, 8)).write(tmp_path / f"made{suffix}")
    with Image.open(tmp_path / f"made{suffix}") as picture:
        assert picture.mode == mode and picture.convert("RGBA").getpixel((4, 4))[:3] == (
            (255,) * 3 if mode == "RGB" else (0,) * 3
        )
