"""The image tokenizer really learns: the demo's model, its adversary included, to a stated quality on pictures never seen."""

from pathlib import Path

import pytest
import torch

import helicon
from helicon import registry
from helicon.config import load_recipe
from helicon.data.synthetic import SyntheticShapes
from helicon.metrics.image import codebook_use, psnr

CHOSEN = ["num_train_steps=300", "discr_start_step=220", "save_results_every=300", "save_model_every=300"]


@pytest.mark.slow
def test_the_tokenizer_learns_shapes_to_27_db_with_most_of_its_codes_in_use() -> None:
    """Measured: 28.8 dB and 99.8 % of the codes; each picture's mean colour alone gets 20.4 dB."""
    recipe = load_recipe("muse/vqgan-demo", CHOSEN, sections=lambda name: registry.entries[name].recipe_sections())
    trainer = registry.build_trainer(recipe, results_folder=Path("run"))
    trainer.train()
    unseen = SyntheticShapes(128, image_size=64, seed=12345)
    images = torch.stack([unseen[index]["images"] for index in range(len(unseen))])
    vae = helicon.load("run")
    with torch.no_grad():
        _, ids, _ = vae.encode(images)
        made = vae.decode_from_ids(ids).clamp(0, 1)
    plain = images.mean((2, 3), keepdim=True).expand_as(images)
    assert ids.shape == (128, 16, 16)
    assert float(psnr(made, images).mean()) >= 27
    assert float(psnr(made, images).mean()) >= float(psnr(plain, images).mean()) + 6
    assert float(codebook_use(ids, vae.codebook_size)) >= 0.8
