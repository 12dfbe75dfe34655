"""`helicon tokenize` and training on what it makes, with the real networks of the families."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import children
from data.sounds import noise, write
from helicon import registry
from helicon.cli import app
from helicon.data.tokens import TokenCache
from helicon.models.audiolm.data import AudioTokenizer, cached_audio
from helicon.models.muse.maskgit import MaskGit
from helicon.models.muse.trainers import ImageTokenizer, MaskGitTrainer, VQGanVAETrainer, build_maskgit, training_images
from helicon.models.muse.transformer import MaskGitTransformer
from helicon.models.muse.vqgan import VQGanVAE
from helicon.models.semantic.tokenizer import MelKmeans
from models.soundstream.tiny import tiny
from toys import Line

BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
SIZES = {"dim": 20, "depth": 1, "heads": 2, "dim_head": 6, "t5_name": BYTES}
VAE = {"dim": 8, "layers": 2, "encdec_resnet_groups": 4, "codebook_size": 64}
OPTIONS: dict[str, Any] = {
    "num_train_steps": 4,
    "batch_size": 3,
    "valid_frac": 0.3,
    "sample_timesteps": 2,
    "tensorboard": False,
    "save_results_every": 4,
}


def helicon(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, " ".join((done.output or "").split())


def tokenized(*arguments: str, run: str = "vae", data: str = "pictures", out: str = "cache") -> str:
    code, said = helicon("tokenize", run, "--data", data, "-o", out, "--workers", "0", *arguments)
    assert code == 0, said
    return said


def write_picture(path: str, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((20, 24)).save(path)
    Path(path).with_suffix(".txt").write_text(f"picture {seed}")


@pytest.fixture
def pictures() -> str:
    Path("pictures").mkdir()
    for number in range(14):
        write_picture(f"pictures/{number}.png", number)
    return "pictures"


def save_vae(name: str = "vae", seed: int = 0) -> VQGanVAE:
    torch.manual_seed(seed)
    vae = VQGanVAE(**VAE)
    vae.save(name)
    return vae


def maskgit(vae: str = "vae", **options: Any) -> MaskGit:
    torch.manual_seed(0)
    return build_maskgit(16, SIZES, vae=vae, **options)


def tokens_alone(num_tokens: int) -> MaskGit:
    return MaskGit(16, MaskGitTransformer(**SIZES, num_tokens=num_tokens, seq_len=16))


def losses(run: str, network: MaskGit, **options: Any) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Of every step, and of the validation set at the end."""
    trainer = MaskGitTrainer(network, results_folder=run, **{**OPTIONS, **options})
    steps: list[dict[str, float]] = []
    trainer.train(lambda logs: steps.append({name: float(value) for name, value in logs.items()}))
    return steps, trainer.validate()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_losses_on_a_cache_equal_those_on_pictures(pictures: str, num_workers: int) -> None:
    save_vae()
    Path("pictures/5.png").write_bytes(b"no picture")
    said = tokenized("image_size=16", "captions=beside", "--batch-size", "5")
    assert "cache: 13 items encoded, 0 kept, 1 could not be read (see cache/bad_files.txt)" in said
    options = {"num_train_steps": 9, "num_workers": num_workers}  # more than two epochs
    on_pictures = losses("on-pictures", maskgit(), folder=pictures, captions="beside", **options)
    on_cache = losses("on-cache", maskgit(), folder="cache", **options)
    assert on_cache == on_pictures and len(on_cache[0]) == 9
    assert len({step["loss"] for step in on_cache[0]}) == 9
    listed = [Path(run, "bad_files.txt").read_text() for run in ("on-pictures", "on-cache")]
    assert "5.png" in listed[0] and "5.png" in listed[1]
    assert list(Path("on-cache/samples").iterdir())


def test_a_cache_knows_the_classes_of_its_pictures() -> None:
    """From the command line alone: the folders are classes, and pictures are asked for by their names."""
    save_vae()
    for name in ("fox", "owl"):
        Path("animals", name).mkdir(parents=True)
        for number in range(7):
            write_picture(f"animals/{name}/{number}.png", number)
    tokenized("image_size=16", data="animals")
    chosen = [
        "model.transformer.num_classes=2",
        "model.transformer.t5_name=null",
        "data.classes=folder",
        "model.vae=vae",
    ]
    small = ["data.image_size=16", "model.image_size=16", "num_train_steps=2", "batch_size=4", "log_every=1"]
    numbers = []
    for source in ("animals", "cache"):
        run = [f"data.source={source}", "data.augment=false", f"results_folder=on-{source}"]
        code, said = helicon("train", "muse/maskgit-debug", *chosen, *small, *run)
        assert code == 0, said
        lines = Path(f"on-{source}/metrics.jsonl").read_text().splitlines()
        numbers.append([{k: v for k, v in json.loads(line).items() if "loss" in k} for line in lines])
    assert numbers[0] == numbers[1] and any("loss" in line for line in numbers[0])
    code, said = helicon("generate", "on-cache", "classes=[owl,fox]", "timesteps=1", "-o", "out")
    assert code == 0, said
    lines = Path("out/manifest.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["owl", "fox"]
    code, said = helicon("tokenize", "vae", "--data", "animals", "-o", "other", "image_size=16", "classes=folder")
    assert code == 1 and "classes=folder has no place here, as a cache knows the folders its files are in" in said


def test_a_recipe_learns_from_a_cache_what_it_learns_from_pictures() -> None:
    """From the command line alone: a tokenizer is trained, its averaged weights encode, and a run reads that."""
    small = ["data.image_size=16", "num_samples=24", "save_model_every=2", "save_results_every=100", "batch_size=4"]
    network = ["model.dim=8", "model.layers=2", "model.codebook_size=16", "model.discr_layers=1"]
    code, said = helicon("train", "muse/vqgan-debug", *small, *network, "num_train_steps=3", "results_folder=vae")
    assert code == 0, said
    assert Path("vae/checkpoints/step-00000003/ema.safetensors").exists()
    said = tokenized("data.image_size=16", "num_samples=24", data="synthetic")
    assert "24 items encoded" in said and "data.source=cache" in said
    steps = ["model.image_size=16", "model.vae=vae", "num_train_steps=4", "log_every=1"]
    numbers = []
    for source in ("synthetic", "cache"):
        run = ["results_folder=run-" + source, f"data.source={source}"]
        code, said = helicon("train", "muse/maskgit-debug", *small, *steps, *run)
        assert code == 0, said
        lines = Path(f"run-{source}/metrics.jsonl").read_text().splitlines()
        numbers.append([{k: v for k, v in json.loads(line).items() if "loss" in k} for line in lines])
    assert numbers[0] == numbers[1] and any("loss" in line for line in numbers[0])
    code, said = helicon("resume", "run-cache", "num_train_steps=5")
    assert code == 0 and "resuming from step 4" in said


def test_super_resolution(pictures: str) -> None:
    """A MaskGit given as the tokenizer brings both of its own, and the small size."""
    save_vae()
    save_vae("low", seed=1)
    network = maskgit(cond_vae="low", cond_image_size=8)
    network.save("superres")
    assert "14 items encoded" in tokenized("captions=beside", run="superres")
    assert {name: value.shape for name, value in TokenCache("cache")[0].items() if name != "texts"} == {
        "ids": (4, 4),
        "cond_ids": (2, 2),
    }
    on_pictures = losses("on-pictures", network, folder=pictures, captions="beside")
    again = maskgit(cond_vae="low", cond_image_size=8)
    assert losses("on-cache", again, folder="cache") == on_pictures
    base = losses("base", maskgit(), folder="cache")  # needs half of what is there
    assert base == losses("base-on-pictures", maskgit(), folder=pictures, captions="beside")

    with pytest.raises(ValueError, match="made with cond_image_size=8, not 12"):
        losses("x", maskgit(cond_vae="low", cond_image_size=12), folder="cache")
    with pytest.raises(
        ValueError,
        match=r"the cond_vae of this model is .*/vae \(\w{12}\), and cache was made with .*/stages/cond_vae \(",
    ):
        losses("y", maskgit(cond_image_size=8), folder="cache")
    tokenized("captions=beside", "image_size=16", out="plain")
    with pytest.raises(
        ValueError, match=r"the cond_vae of this model is .*, and plain was made without one: make a new one"
    ):
        losses("z", maskgit(cond_vae="low", cond_image_size=8), folder="plain")


def test_tokens_do_not_depend_on_who_holds_the_tokenizer(pictures: str) -> None:
    vae = save_vae()
    tokenized("captions=beside", "image_size=16")
    network = maskgit()
    network.save("maskgit")
    assert "0 items encoded, 14 kept" in tokenized("captions=beside", run="maskgit")
    sample = training_images(pictures, 16, augment=False)[3]
    assert torch.equal(TokenCache("cache")[3]["ids"], vae.eval().encode(sample["images"][None])[1][0])
    half = ImageTokenizer(network.to(torch.bfloat16))  # changes the transformer's precision alone
    TokenCache("cache").made_by(half)


def test_a_model_that_knows_tokens_alone(pictures: str) -> None:
    save_vae()
    tokenized("captions=beside", "image_size=16")
    assert len(losses("run", tokens_alone(64), dataset=TokenCache("cache"))[0]) == 4
    with pytest.raises(ValueError, match="made with ids=64, not 32"):
        losses("other", tokens_alone(32), folder="cache")


def test_a_stale_cache_is_refused_and_brought_up_to_date(pictures: str) -> None:
    save_vae()
    save_vae("other", seed=1)
    tokenized("captions=beside", "image_size=16")
    with pytest.raises(
        ValueError,
        match=r"the vae of this model is .*/other \(\w{12}\), and cache was made with .*/vae \(\w{12}\): make a new",
    ):
        losses("x", maskgit("other"), folder="cache")
    write_picture("pictures/3.png", 33)
    with pytest.raises(
        ValueError, match=r"stale, as .*3\.png is not what it was: bring it up to date with `"
    ) as refused:
        losses("y", maskgit(), folder="cache")
    command = str(refused.value).split("`")[1].split()
    assert command[0] == "helicon"
    code, said = helicon(*command[1:], "--workers", "0")
    assert code == 0 and "1 items encoded, 13 kept" in said, said
    Path("pictures/4.png").unlink()
    assert "0 items encoded, 13 kept, 1 gone" in tokenized("captions=beside", "image_size=16")
    on_cache = losses("on-cache", maskgit(), folder="cache")
    assert on_cache == losses("on-pictures", maskgit(), folder=pictures, captions="beside")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_command_goes_on(pictures: str, number: int) -> None:
    save_vae()

    def work() -> None:
        encode = ImageTokenizer.__call__
        seen = []

        def slow(self: ImageTokenizer, batch: dict[str, Any]) -> Any:
            seen.extend(batch["texts"])
            if len(seen) > 8:
                Path("there").touch()
                while True:  # (signal.pause() would miss a signal that comes just before it)
                    time.sleep(0.01)
            return encode(self, batch)

        ImageTokenizer.__call__ = slow  # type: ignore[method-assign]
        options = ["image_size=16", "captions=beside", "--batch-size", "2", "--workers", "0"]
        code, said = helicon("tokenize", "vae", "--data", "pictures", "-o", "cache", *options)
        Path("said").write_text(said)
        raise SystemExit(code)

    child = children.start(work)
    children.wait_for(Path("there").exists)
    assert children.kill(child, number) == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert "what is encoded is kept, and the same command goes on from there" in Path("said").read_text()
    with pytest.raises(ValueError, match="never finished"):
        losses("run", maskgit(), folder="cache")
    kept = 8 if number == signal.SIGINT else 0
    assert f"{14 - kept} items encoded, {kept} kept" in tokenized("image_size=16", "captions=beside")
    assert [TokenCache("cache")[index]["texts"] for index in (0, 13)] == ["picture 0", "picture 9"]


MISTAKES = {
    "line --data pictures": "line holds a Line, which makes no tokens: give a run of one that does (",
    "nowhere --data pictures": "there is no checkpoint or run folder at nowhere",
    "blind --data pictures": "the network in blind stands on no tokenizer: give the run of one",
    "vae --data absent image_size=16": "the data folder absent does not exist: name the folder of your data",
    "vae --data empty image_size=16": "empty holds no jpg, jpeg, png, webp file, nor do its subfolders",
    "vae --data pictures": "data needs image_size: add `data.image_size=<value>`",
    "vae --data pictures image_sise=16": "data have no argument 'image_sise': did you mean data.image_size?",
    "vae --data pictures image_size=big": "data.image_size wants int, not 'big'",
    "vae --data pictures model.dim=2": "model.dim=2 is no argument of the data: leave it for training",
    "vae --data pictures augment=true": "augment=True has no place here, as items are encoded as they are: leave it out",
    "vae --data pictures --semantic vae": "the network in vae goes with no second one: leave --semantic out",
    "vae --data pictures data.source=x": "source=x has no place here, as --data names it: leave it out",
    "vae --data pictures image_size=16 -o pictures": "pictures is there already and no token cache: choose another folder",
    "vae --data cache image_size=16": "--data cache is a token cache itself: name the files it was made from",
    "grey --data pictures image_size=16 channels=3": "this autoencoder takes images of 1 channels, got 3",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_told_in_one_sentence(pictures: str, arguments: str) -> None:
    save_vae()
    VQGanVAE(**VAE, channels=1).save("grey")
    Line().save("line")
    tokens_alone(8).save("blind")
    Path("empty").mkdir()
    tokenized("image_size=16")
    code, said = helicon("tokenize", "-o", "new", *arguments.split(), "--workers", "0")
    assert code == 1 and said.startswith(f"error: {MISTAKES[arguments]}"), said
    assert helicon("tokenize", "vae", "--data", "pictures")[0] == 2, "a folder for the tokens is needed"


def test_channels_and_size_follow_from_the_network(pictures: str) -> None:
    VQGanVAE(**VAE, channels=1).save("grey")
    code, said = helicon("tokenize", "grey", "--data", "pictures", "-o", "cache", "image_size=12")
    assert code == 0 and "tokenize 14/14" in said, said
    assert TokenCache("cache").index.arguments == {"image_size": 12, "channels": 1}
    maskgit("grey").save("maskgit")
    tokenized(run="maskgit", out="other")
    assert TokenCache("other").index.arguments == {"image_size": 16, "channels": 1}


def test_a_cache_that_does_not_fit_is_refused(pictures: str) -> None:
    save_vae()
    tokenized("image_size=16")
    with pytest.raises(ValueError, match="holds no texts, and this MaskGit reads some"):
        losses("a", maskgit(), folder="cache")
    with pytest.raises(
        ValueError, match="was made with captions=None, not beside: run `helicon tokenize` with captions="
    ):
        losses("b", maskgit(), folder="cache", captions="beside")
    with pytest.raises(ValueError, match="was made with image_size=16, not 32"):
        training_images("cache", 32)
    with pytest.raises(ValueError, match="was made with image_size=16, not 32"):
        losses("c", maskgit(), folder="cache", image_size=32)
    with pytest.raises(ValueError, match="leave random_crop out"):
        training_images("cache", 16, random_crop=True)
    with pytest.raises(ValueError, match="leave augment out"):
        losses("d", maskgit(), folder="cache", augment=True)
    with pytest.raises(ValueError, match="cache is a token cache, and a VQGanVAE learns from pictures"):
        VQGanVAETrainer(save_vae(), dataset=training_images("cache", 16))
    with pytest.raises(ValueError, match="cache is a token cache, and a VQGanVAE learns from pictures"):
        VQGanVAETrainer(save_vae(), folder="cache", image_size=16)


# ---------------------------------------------------------------------- sounds


@pytest.fixture
def sounds(monkeypatch: pytest.MonkeyPatch) -> str:
    """A codec, clusters, and sounds of 0.25 and 0.08 s beside two files that hold none."""
    row = "helicon.models.audiolm.data:AudioTokenizer"
    networks = ("helicon.models.soundstream.model:SoundStream", "helicon.models.semantic.tokenizer:MelKmeans")
    entry = registry.Entry(
        summary="reads tokens of sounds",
        model=networks[0],
        trainer="helicon.models.soundstream.trainers:SoundStreamTrainer",
        data="helicon.models.audiolm.data:training_audio",
        debug_recipe="soundstream/debug",
        tokenizers=dict.fromkeys(networks, row),
    )
    monkeypatch.setitem(registry.entries, "tokens of sounds", entry)
    save_codec("codec")
    save_clusters("mel")
    for number, seconds in enumerate((0.25, 0.08)):
        write(Path(f"sounds/{number}.wav"), noise(seconds, 16000, seed=number)).with_suffix(".txt").write_text("noise")
    write(Path("sounds/empty.wav"), noise(0, 16000)).with_suffix(".txt").write_text("nothing")
    Path("sounds/torn.wav").write_bytes(b"no sound")
    Path("sounds/torn.txt").write_text("nothing")
    return "sounds"


def save_codec(name: str, **changes: Any) -> None:
    codec = tiny(**changes)
    with torch.no_grad():
        codec(torch.from_numpy(noise(2.0, 8000)).float().reshape(4, -1))
    codec.save(name)


def save_clusters(name: str, seed: int = 0) -> None:
    clusters = MelKmeans(12)
    clusters.fit([(torch.from_numpy(noise(1.0, 16000, seed=seed)).float()[None], None)], num_frames=50)
    clusters.save(name)


def audio_tokenizer(*names: str) -> AudioTokenizer:
    return AudioTokenizer(*(registry.load(name) for name in names))


def test_a_file_that_cannot_be_read_is_told_and_counted_once(sounds: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the number of its segments; here its caption is missing."""
    Path("sounds/0.txt").unlink()  # of three segments
    said = tokenized("data_max_length_seconds=0.1", "captions=beside", "--semantic", "mel", run="codec", data=sounds)
    listed = Path("cache/bad_files.txt").read_text().splitlines()
    assert [Path(line.split("\t")[0]).name for line in listed] == ["0.wav", "empty.wav", "torn.wav"]
    assert "3 could not be read" in said and "0.txt cannot be read (No such file or directory)" in listed[0]
    assert caplog.text.count("0.txt cannot be read") == 1


def test_segments_that_were_meant_in_seconds_are_refused(sounds: str) -> None:
    code, said = helicon("tokenize", "codec", "--data", sounds, "-o", "cache", "data_max_length=1", "--semantic", "mel")
    assert code == 1 and "are too short: data_max_length counts samples, data_max_length_seconds seconds" in said


def test_sounds_become_tokens_of_two_networks(sounds: str) -> None:
    said = tokenized("data_max_length_seconds=0.1", "captions=beside", "--semantic", "mel", run="codec", data=sounds)
    assert "cache: 4 items encoded, 0 kept, 2 could not be read (see cache/bad_files.txt)" in said
    listed = Path("cache/bad_files.txt").read_text().splitlines()
    assert [Path(line.split("\t")[0]).name for line in listed] == ["empty.wav", "torn.wav"]
    assert "holds no sound" in listed[0] and "not a readable sound file" in listed[1]
    cache = cached_audio("cache", audio_tokenizer("codec", "mel"))
    assert cache.index.arguments == {"data_max_length_seconds": 0.1, "captions": "beside"}
    assert [cache[index]["token_ids"].shape for index in range(4)] == [(100, 3), (100, 3), (50, 3), (80, 3)]
    assert [cache[index]["semantic_token_ids"].shape for index in range(4)] == [(5,), (5,), (3,), (4,)]
    assert [cache[index]["is_end"] for index in range(4)] == [False, False, True, True]
    assert cache[0]["texts"] == "noise"

    write(Path("sounds/1.wav"), noise(0.08, 16000, seed=7))
    with pytest.raises(ValueError, match=r"stale, as .*1\.wav is not what it was: bring it up to date with") as stale:
        cached_audio("cache", audio_tokenizer("mel"))
    save_clusters("other", seed=1)
    with pytest.raises(ValueError, match=r"the semantic tokenizer of this model is .*/other .* make a new") as foreign:
        cached_audio("cache", audio_tokenizer("other"))
    for refused, counts in ((stale, "1 items encoded, 3 kept"), (foreign, "4 items encoded, 0 kept")):
        code, said = helicon(*str(refused.value).split("`")[1].split()[1:], "--workers", "0")
        assert code == 0 and counts in said, said
    cached_audio("cache", audio_tokenizer("codec", "mel"))
    cached_audio("cache-new", audio_tokenizer("codec", "other"))


def test_tokens_of_one_network_and_of_made_up_sounds(sounds: str) -> None:
    tokenized("data_max_length_seconds=0.1", run="mel", data=sounds, out="semantic")
    assert TokenCache("semantic")[0].keys() == {"semantic_token_ids", "is_end"}
    tokenized("data_max_length_seconds=0.5", "num_samples=6", run="codec", data="synthetic", out="acoustic")
    cache = cached_audio("acoustic", audio_tokenizer("codec"))
    assert len(cache) == 6 and cache[0]["token_ids"].shape == (500, 3) and cache[0]["texts"].startswith("a ")


AUDIO_MISTAKES = {
    "codec": "data_max_length or data_max_length_seconds is needed: how much of a sound is heard at a time",
    "codec end_prob=0.5": "end_prob=0.5 has no place here, as recordings are encoded from end to end: leave it out",
    "codec --semantic nowhere": "there is no checkpoint or run folder at nowhere",
    "codec --semantic codec": "a SoundStream makes no semantic tokens: give what `helicon fit-kmeans` made",
    "mel --semantic mel": "a MelKmeans makes no codes of sounds: give a codec, or a semantic tokenizer alone",
}


@pytest.mark.parametrize("arguments", AUDIO_MISTAKES)
def test_mistakes_with_sounds_are_told_in_one_sentence(sounds: str, arguments: str) -> None:
    code, said = helicon("tokenize", *arguments.split(), "--data", sounds, "-o", "new", "--workers", "0")
    assert code == 1 and said.startswith(f"error: {AUDIO_MISTAKES[arguments]}"), said
