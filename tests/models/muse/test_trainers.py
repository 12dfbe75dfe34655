"""How trainers of the image family find their data. The loop itself is tested in tests/engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import helicon
from helicon.data.synthetic import SyntheticShapes
from helicon.models.muse.maskgit import MaskGit
from helicon.models.muse.trainers import MaskGitTrainer, build_maskgit, training_images
from helicon.models.muse.transformer import MaskGitTransformer
from helicon.models.muse.vqgan import VQGanVAE

BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
SIZES = {"dim": 20, "depth": 1, "heads": 2, "dim_head": 6}
VAE = {"dim": 8, "layers": 2, "encdec_resnet_groups": 4, "codebook_size": 64, "use_vgg_and_gan": False}
OPTIONS: dict[str, Any] = {
    "num_train_steps": 2,
    "batch_size": 2,
    "sample_timesteps": 2,
    "tensorboard": False,
    "save_results_every": 2,
    "results_folder": "run",
}


def maskgit(transformer: dict[str, Any] | None = None, **options: Any) -> MaskGit:
    torch.manual_seed(0)
    chosen = {"image_size": 16, "vae": VAE, **options}
    return build_maskgit(transformer={**SIZES, **(transformer or {"t5_name": BYTES})}, **chosen)


def tokens_alone(transformer: dict[str, Any]) -> MaskGit:
    return MaskGit(16, MaskGitTransformer(**SIZES, num_tokens=16, seq_len=16, **transformer))


class Items(torch.utils.data.Dataset):
    def __init__(self, items: list[Any]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def trained(network: MaskGit, **options: Any) -> MaskGitTrainer:
    logs: list[dict[str, torch.Tensor]] = []
    trainer = MaskGitTrainer(network, **{**OPTIONS, **options})
    trainer.train(logs.append)
    assert len(logs) == trainer.options.num_train_steps and all(entry["loss"].isfinite() for entry in logs)
    return trainer


def write_pictures(folder: Path, count: int = 6) -> None:
    folder.mkdir()
    for index in range(count):
        Image.new("RGB", (20, 24), (40 * index, 0, 0)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"red {index}")


def test_a_folder_of_captioned_pictures():
    write_pictures(Path("pictures"))
    with pytest.raises(ValueError, match="captions="):
        MaskGitTrainer(maskgit(), folder="pictures", **OPTIONS)
    trainer = trained(maskgit(), folder="pictures", captions="beside")
    batch = trainer.feed.first_batch()
    assert batch["images"].shape[1:] == (3, 16, 16) and batch["texts"][0].startswith("red ")
    assert [path.name for path in Path("run/samples").iterdir()] == ["step-00000002-samples.png"]
    loaded = helicon.load("run")
    assert isinstance(loaded, MaskGit) and loaded.generate(["red 1"], timesteps=1).shape == (1, 3, 16, 16)
    with pytest.raises(ValueError, match="not both"):
        MaskGitTrainer(maskgit(), folder="pictures", dataset=Items([]), **OPTIONS)


def test_pictures_are_not_mirrored_unless_asked():
    items = Items([(Image.linear_gradient("L").convert("RGB").rotate(90), "dark to the left")] * 20)
    for augment, kinds in ((False, 1), (True, 2)):
        trainer = MaskGitTrainer(
            maskgit(), dataset=items, augment=augment, **{**OPTIONS, "results_folder": f"{augment}"}
        )
        seen = {
            tuple(trainer.feed.dataset.fetch(i, torch.Generator().manual_seed(i))["images"][0, 0].tolist())
            for i in range(12)
        }
        assert len(seen) == kinds


def test_a_data_section_mirrors_pictures_without_captions_alone_unless_asked():
    Path("pictures").mkdir()
    Image.linear_gradient("L").convert("RGB").rotate(90).save("pictures/0.png")
    Path("pictures/0.txt").write_text("dark to the left")

    def is_mirrored(**options: Any) -> bool:
        data = training_images("pictures", 16, **options)
        seen = [data.fetch(0, torch.Generator().manual_seed(seed))["images"] for seed in range(12)]
        return any(not torch.equal(seen[0], other) for other in seen)

    assert is_mirrored() and not is_mirrored(augment=False)
    assert not is_mirrored(captions="beside") and is_mirrored(captions="beside", augment=True)


@pytest.mark.parametrize("kind", ["dicts", "tuples", "dataloader"])
def test_token_ids_without_a_tokenizer(kind: str):
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randint(16, (4, 4), generator=generator), f"text {i}") for i in range(8)]
    dicts = Items([{"ids": ids, "texts": text} for ids, text in pairs])
    network = tokens_alone({"t5_name": BYTES})
    if kind == "dataloader":
        trainer = trained(network, train_dataloader=DataLoader(Items(pairs), batch_size=2))
    else:
        trainer = trained(network, dataset=dicts if kind == "dicts" else Items(pairs))
        assert trainer.task.units(trainer.feed.first_batch()) % 16 == 0
    assert not Path("run/samples").exists(), "there is nothing to decode tokens with"


def test_embedded_texts_of_different_lengths():
    items = [{"ids": torch.randint(16, (16,)), "text_embeds": torch.randn(1 + i % 3, 5)} for i in range(8)]
    trained(tokens_alone({"text_embed_dim": 5}), dataset=Items(items))


def test_classes():
    items = [(torch.rand(3, 16, 16), i % 3) for i in range(8)]
    trainer = trained(maskgit({"num_classes": 3}), dataset=Items(items))
    assert trainer.feed.first_batch()["classes"].dtype == torch.long


def test_classes_in_a_column_of_a_hugging_face_dataset():
    datasets = pytest.importorskip("datasets")
    pictures = [Image.new("RGB", (20, 24), (20 * index, 0, 0)) for index in range(8)]
    columns = datasets.Dataset.from_dict({"image": pictures, "label": [i % 3 for i in range(8)]})
    columns = columns.cast_column("image", datasets.Image())
    trainer = trained(maskgit({"num_classes": 3}), dataset=columns, num_train_steps=1)
    for batch in (trainer.feed.first_batch(), *trainer.feed.valid.validation(None)):
        numbers = (batch["images"][:, 0].mean(dim=(1, 2)) * 255 / 20).round().long()
        assert torch.equal(batch["classes"], numbers % 3)
    with pytest.raises(ValueError, match="has 2 among its classes, and this MaskGit knows 0 to 1"):
        trained(maskgit({"num_classes": 2}), dataset=columns, results_folder="few")
    with pytest.raises(ValueError, match="no column 'label', where classes are: its columns are image, kind"):
        trained(maskgit({"num_classes": 3}), dataset=columns.rename_column("label", "kind"), results_folder="other")


def test_the_folders_of_pictures_are_their_classes():
    Path("animals").mkdir()
    write_pictures(Path("animals/red_fox"))
    write_pictures(Path("animals/owl"), count=4)
    trainer = trained(maskgit({"num_classes": 2}), folder="animals", classes="folder")
    data = trainer.feed.dataset
    assert [data[index]["classes"] for index in range(len(data))] == [int("fox" in key) for key in data.keys]
    loaded: Any = helicon.load("run")
    assert loaded.class_names == ["owl", "red fox"] and loaded.class_name(1) == "red fox"
    named, numbered = (loaded.generate(classes=given, timesteps=1, seed=0) for given in (["red fox", "owl"], [1, 0]))
    assert torch.equal(named, numbered)
    options = {"folder": "animals", "classes": "folder", **OPTIONS, "num_train_steps": 3}
    MaskGitTrainer(maskgit({"num_classes": 2}), **options, resume=True).train()
    assert helicon.load("run").class_names == ["owl", "red fox"]
    with pytest.raises(
        ValueError, match=r"there are 2 classes \(owl, red fox\), and this MaskGit has 3: .*num_classes=2"
    ):
        MaskGitTrainer(maskgit({"num_classes": 3}), folder="animals", classes="folder", **OPTIONS)
    with pytest.raises(ValueError, match="called owl, red fox already, not cat, dog"):
        loaded.name_classes(["cat", "dog"])


def test_validation_pictures_have_the_numbers_of_the_training_ones():
    for folder in ("animals", "others"):
        Path(folder).mkdir()
    for name in ("fox", "owl"):
        write_pictures(Path("animals", name))
    write_pictures(Path("others/owl"))
    options: dict[str, Any] = {"folder": "animals", "classes": "folder", **OPTIONS}
    trainer = MaskGitTrainer(maskgit({"num_classes": 2}), val_dataset="others", **options)
    assert {sample["classes"] for sample in trainer.feed.val_dataset} == {1}
    write_pictures(Path("others/cat"))
    with pytest.raises(ValueError, match="cat is a folder of pictures and none of the classes fox, owl"):
        MaskGitTrainer(maskgit({"num_classes": 2}), val_dataset="others", **options)


def test_super_resolution_from_pictures_and_from_tokens():
    trained(maskgit(cond_image_size=8), dataset=SyntheticShapes(8, 16))
    items = [{"ids": torch.randint(64, (4, 4)), "cond_ids": torch.randint(64, (2, 2)), "texts": "a"} for _ in range(8)]
    trained(maskgit(cond_image_size=8), dataset=Items(items), results_folder="again")


def test_samples_that_fit_no_field_are_refused():
    network = maskgit()
    with pytest.raises(ValueError, match="neither images nor ids"):
        trained(network, dataset=Items([{"texts": "a"}] * 8))
    with pytest.raises(ValueError, match="entry 'id'"):
        trained(network, dataset=Items([{"id": torch.zeros(16)}] * 8), results_folder="other")


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"ids": torch.full((4, 4), 64)}, "has 64 among its ids, and this MaskGit knows 0 to 63"),
        ({"ids": torch.full((16,), -1)}, "has -1 among its ids"),
        ({"ids": torch.zeros(2, 2, dtype=torch.long)}, "a picture of 2 x 2 tokens"),
        ({"classes": 7, "images": torch.zeros(3, 16, 16)}, "has 7 among its classes, and this MaskGit knows 0 to 2"),
        ({"images": torch.full((3, 16, 16), 255.0)}, "values from 255 to 255"),
    ],
)
def test_samples_out_of_range_are_refused(sample: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        trained(maskgit({"num_classes": 3}), dataset=Items([{"classes": 0, **sample}] * 8))


def test_made_up_pictures_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"2 x 2 tokens .* image_size=16: .*\(data\.image_size in a recipe\)"):
        trained(maskgit(), dataset=SyntheticShapes(8, 8))


def test_the_loss_falls_on_tokens_that_follow_from_the_text():
    """Two texts, two patterns of tokens."""
    patterns = torch.randint(16, (2, 16), generator=torch.Generator().manual_seed(0))
    items = [{"ids": patterns[i % 2], "texts": ("ant", "bee")[i % 2]} for i in range(40)]
    torch.manual_seed(0)
    trainer = MaskGitTrainer(
        tokens_alone({"t5_name": BYTES}), dataset=Items(items), **{**OPTIONS, "num_train_steps": 60, "batch_size": 8, "lr": 5e-3}
    )  # fmt: skip
    before = trainer.validate()["valid_loss"]
    trainer.train()
    after = trainer.validate()["valid_loss"]
    assert before > 2.5 and after < 1.0


def test_a_model_section_finds_its_tokenizer():
    torch.manual_seed(0)
    vae = VQGanVAE(**VAE)
    vae.save("tokenizer")
    network = maskgit(vae="tokenizer")
    assert (network.transformer.num_tokens, network.transformer.seq_len) == (64, 16)
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(network.tokenize(images), vae.eval().encode(images)[1])
    network.save("maskgit")
    with pytest.raises(
        ValueError, match=r"model\.vae: there is no checkpoint or run folder at absent; .* \(helicon train muse/vqgan\)"
    ):
        maskgit(vae="absent")
    with pytest.raises(ValueError, match="holds a MaskGit, not a VQGanVAE"):
        maskgit(vae="maskgit")
    with pytest.raises(ValueError, match=r"model\.transformer has no argument 'depht'"):
        maskgit({**SIZES, "depht": 2})
    with pytest.raises(ValueError, match=r"model\.transformer needs num_tokens and seq_len"):
        maskgit(vae=None)
