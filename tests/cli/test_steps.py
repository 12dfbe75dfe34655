"""What steps make of folders that are there already: whether they are done, whether they may go on, and what to do where not.

The stages are not trained here: their checkpoints hold one number.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import helicon
from cli.sounds import write_sounds
from helicon.cli.pipelines.audiolm import audiolm
from helicon.cli.pipelines.musiclm import musiclm
from helicon.cli.pipelines.outline import Request, sizes
from helicon.cli.steps import Clusters, Step, Work, check_order
from helicon.cli.train import RECIPE_FILE
from helicon.config import ConfigError
from helicon.engine.checkpoint import CHECKPOINTS_FOLDER, Snapshot, folder_name, write
from helicon.models.semantic.tokenizer import MelKmeans
from helicon.models.soundstream.codecs import EncodecWrapper
from helicon.nn.network import WEIGHTS_FILE, same_network
from models.musiclm.tiny import mulan
from models.soundstream.test_codecs import encodec_chunks
from models.soundstream.tiny import tiny as tiny_codec

GONE = "what is missing, and all that stands on it, is made anew"


@pytest.fixture(autouse=True)
def sounds() -> None:
    write_sounds(2)


def planned(*more: str, folder: str = "out", data: str = "sounds") -> Work:
    return Work.plan("", Path(folder), audiolm(Request(data, "beside", 0.5, "debug", False)), more)


def with_music(*more: str, folder: str = "out") -> Work:
    return Work.plan("", Path(folder), musiclm(Request("sounds", "beside", 0.5, "debug", False)), more)


def named(work: Work, name: str) -> Step:
    return next(step for step in work.steps if step.name == name)


def train(work: Work, *names: str, weight: float = 1.0) -> None:
    """As if these runs had come to their end."""
    for name in names:
        recipe = work.recipes[name]
        newest = work.home(name) / CHECKPOINTS_FOLDER / folder_name(recipe.trainer["num_train_steps"])
        write(Snapshot(1, {WEIGHTS_FILE: {"weight": torch.tensor(weight)}}, {}), newest)
        recipe.dump(work.home(name) / RECIPE_FILE)


def fit(work: Work, *names: str) -> None:
    for name in names:
        step = named(work, name)
        assert isinstance(step, Clusters)
        work.home(name).mkdir(parents=True)
        work.record(name, step._settings(work))


def finish(work: Work) -> None:
    train(work, *work.recipes)
    fit(work, *(step.name for step in work.steps if isinstance(step, Clusters)))
    check_order(work)
    assert is_done(work, *work.recipes, "kmeans", "tokens")


def is_done(work: Work, *names: str) -> bool:
    return all(named(work, name).is_done(work) for name in names)


def problem(work: Work) -> str:
    with pytest.raises(ConfigError) as raised:
        check_order(work)
    return str(raised.value)


def test_what_was_made_of_a_stage_is_made_anew_with_it() -> None:
    work = planned()
    finish(work)
    bundle = named(work, "audiolm")
    for name in ("audiolm", "samples"):
        work.home(name).mkdir()
        work.record(name, bundle._made_of(work))  # type: ignore[attr-defined]
    assert is_done(work, "audiolm", "samples")
    train(work, "semantic", weight=2.0)
    assert is_done(work, "semantic") and not is_done(work, "audiolm"), "of as many steps, with other weights"
    work.record("audiolm", bundle._made_of(work))  # type: ignore[attr-defined]
    assert is_done(work, "audiolm") and not is_done(work, "samples")


@pytest.mark.parametrize(("damaged", "missing", "on_it"), [("coarse", [], []), ("codec", ["fine"], ["coarse"])])
def test_a_stage_whose_last_checkpoint_is_damaged_is_not_built_on(
    damaged: str, missing: list[str], on_it: list[str]
) -> None:
    """The one before it, which is there and whole, was not trained to the end."""
    work = planned()
    finish(work)
    for name in missing:
        shutil.rmtree(work.home(name))
    newest = work.home(damaged) / CHECKPOINTS_FOLDER / folder_name(work.recipes[damaged].trainer["num_train_steps"])
    write(Snapshot(1, {WEIGHTS_FILE: {"weight": torch.tensor(0.0)}}, {}), newest.with_name(folder_name(1)))
    (newest / WEIGHTS_FILE).write_bytes(b"")
    remedy = " and ".join(map(str, [newest, *map(work.home, on_it)]))
    with pytest.raises(
        ConfigError, match=rf"^{newest} is damaged: .* put it back, or delete {remedy}: what is missing"
    ):
        work.carry_out()


def test_a_stage_that_others_stand_on_is_neither_trained_on_nor_trained_again() -> None:
    finish(planned())
    codec = planned().home("codec") / CHECKPOINTS_FOLDER / folder_name(60)
    assert problem(planned("codec.num_train_steps=61")).startswith(
        "the coarse in out was trained on a codec that would be trained from step 60 to 61: give codec.num_train_steps=60, or a new"
    )
    codec.rename("elsewhere")
    assert problem(planned()).startswith(
        "the coarse in out was trained on a codec that has lost its checkpoints: put them back, or"
    )


def test_codes_are_of_one_mulan() -> None:
    work = with_music()
    finish(work)
    assert is_done(work, "conditioner")
    train(work, "mulan", weight=2.0)
    assert not is_done(work, "conditioner")
    assert "the semantic in out was trained on a conditioner with other settings (checkpoint of mulan was " in problem(
        work
    )


@pytest.mark.parametrize("plan", [planned, with_music])
def test_a_folder_goes_on_under_another_spelling_and_at_another_place(plan) -> None:  # type: ignore[no-untyped-def]
    finish(plan())
    for folder in ("./out/", str(Path("out").absolute()), "moved"):
        if folder == "moved":
            Path("out").rename(folder)
        work = plan(folder=folder)
        check_order(work)
        assert is_done(work, *work.recipes, "kmeans")


def test_data_may_be_named_in_other_ways() -> None:
    finish(planned())
    for data in ("sounds/", "./sounds", str(Path("sounds").absolute())):
        assert is_done(planned(data=data), "codec", "kmeans")
    Path("sounds").rename("others")
    assert "was trained on a codec with another data.source: give that again" in problem(planned(data="others"))


def test_how_fast_something_is_made_does_not_count() -> None:
    finish(planned())
    other = planned("kmeans.batch_size=3", "kmeans.workers=1", "coarse.num_workers=1", "tokens.batch_size=3")
    check_order(other)
    assert is_done(other, "kmeans", "coarse")


def test_what_chooses_among_made_up_sounds_is_nothing_to_files() -> None:
    files = planned("data.seed=1", "coarse.data.seed=3")
    assert named(files, "tokens").title(files) == 'of sounds, data_max_length_seconds=0.5, captions="beside"'
    made_up = Work.plan("", Path("out"), audiolm(Request("synthetic", None, 0.5, "debug", False)), ["data.seed=1"])
    assert (
        named(made_up, "tokens").title(made_up) == "of synthetic, data_max_length_seconds=0.5, num_samples=64, seed=1"
    )
    with pytest.raises(
        ConfigError, match=r"semantic has data.seed=1 where coarse has 3: make them equal, as in data.seed=1"
    ):
        Work.plan("", Path("out"), made_up.steps, ["data.seed=1", "coarse.data.seed=3"])


def test_the_folders_to_delete_are_named() -> None:
    finish(planned())
    remedy = "give that again, or a new folder with --out; or delete"
    assert (
        problem(planned("fine.lr=1")) == f"the fine in out was begun with another trainer.lr: {remedy} out/fine: {GONE}"
    )
    assert problem(planned("codec.lr=1")) == (
        f"the coarse in out was trained on a codec with another trainer.lr: {remedy} out/codec and out/coarse and out/fine: {GONE}"
    )
    Path("out/codec").rename("gone")
    assert problem(planned()) == (
        "the coarse in out was trained on a codec that is gone: put it back, or a new folder with --out; or delete out/coarse and "
        f"out/fine: {GONE}"
    )
    for name in ("coarse", "fine"):
        Path("out", name).rename(f"gone-{name}")
    check_order(planned("codec.lr=1"))


# ---------------------------------------------------------------------- networks that are there already


def with_codec(path: str, *more: str, folder: str = "out") -> Work:
    return Work.plan("", Path(folder), audiolm(Request("sounds", "beside", 0.5, "debug", False, Path(path))), more)


def with_mulan(path: str) -> Work:
    return Work.plan("", Path("out"), musiclm(Request("sounds", "beside", 0.5, "debug", False, None, Path(path))), ())


def test_a_network_that_is_there_is_copied() -> None:
    tiny_codec().save("mine")
    work = with_codec("mine")
    step = named(work, "codec")
    assert "codec" not in work.recipes and not step.is_done(work) and step.title(work) == "copied from mine"
    step.run(work)
    assert step.is_done(work) and same_network(helicon.load("out/codec"), helicon.load("mine"))
    assert work.recipes["coarse"].model["codec"] == "out/codec"
    Path("out").rename("moved")
    moved = with_codec(str(Path("mine").absolute()), folder="moved")
    assert is_done(moved, "codec")
    Path("mine").rename("gone")
    assert is_done(with_codec("mine", folder="moved"), "codec"), "the copy is enough"
    with pytest.raises(FileNotFoundError, match="--codec: there is no checkpoint or run folder at other"):
        with_codec("other", folder="moved")


def test_stages_stay_on_the_network_that_they_were_trained_on() -> None:
    tiny_codec().save("mine")
    tiny_codec(rq_num_quantizers=8).save("other")
    work = with_codec("mine")
    named(work, "codec").run(work)
    check_order(with_codec("other"))  # nothing stands on it yet
    train(work, "coarse")
    remedy = f"a new folder with --out; or delete out/coarse: {GONE}"
    mine = Path("mine").absolute()
    assert problem(with_codec("other")) == (
        f"the coarse in out was trained on a codec copied from {mine}, and --codec other is another: give --codec {mine} as it was, or "
        f"{remedy}"
    )
    assert problem(planned()) == (
        f"the coarse in out was trained on a codec copied from {mine}: give --codec {mine} as it was, or a new folder with --out; or "
        f"delete out/codec and out/coarse: {GONE}"
    )
    tiny_codec(rq_num_quantizers=8).save("mine")
    assert "and --codec mine is another" in problem(with_codec("mine")), "the folder holds another by now"


def test_a_copy_does_not_take_the_place_of_a_run_nor_a_run_that_of_a_copy() -> None:
    tiny_codec().save("mine")
    train(planned(), "codec")
    assert problem(with_codec("mine")) == (
        f"out has a codec that was trained in out/codec, and --codec mine is another: give no --codec, or a new folder with --out; "
        f"or delete out/codec: {GONE}"
    )
    work = with_codec("mine", folder="new")
    named(work, "codec").run(work)
    assert problem(planned(folder="new")).startswith(
        f"new has a codec copied from {Path('mine').absolute()}: give --codec "
    )


def test_codes_are_of_the_mulan_that_was_copied() -> None:
    mulan().save("mine")
    work = with_mulan("mine")
    named(work, "mulan").run(work)
    fit(work, "conditioner")
    assert is_done(work, "mulan", "conditioner")
    mulan(depth=2).save("other")
    work = with_mulan("other")
    named(work, "mulan").run(work)
    assert is_done(work, "mulan") and not is_done(work, "conditioner")


def test_a_codec_that_makes_no_codes_of_its_own_is_refused_at_once() -> None:
    """EnCodec at 48 kHz scales each chunk, and its codes do not tell by how much."""
    encodec_chunks().save_pretrained("encodec")
    EncodecWrapper(model="encodec", num_quantizers=4).save("codec")
    with pytest.raises(
        ValueError, match=r"the codes of .*encodec do not hold how loud the audio is: use encode_with_scales"
    ):
        with_codec("codec")


def test_made_up_sounds_at_the_smallest_size_are_few() -> None:
    """(Of sound files it is as many codes as they are enough for.)"""
    for data, captions, clusters, hours in (("synthetic", None, 32, 0.1), ("sounds", "beside", None, None)):
        work = Work.plan("", Path("out"), musiclm(Request(data, captions, 0.5, "debug", False)), ())
        conditioner, kmeans = named(work, "conditioner"), named(work, "kmeans")
        assert isinstance(conditioner, Clusters) and conditioner._options(work).get("clusters") == clusters
        assert isinstance(kmeans, Clusters) and kmeans._options(work).get("hours") == hours


def test_networks_that_will_not_do() -> None:
    tiny_codec().save("mine")
    tiny_codec(rq_num_quantizers=2).save("small")
    MelKmeans(3).save("tokenizer")
    for call, sentence in (
        (lambda: with_codec("tokenizer"), "--codec tokenizer holds a MelKmeans, not a codec: give the run of one"),
        (lambda: with_mulan("mine"), "--mulan mine holds a SoundStream, not a MuLaN: give the run of one"),
        (lambda: with_codec("mine", "codec.lr=1"), "codec.lr=1 is for training, and --codec mine is used as it is: leave out one of"),
        (lambda: with_codec("small"), "the codec has 2 quantizers, and num_coarse_quantizers=2 leaves too few"),
        (lambda: audiolm(Request("sounds", None, None, None, False, mulan=Path("mine"))), "--mulan is for a MusicLM"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=sentence):
            call()


# ---------------------------------------------------------------------- before anything is made


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["coarse.model.transformer.num_coarse_quantizers=3"], "coarse has num_coarse_quantizers=3 and fine 2, and they cannot go together"),
        (["coarse.model.unique_consecutive=false"], "semantic has unique_consecutive=True and coarse False, and they cannot go together"),
        (["codec.model.rq_num_quantizers=2"], "the codec has 2 quantizers, and num_coarse_quantizers=2 leaves too few of them to the fine"),
        (["fine.model.transformer.num_fine_quantizers=3"], "the codec has 4 quantizers, and num_coarse_quantizers=2 leaves too few"),
        (["data.data_max_length_seconds=0.001"], "sounds of 0.001 s are 0.4 frames of the codec, too few to learn from: give --seconds 0.03 or more"),
    ],
)  # fmt: skip
def test_stages_that_will_not_go_together(more: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        planned(*more)
    equal = [f"{name}.model.unique_consecutive=false" for name in ("semantic", "coarse")]
    planned("codec.model.rq_groups=2", "codec.model.rq_num_quantizers=2", *equal)


def test_captions_that_are_not_there() -> None:
    Path("sounds/0.txt").unlink()
    planned()  # some sounds have one
    Path("sounds/1.txt").unlink()
    with pytest.raises(
        ConfigError, match=r"no sound of sounds has a caption, going by --captions beside \(for example .*0.txt"
    ):
        planned()
    Path("sounds.jsonl").write_text(json.dumps({"path": "sounds/0.wav", "text": None}) + "\n")
    with pytest.raises(ConfigError, match=r"no sound of sounds.jsonl has a caption, going by --captions column"):
        audio = audiolm(Request("sounds.jsonl", "column", 0.5, "debug", False))
        Work.plan("", Path("out"), audio, ())


def test_sounds_that_are_not_there_are_not_missed_once_all_is_learned() -> None:
    finish(planned())
    for path in Path("sounds").iterdir():
        path.unlink()
    planned()
    with pytest.raises(ValueError, match="sounds holds no flac, wav"):
        planned(folder="new")


@pytest.mark.parametrize("kind", [audiolm, musiclm])
def test_every_size_is_there_for_every_pipeline(kind) -> None:  # type: ignore[no-untyped-def]
    assert sizes() == ["debug", "demo"]
    for size in (None, *sizes()):
        for delayed in (False, True):
            request = Request("synthetic", None, None, size, delayed)
            request.check_size()
            Work.plan("", Path("out"), kind(request), ())
    with pytest.raises(
        ConfigError, match=r"--size big is none of debug, demo: give one of these, or leave it out for the"
    ):
        Request("synthetic", None, None, "big", False).check_size()


@pytest.mark.parametrize("kind", [audiolm, musiclm])
def test_the_recipes_of_demos_take_a_folder(kind) -> None:  # type: ignore[no-untyped-def]
    work = Work.plan("", Path("out"), kind(Request("sounds", "beside", None, "demo", False)), ())
    assert all(recipe.data["sounds"] is None for recipe in work.recipes.values())
    made_up = Work.plan("", Path("out"), kind(Request("synthetic", None, None, "demo", False)), ())
    assert made_up.recipes["codec"].data["sounds"]["kinds"] == ["tone", "chirp"]


def test_a_damaged_record_is_named() -> None:
    Path("out").mkdir()
    Path("out/pipeline.json").write_text('{"kind')
    with pytest.raises(ConfigError, match=r"out/pipeline\.json is damaged: choose another folder with -o"):
        planned().recorded  # noqa: B018
