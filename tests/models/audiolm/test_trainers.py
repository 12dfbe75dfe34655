import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from helicon.data.audio import get_dataloader
from helicon.data.tokenize import tokenize
from helicon.engine.options import ALIASES
from helicon.models.audiolm.data import AudioSource, AudioTokenizer
from helicon.models.audiolm.stage import Stage
from helicon.models.audiolm.trainers import (
    CoarseTransformerTrainer,
    DelayedTransformerTrainer,
    FineTransformerTrainer,
    SemanticTransformerTrainer,
    StageTrainer,
    build_fine,
)
from helicon.models.audiolm.transformers import (
    CoarseTransformer,
    DelayedTransformer,
    FineTransformer,
    SemanticTransformer,
)
from helicon.models.audiolm.wrappers import CoarseTransformerWrapper, FineTransformerWrapper
from helicon.models.semantic.tokenizer import MelKmeans
from helicon.nn.network import load_network
from helicon.registry import load
from models.audiolm.tiny import BYTES, SIZES
from models.soundstream.tiny import tiny

OPTIONS: dict[str, Any] = {
    "num_train_steps": 2,
    "batch_size": 2,
    "lr": 1e-3,
    "tensorboard": False,
    "results_folder": "run",
    "save_results_every": 2,
}


def semantic_tokenizer() -> MelKmeans:
    tokenizer = MelKmeans(9)
    generator = torch.Generator().manual_seed(0)
    tokenizer.kmeans.centroids.copy_(torch.randn(tokenizer.kmeans.centroids.shape, generator=generator) * 3 - 3)
    return tokenizer


WAV2VEC = semantic_tokenizer()
SEMANTIC: dict[str, Any] = {**SIZES, "num_semantic_tokens": 9}
COARSE: dict[str, Any] = {**SEMANTIC, "codebook_size": 16, "num_coarse_quantizers": 2}
FINE: dict[str, Any] = {**SIZES, "codebook_size": 16, "num_coarse_quantizers": 2, "num_fine_quantizers": 1}
TEXT = {"has_condition": True, "t5_name": BYTES}


@pytest.fixture
def sounds() -> str:
    """Of a quarter of a second at 16 kHz, each with a text beside it."""
    Path("sounds").mkdir()
    random = np.random.default_rng(0)
    for number in range(12):
        soundfile.write(f"sounds/{number}.wav", random.normal(scale=0.1, size=4000), 16000)
        Path(f"sounds/{number}.txt").write_text(f"noise number {number}")
    return "sounds"


def built(name: str, **options: Any) -> StageTrainer:
    text = {} if options.pop("is_mute", True) else TEXT
    options = {**OPTIONS, "data_max_length_seconds": 0.25, **options}
    torch.manual_seed(0)
    if name == "semantic":
        return SemanticTransformerTrainer(WAV2VEC, SemanticTransformer(**SEMANTIC, **text), **options)
    if name == "coarse":
        return CoarseTransformerTrainer(CoarseTransformer(**COARSE, **text), tiny(), WAV2VEC, **options)
    if name == "fine":
        return FineTransformerTrainer(FineTransformer(**FINE, **text), tiny(), **options)
    sizes = {**SEMANTIC, "codebook_size": 16, "num_quantizers": 3}
    return DelayedTransformerTrainer(DelayedTransformer(**sizes, **text), tiny(), WAV2VEC, **options)


NAMES = ["semantic", "coarse", "fine", "delayed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_captioned_sounds_trains_every_stage(sounds: str, name: str) -> None:
    trainer = built(name, is_mute=False, folder=sounds, captions="beside")
    before = {key: value.clone() for key, value in trainer.unwrapped_stage.own_state().items()}
    trainer.train()
    stage = load("run")
    assert isinstance(stage, Stage) and stage.frozen.keys() == trainer.unwrapped_stage.frozen.keys()
    changed = [key for key, value in stage.own_state().items() if not torch.equal(value, before[key])]
    assert any("text_encoder" in key for key in changed) and any("layers" in key for key in changed)
    assert not any(key.startswith(("codec", "wav2vec")) for key in before), "stages are not saved twice"
    if name != "semantic":
        assert list(Path("run/samples").rglob("*.wav"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_a_cache_and_their_sounds_give_the_same_losses(sounds: str, name: str) -> None:
    def losses(results_folder: str, **source: Any) -> list[float]:
        trainer = built(name, num_train_steps=3, results_folder=results_folder, end_prob=0.0, is_mute=False, **source)
        found: list[float] = []
        trainer.train(lambda logs: found.append(logs["loss"].item()))
        return found

    data = AudioSource("sounds", data_max_length_seconds=0.25, captions="beside")
    tokenizer = AudioTokenizer(tiny(), WAV2VEC)
    tokenize(tokenizer.items(data), tokenizer, Path("cache"), source="sounds", arguments={"captions": "beside"})
    on_tokens = losses("tokens", folder="cache", data_max_length_seconds=None, captions="beside")
    assert on_tokens == pytest.approx(losses("waves", folder=sounds, captions="beside"), rel=1e-5)


def test_training_goes_on_as_before_after_a_validation(sounds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1: in the reference the wrapper stays in evaluation mode: no end is learned any more, and nothing is forgotten."""
    asked: list[tuple[bool, float]] = []
    forward = CoarseTransformerWrapper.forward

    def noted(stage: CoarseTransformerWrapper, **given: Any) -> Any:
        asked.append((stage.training, stage.forget_prob))
        return forward(stage, **given)

    monkeypatch.setattr(CoarseTransformerWrapper, "forward", noted)
    trainer = built("coarse", folder=sounds, num_train_steps=4, val_every=1, val_num_batches=1)
    trainer.train()
    modes = [mode for mode, _ in asked]
    assert modes.count(True) == 4 and modes.count(False) >= 4
    assert {probability for mode, probability in asked if mode} == {0.15}
    assert {probability for mode, probability in asked if not mode} == {0.0}


class Own(torch.utils.data.Dataset):
    def __init__(self, *entries: Any):
        self.entries = entries

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(entry[index] for entry in self.entries)


WAVES = torch.randn(8, 4000, generator=torch.Generator().manual_seed(3)) * 0.1
IDS = torch.randint(9, (8, 12), generator=torch.Generator().manual_seed(4))
CODES = torch.randint(16, (8, 12, 3), generator=torch.Generator().manual_seed(5))
TEXTS = [f"number {index}" for index in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "entries", "fields"),
    [
        ("semantic", (WAVES, TEXTS), None),
        ("semantic", (IDS, TEXTS), None),
        ("coarse", (WAVES, WAVES[:, :2000], TEXTS), ("raw_wave", "raw_wave_for_codec", "text")),
        ("coarse", (WAVES, WAVES[:, :2000], TEXTS), None),
        ("coarse", (WAVES, TEXTS), ("raw_wave", "text")),
        ("coarse", (WAVES, TEXTS), None),
        ("coarse", (IDS, CODES, TEXTS), None),
        ("fine", (WAVES[:, :2000], TEXTS), ("raw_wave", "text")),
        ("fine", (CODES, TEXTS), None),
        ("delayed", (IDS, CODES, TEXTS), None),
    ],
)
def test_tuples_are_waves_tokens_and_texts_by_name_or_type(
    name: str, entries: tuple[Any, ...], fields: tuple[str, ...] | None
) -> None:
    """19: the reference takes no token ids, and sends the text of (wave, text) to the codec."""
    named = {} if fields is None else {"ds_fields": fields}
    trainer = built(name, is_mute=False, dataset=Own(*entries), data_max_length_seconds=None, **named)
    trainer.train()
    assert trainer.steps == 2


def test_batches_of_two_waves_have_the_raw_wave_first() -> None:
    trainer = built("coarse", is_mute=False, dataset=Own(WAVES, TEXTS))
    named = trainer.data_tuple_to_kwargs((WAVES, WAVES[:, :2000], TEXTS))
    assert [(name, value.shape[1]) for name, value in named.items() if name != "texts"] == [
        ("raw_wave", 4000),
        ("raw_wave_for_codec", 2000),
    ]


def test_embedded_texts_are_told_from_waves() -> None:
    """19: in the reference three-dimensional floats are taken for waves."""
    stage = CoarseTransformerWrapper(transformer=CoarseTransformer(**COARSE, has_condition=True, cond_dim=5))
    embeds = torch.randn(8, 4, 5)
    batches = [(IDS[:2], CODES[:2], embeds[:2])]
    trainer = StageTrainer(stage, train_dataloader=batches, **{**OPTIONS, "num_train_steps": 1, "valid_frac": 0.0})
    named = trainer.data_tuple_to_kwargs(batches[0])
    assert {key: value.shape for key, value in named.items()} == {
        "semantic_token_ids": IDS[:2].shape,
        "token_ids": CODES[:2].shape,
        "text_embeds": embeds[:2].shape,
    }
    trainer.train()


def test_micro_batches_of_unequal_lengths_are_one_great_batch() -> None:
    """Sounds of different lengths have different numbers of tokens: each token counts alike."""

    def gradients(batch_size: int, grad_accum_every: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        stage = CoarseTransformerWrapper(transformer=CoarseTransformer(**COARSE), mask_prob=0.0)
        order = [
            {"semantic_token_ids": IDS[i, : 3 + i], "token_ids": CODES[i, : 2 + i], "is_end": i % 2 == 0}
            for i in range(4)
        ]
        options = {**OPTIONS, "batch_size": batch_size, "grad_accum_every": grad_accum_every, "num_train_steps": 1}
        run = f"run-{batch_size}"
        trainer = StageTrainer(
            stage, dataset=order, **{**options, "valid_frac": 0.0, "results_folder": run, "optimizer": "adam"}
        )
        trainer.train()
        return stage.own_state()

    whole, parts = gradients(4, 1), gradients(1, 4)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-4)


def test_the_trainer_generates() -> None:
    trainer = built("semantic", dataset=Own(IDS), data_max_length_seconds=None, use_ema=True)
    trainer.train()
    made = trainer.generate(max_length=6, batch_size=3, seed=0)
    assert made.shape[0] == 3 and made.shape[1] <= 6
    stage = load_network(Path("run/checkpoints/step-00000002"))
    assert torch.equal(stage.generate(max_length=6, batch_size=3, seed=0), made), "with the averaged weights"


@pytest.mark.parametrize(
    ("name", "entry", "sentence"),
    [
        ("semantic", IDS + 1, "semantic_token_ids hold 9, and the transformer knows 0 to 8"),
        ("coarse", CODES + torch.tensor([1, 0, 0]), "token_ids hold 16, and the transformer knows 0 to 15"),
        ("fine", CODES + torch.tensor([1, 0, 0]), "token_ids hold 16, and the transformer knows 0 to 15"),
        ("delayed", CODES - 2, "token_ids hold -2, and the transformer knows 0 to 15, and -1 past the end"),
    ],
)
def test_tokens_that_the_transformer_does_not_know_are_refused(name: str, entry: Tensor, sentence: str) -> None:
    """Codes of one quantizer too great would be learned as the next one's, and as the end."""
    entries = {"semantic": (entry,), "fine": (entry,)}.get(name, (IDS, entry))
    trainer = built(name, dataset=Own(*entries), data_max_length_seconds=None)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        trainer.train()


@pytest.mark.parametrize("coarse", [3, 4])
def test_a_fine_stage_without_quantizers_is_refused(coarse: int) -> None:
    tiny().save("codec")
    with pytest.raises(ValueError, match=f"num_coarse_quantizers={coarse} leaves none of the codec's 3 quantizers to"):
        build_fine({**SIZES, "num_coarse_quantizers": coarse}, codec="codec")


@pytest.mark.parametrize("name", ["semantic", "fine"])
def test_a_loader_may_tell_the_lengths(name: str) -> None:
    waves = [WAVES[number, : 3000 + 100 * number] for number in range(4)]
    loader = get_dataloader(waves, batch_size=2, with_lengths=True)
    trainer = built(name, train_dataloader=loader, data_max_length_seconds=None, valid_frac=0.0)
    heard = {"semantic": "raw_wave", "fine": "raw_wave_for_codec"}[name]
    assert trainer.prepare(next(iter(loader)))[f"{heard}_lengths"].tolist() == [3000, 3100]
    trainer.train_step()


def test_padding_is_no_unknown_token() -> None:
    stage = FineTransformerWrapper(transformer=FineTransformer(**FINE, pad_id=99))
    trainer = StageTrainer(stage, train_dataloader=[(CODES[:2],)], **{**OPTIONS, "valid_frac": 0.0})
    rows = CODES[:2].clone()
    rows[0, 9:], rows[1, 7:] = 99, -1
    assert torch.equal(trainer.data_tuple_to_kwargs((rows,))["token_ids"], rows)
    batch = {"token_ids": rows}
    assert int(trainer.task.weight(batch)) == int(((rows >= 0) & (rows < 99)).sum()), "padding has no weight"
    given: dict[str, Any] = {"temperature": 0.0}
    made = [
        stage.generate(coarse_token_ids=coarse, **given)
        for coarse in (rows[..., : FINE["num_coarse_quantizers"]], stage.tokens(batch)["coarse_token_ids"])
    ]
    assert torch.equal(*made) and (made[0][0, 9:] == -1).all()


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("semantic", {"dataset": Own(IDS), "folder": "sounds"}, "give folder or dataset, not both"),
    (
        "semantic",
        {"dataset": Own(IDS), "val_dataset": Own(IDS), "valid_dataset": Own(IDS)},
        "val_dataset or valid_dataset",
    ),
    ("fine", {"dataset": Own(CODES), "dataset_normalize": True}, "dataset_normalize=True is not supported"),
    ("coarse", {"folder": "nowhere"}, "the data folder nowhere does not exist"),
    ("coarse", {"folder": "sounds", "data_max_length_seconds": None}, "how much of a sound is heard at a time"),
    ("semantic", {"dataset": Own(IDS), "anything_else": 1}, "SemanticTransformerTrainer has no option 'anything_else'"),
]


@pytest.mark.parametrize(("name", "given", "sentence"), MISTAKES)
def test_mistakes_are_one_sentence(sounds: str, name: str, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError, OSError), match=sentence.replace("(", r"\(")):
        built(name, **given)


def test_texts_that_are_missing_are_missed(sounds: str) -> None:
    with pytest.raises(ValueError, match="this stage reads texts, and the samples have none"):
        built("coarse", is_mute=False, folder=sounds).train()


def test_a_wrapper_stands_for_its_parts_and_a_wrong_one_is_told() -> None:
    stage = CoarseTransformerWrapper(transformer=CoarseTransformer(**COARSE))
    data = Own(IDS, CODES)
    assert CoarseTransformerTrainer(stage, dataset=data, **OPTIONS).unwrapped_stage is stage
    with pytest.raises(ValueError, match="beside codec, which it has itself: give a CoarseTransformerWrapper alone"):
        CoarseTransformerTrainer(stage, tiny(), dataset=data, **OPTIONS)
    with pytest.raises(
        ValueError, match="a CoarseTransformerWrapper is given: give a SemanticTransformerWrapper alone"
    ):
        SemanticTransformerTrainer(stage, dataset=data, **OPTIONS)


TWO_PROCESSES = """
import os, sys
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from models.audiolm.test_trainers import CODES, FINE
from helicon.models.audiolm.trainers import FineTransformerTrainer
from helicon.models.audiolm.transformers import FineTransformer

def trained(batch_size, folder):
    torch.manual_seed(0)
    data = [{"token_ids": CODES[number, : 3 + number]} for number in range(8)]
    run = FineTransformerTrainer(
        FineTransformer(**FINE), dataset=data, num_train_steps=3, batch_size=batch_size, valid_frac=0.0, lr=1e-2,
        optimizer="adam", tensorboard=False, results_folder=folder
    )
    run.unwrapped_stage.mask_prob = 0.0
    run.train()
    return run.unwrapped_stage.own_state()

if "RANK" not in os.environ:
    torch.save(trained(4, "one"), "one.pt")
    sys.exit()
state = trained(2, "two")
assert dist.get_world_size() == 2
expected = torch.load("one.pt", weights_only=True)
for name, value in state.items():
    both = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(both, value)
    assert torch.equal(both[0], both[1]), name
    torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-4, msg=name)
dist.barrier()
os._exit(0)  # gloo's threads do not always end in order
"""


@pytest.mark.slow
def test_both_processes_train_one_fine_transformer(tmp_path: Path) -> None:
    """2: in the reference gradients are never shared, and the ranks drift apart."""
    script = tmp_path / "two_processes.py"
    script.write_text(TWO_PROCESSES)
    tests = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, str(script), tests], check=True, timeout=600)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, str(script), tests], check=True, timeout=600)


SHARED = (
    "num_train_steps batch_size audio_conditioner dataset valid_dataset data_max_length data_max_length_seconds folder lr "
    "grad_accum_every wd max_grad_norm valid_frac random_split_seed save_results_every save_model_every results_folder "
    "accelerate_kwargs init_process_group_timeout_seconds use_wandb_tracking split_batches drop_last force_clear_prev_results "
    "average_valid_loss_over_grad_accum_every"
)


@pytest.mark.parametrize(
    ("trainer", "own"),
    [
        (SemanticTransformerTrainer, "wav2vec transformer"),
        (CoarseTransformerTrainer, "transformer codec wav2vec ds_fields"),
        (FineTransformerTrainer, "transformer codec dataset_normalize"),
    ],
)
def test_every_keyword_of_the_reference_is_known(trainer: type[StageTrainer], own: str) -> None:
    known = inspect.signature(trainer).parameters
    assert not {ALIASES.get(name, name) for name in f"{own} {SHARED}".split()} - known.keys()
    assert [name for name, entry in known.items() if entry.kind is entry.POSITIONAL_OR_KEYWORD] == [
        name for name in own.split() if name not in ("ds_fields", "dataset_normalize")
    ]
