import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.meshes import box, write
from helicon import DatasetFromTransforms, MeshAutoencoderTrainer, MeshTransformerTrainer, custom_collate
from helicon.data.mesh import face_edges
from helicon.data.tokenize import tokenize
from helicon.engine.options import ALIASES
from helicon.models.meshgpt.autoencoder import MeshAutoencoder
from helicon.models.meshgpt.compact import CompactMeshTokenizer
from helicon.models.meshgpt.data import LENGTHS, MeshSource, MeshTokenizer, training_meshes
from helicon.models.meshgpt.trainers import build_mesh_transformer
from helicon.models.meshgpt.transformer import MeshTransformer
from helicon.registry import load
from models.meshgpt.tiny import AUTOENCODER, COUNTED, TEXT, TRANSFORMER, autoencoder, compact, furniture, transformer

OPTIONS: dict[str, Any] = {
    "num_train_steps": 2,
    "batch_size": 2,
    "lr": 1e-3,
    "warmup_steps": 0,
    "tensorboard": False,
    "save_results_every": 2,
    "results_folder": "run",
}
TOKENIZERS = {"autoencoder": autoencoder, "compact": compact}


class Own(Dataset[Any]):
    """A user's dataset of tuples."""

    def __init__(self, *columns: Any):
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(column[index] for column in self.columns)


TWO_PROCESSES = """
import os, sys
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from models.meshgpt.test_trainers import learned

for name in ("autoencoder", "compact"):
    state = learned(name, processes=2)
    for key, value in state.items():
        both = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(both, value)
        assert torch.equal(both[0], both[1]), key
    if dist.get_rank() == 0:
        torch.save(state, f"{name}.pt")
dist.barrier()
os._exit(0)  # gloo's threads do not always end in order
"""


OWN_LOSS = {"commit_loss_weight": 0.0}  # the entropy of codes is that of the meshes of one process, not a sum over them


def learned(name: str, processes: int) -> dict[str, Tensor]:
    """The weights after three steps with four meshes each, of different numbers of faces."""
    options = {**LONG, "num_train_steps": 3, "batch_size": 4 // processes, "max_grad_norm": None, "valid_frac": 0.0}
    # With a larger eps than usual: or steps would hardly depend on the size of gradients.
    options |= {"optimizer": "adam", "optimizer_kwargs": {"eps": 1e-2}, "results_folder": f"{name}-of-{processes}"}
    trainer: Any = (
        MeshAutoencoderTrainer(autoencoder(**OWN_LOSS), furniture(12), **options)
        if name == "autoencoder"
        else MeshTransformerTrainer(transformer(compact()), furniture(12), **options)
    )
    for _ in range(3):
        trainer.train_step()
    return {key: value.clone() for key, value in trainer.unwrapped_model.own_state().items()}


SAMPLES = [furniture(8)[index] for index in range(8)]
VERTICES, FACES, TEXTS = ([sample[name] for sample in SAMPLES] for name in ("vertices", "faces", "texts"))
EDGES = [face_edges(faces) for faces in FACES]


@pytest.fixture
def folder() -> str:
    """Boxes, each with a text beside it."""
    for number in range(8):
        write(Path("meshes"), f"{number}.obj", mesh=box(1 + number / 4))
        Path(f"meshes/{number}.txt").write_text(f"box number {number}")
    return "meshes"


def losses(trainer: Any, steps: int = 2) -> list[float]:
    """Of the first steps of a longer run, which would end with samples."""
    return [float(trainer.train_step()["loss"]) for _ in range(steps)]


LONG: dict[str, Any] = {**OPTIONS, "num_train_steps": 50, "save_results_every": 50}


def test_the_keywords_of_the_reference_in_its_order(folder: str) -> None:
    """D-T6: in the reference ema_kwargs are ignored, and no transformer can be loaded."""
    kept = {"checkpoint_every": 1, "val_every": 1, "val_num_batches": 1, "warmup_steps": 3, "weight_decay": 0.01}
    common = {**kept, "ema_kwargs": {"beta": 0.5, "update_every": 1, "use_foreach": True}, "tensorboard": False}
    data, valid = Own(VERTICES, FACES, EDGES), Own(VERTICES[:3], FACES[:3], EDGES[:3])
    names = ["vertices", "faces", "face_edges"]
    first = MeshAutoencoderTrainer(
        autoencoder(),
        data,
        2,
        2,
        1,
        val_dataset=valid,
        learning_rate=1e-3,
        checkpoint_folder="first",
        data_kwargs=names,
        **common,
    )
    first()
    assert first.options.ema_beta == 0.5 and first.options.lr == 1e-3 and first.steps == 2
    stage = load("first")
    assert isinstance(stage, MeshAutoencoder)
    captioned = Own(VERTICES, FACES, TEXTS)
    second = MeshTransformerTrainer(
        transformer(stage, **TEXT), captioned, 2, 2, 1, learning_rate=1e-3, checkpoint_folder="second", **common
    )
    second.forward()
    loaded = load("second")
    assert isinstance(loaded, MeshTransformer) and isinstance(loaded.autoencoder, MeshAutoencoder)
    known = inspect.signature(MeshTransformerTrainer).parameters
    assert [*known][:5] == ["model", "dataset", "num_train_steps", "batch_size", "grad_accum_every"]
    asked = "val_dataset val_every val_num_batches scheduler scheduler_kwargs accelerator_kwargs optimizer_kwargs "
    asked += "max_grad_norm use_wandb_tracking"
    assert all(ALIASES.get(name, name) in known for name in asked.split())
    with pytest.raises(ValueError, match="ema_kwargs: power is not known here"):
        MeshAutoencoderTrainer(autoencoder(), data, 2, 2, ema_kwargs={"power": 0.7}, results_folder="third")
    with pytest.raises(TypeError, match="MeshAutoencoderTrainer needs num_train_steps and batch_size"):
        MeshAutoencoderTrainer(autoencoder(), data, results_folder="third")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_folder_of_captioned_meshes_trains_everything(folder: str, name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    if isinstance(tokenizer, MeshAutoencoder):
        first = MeshAutoencoderTrainer(tokenizer, folder=folder, **{**OPTIONS, "results_folder": "first"})
        before = {key: value.clone() for key, value in tokenizer.own_state().items()}
        first.train()
        assert any(not torch.equal(value, before[key]) for key, value in tokenizer.own_state().items())
        assert list(Path("first/samples").glob("*-original.glb"))
        tokenizer = load("first")
    frozen = {key: value.clone() for key, value in tokenizer.own_state().items()}
    trainer = MeshTransformerTrainer(transformer(tokenizer, **TEXT), folder=folder, captions="beside", **OPTIONS)
    trainer.train()
    assert list(Path("run/samples").glob("*-meshes.png"))
    network = load("run")
    assert isinstance(network, MeshTransformer) and type(network.autoencoder) is type(tokenizer)
    assert all(torch.equal(value, frozen[key]) for key, value in network.autoencoder.own_state().items())
    assert not any(key.startswith("autoencoder") for key in network.own_state()), "stages are not saved twice"


def cached(tokenizer: Any, name: str = "cache", source: Any = None, **arguments: Any) -> Path:
    maker = MeshTokenizer(tokenizer)
    found = maker.items(source if source is not None else MeshSource("meshes", captions="beside", augment=False))
    tokenize(found, maker, Path(name), source="meshes", arguments={"captions": "beside", **arguments})
    return Path(name)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_of_a_cache_and_their_meshes_give_the_same_losses(folder: str, name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    read = {"folder": folder, "captions": "beside", "augment": False}
    build = lambda: transformer(tokenizer, **TEXT, **COUNTED)
    on_meshes = losses(MeshTransformerTrainer(build(), **read, **{**LONG, "results_folder": "meshes-run"}), 6)
    cache = cached(tokenizer)
    on_cache = losses(MeshTransformerTrainer(build(), folder=cache, captions="beside", **LONG), 6)
    assert on_cache == on_meshes and len(set(on_cache)) == 6


def test_a_cache_of_another_tokenizer_or_of_other_meshes_is_refused(folder: str) -> None:
    cache = cached(autoencoder(), max_faces=99)
    with pytest.raises(ValueError, match=r"the autoencoder of this model is .* and cache was made with"):
        MeshTransformerTrainer(transformer(autoencoder(seed=5)), folder=cache, **OPTIONS)
    with pytest.raises(
        ValueError, match=r"cache was made with max_faces=99, not 20: write data\.max_faces=99, or run `helicon tok"
    ):
        MeshTransformerTrainer(transformer(autoencoder()), folder=cache, max_faces=20, **OPTIONS)
    with pytest.raises(ValueError, match="cache is a token cache, and a MeshAutoencoder learns from meshes"):
        MeshAutoencoderTrainer(autoencoder(), folder=cache, **OPTIONS)
    with pytest.raises(ValueError, match="cache is a token cache itself"):
        MeshTokenizer(autoencoder()).items(training_meshes("cache"))
    mute = cached(autoencoder(), "mute", MeshSource("meshes", augment=False))
    with pytest.raises(ValueError, match="mute holds no texts, and this MeshTransformer reads some"):
        MeshTransformerTrainer(transformer(autoencoder(), **TEXT), folder=mute, **OPTIONS)


def test_edges_codes_and_texts_of_one_item_are_never_those_of_another(folder: str) -> None:
    """D-D1, D-D2: in the reference a cache is kept by index, and a second dataset reads the first one's."""
    cached(compact())
    for name in ("5", "2"):
        Path(f"meshes/{name}.obj").unlink()
        Path(f"meshes/{name}.txt").unlink()
    cache = cached(compact())
    again = MeshTransformerTrainer(transformer(compact(), **TEXT), folder=cache, **OPTIONS).feed
    number = lambda sample: int(sample["texts"].rsplit(" ", 1)[1])
    data = MeshSource(folder, captions="beside", augment=False).at(compact())
    expected = {number(sample): compact().tokenize(sample["vertices"], sample["faces"]) for sample in data}
    read = [sample for part in (again.dataset, again.val_dataset) for sample in (part[i] for i in range(len(part)))]
    assert sorted(map(number, read)) == [0, 1, 3, 4, 6, 7]
    assert all(torch.equal(sample["codes"], expected[number(sample)]) for sample in read)


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ((VERTICES, FACES, TEXTS), None),
        ((TEXTS, EDGES, FACES, VERTICES), None),
        ((VERTICES, FACES, EDGES, TEXTS), ("vertices", "faces", "face_edges", "texts")),
        ((VERTICES, FACES, EDGES, TEXTS), ("vertices", "faces", "_", "texts")),
    ],
)
def test_tuples_are_meshes_and_texts_by_name_or_type(columns: Any, names: Any) -> None:
    how = {**LONG, "augment": False, "data_kwargs": names}
    given = losses(MeshTransformerTrainer(transformer(autoencoder(), **TEXT), dataset=Own(*columns), **how))
    own = {
        **LONG,
        "results_folder": "own",
    }  # made-up meshes are never changed, as their captions would no longer be true
    assert given == losses(MeshTransformerTrainer(transformer(autoencoder(), **TEXT), furniture(8), **own))


class Named(Own):
    data_kwargs = ("texts", "codes")


def test_codes_alone_are_learned_from() -> None:
    """D-M16: the reference asks for vertices and faces, also beside codes."""
    codes = [torch.randint(9, (6 * length,), generator=torch.Generator().manual_seed(length)) for length in range(1, 9)]
    build = lambda: transformer(None, codebook_size=9, tokens_per_face=6, **TEXT)
    by_type = losses(MeshTransformerTrainer(build(), Own(codes, TEXTS), **LONG))
    shaped = [row.view(-1, 2) for row in codes]
    by_name = losses(MeshTransformerTrainer(build(), Named(TEXTS, shaped), **{**LONG, "results_folder": "named"}))
    assert by_type == by_name
    strange = {**LONG, "results_folder": "strange", "valid_frac": 0.0}
    with pytest.raises(ValueError, match="code 17 is none of the tokenizer's, which are 0 to 8"):
        losses(MeshTransformerTrainer(build(), Own([row + 9 for row in codes], TEXTS), **strange))
    with pytest.raises(ValueError, match="has no autoencoder to read meshes with"):
        MeshTransformerTrainer(build(), Own(VERTICES, FACES), **{**OPTIONS, "results_folder": "other"}).train()
    with pytest.raises(ValueError, match="has no autoencoder to read meshes with"):
        MeshTransformerTrainer(build(), folder="meshes", **{**OPTIONS, "results_folder": "another"})


def test_a_user_s_own_loader_of_tuples(folder: str) -> None:
    read = lambda path: (VERTICES[int(path.stem)], FACES[int(path.stem)], path.stem)
    data = DatasetFromTransforms(folder, {"obj": read}, data_kwargs=("vertices", "faces", "texts"))
    loader = torch.utils.data.DataLoader(Own(VERTICES, FACES, TEXTS), batch_size=3, collate_fn=custom_collate)
    network = transformer(autoencoder(), **TEXT)
    trainer = MeshTransformerTrainer(network, train_dataloader=loader, **{**LONG, "valid_frac": 0.0})
    named = trainer.next_data_to_forward_kwargs(next(iter(loader)))
    assert named.keys() == {"vertices", "faces", "texts"}
    assert len(losses(trainer)) == 2
    dicts = {**LONG, "augment": False, "results_folder": "dicts"}
    trainer = MeshTransformerTrainer(transformer(autoencoder(), **TEXT), data, **dicts)
    batch = next(trainer.feed.train.steps())[0]
    faces = FACES[int(batch["texts"][0])]
    assert torch.equal(batch["faces"][0, : len(faces)], faces) and len(losses(trainer)) == 2


@pytest.mark.parametrize("name", TOKENIZERS)
def test_meshes_that_are_too_long_for_the_transformer_are_left_out(name: str) -> None:
    network = transformer(TOKENIZERS[name](), max_seq_len=120)
    trainer = MeshTransformerTrainer(network, furniture(12), **{**LONG, "valid_frac": 0.0})
    assert all(loss > 0 for loss in losses(trainer, 3))
    assert "and this MeshTransformer has room for 120" in Path("run/bad_files.txt").read_text()


def test_training_goes_on_as_before_after_a_validation_and_after_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """D-T2, D-T13, D-M8: in the reference the network stays in evaluation mode, and no null condition is learned any more."""
    modes: list[bool] = []
    forward = MeshTransformer.forward
    monkeypatch.setattr(
        MeshTransformer, "forward", lambda self, **given: modes.append(self.training) or forward(self, **given)
    )
    often = {**OPTIONS, "num_train_steps": 3, "val_every": 1, "val_num_batches": 1}
    MeshTransformerTrainer(transformer(compact(), **TEXT), furniture(8), **often).train()
    assert modes == [True, False, True, False, True, False]

    trainer = MeshAutoencoderTrainer(autoencoder(), furniture(8), **{**often, "results_folder": "other"})
    while trainer.step < 2:
        trainer.train_step()
    network = trainer.unwrapped_model.train()
    before = {key: value.clone() for key, value in network.own_state().items()}
    codes = trainer.tokenize(VERTICES[0], FACES[0])
    assert codes.shape == (3 * len(FACES[0]), 2) and network.training
    assert all(torch.equal(value, before[key]) for key, value in network.own_state().items())
    averaged = trainer.ema_tokenizer
    assert torch.equal(averaged.tokenize(vertices=VERTICES[0], faces=FACES[0]), codes)
    assert not averaged.training and not any(weight.requires_grad for weight in averaged.parameters())
    assert all(weight.requires_grad for weight in network.parameters())
    assert torch.equal(transformer(averaged).tokenize(VERTICES[0][None], FACES[0][None]).flatten(), codes.flatten())
    trainer.set_model_as_ema_model_()
    assert torch.equal(network.tokenize(VERTICES[0], FACES[0]), codes)
    without = {**OPTIONS, "results_folder": "without", "use_ema": False}
    with pytest.raises(ValueError, match="this trainer keeps no averaged weights"):
        _ = MeshAutoencoderTrainer(autoencoder(), furniture(8), **without).ema_tokenizer


@pytest.mark.parametrize("name", ["mesh-autoencoder", *TOKENIZERS])
def test_batches_of_a_compiled_network_have_few_lengths_and_cost_the_same(name: str) -> None:
    if name == "mesh-autoencoder":
        trainer: Any = MeshAutoencoderTrainer(autoencoder(), furniture(8), **OPTIONS)
    else:
        trainer = MeshTransformerTrainer(transformer(TOKENIZERS[name](), **TEXT), furniture(8), **OPTIONS)
    batch = next(trainer.feed.train.steps())[0]
    plain = trainer.prepare(batch)
    trainer.runtime.compiles = True
    padded = trainer.prepare(batch)
    longer = {key: value.shape[1] for key, value in padded.items() if isinstance(value, Tensor) and value.ndim > 1}
    room = {"faces": 80, "codes": 480}  # of the transformer
    assert longer and all(length % LENGTHS == 0 or length == room[key] for key, length in longer.items())
    assert any(length != plain[key].shape[1] for key, length in longer.items())
    with trainer.inference(seed=0):
        one, other = trainer.task.validate(plain), trainer.task.validate(padded)
    assert float(one.total) == pytest.approx(float(other.total), rel=1e-5)
    assert trainer.task.weight(plain) == trainer.task.weight(padded)


def test_quads_and_coordinates_follow_from_the_tokenizer() -> None:
    network = autoencoder(quads=True, num_discrete_coors=70)
    trainer = MeshAutoencoderTrainer(network, training_meshes("synthetic", num_samples=6), **LONG)
    batch = next(trainer.feed.train.steps())[0]
    assert batch["faces"].shape[2] == 4
    bins = (batch["vertices"][0, batch["faces"][0, 0]] + 1) / 2 * 70 - 0.5
    assert torch.allclose(bins, bins.round(), atol=1e-3) and len(losses(trainer)) == 2


@pytest.mark.parametrize("span", [(-0.5, 0.5), (0.0, 3.0)])
def test_meshes_fill_the_range_of_the_tokenizer(folder: str, span: tuple[float, float]) -> None:
    """Those that come in the cube from -1 to 1, too, and a user's own that come in any."""
    tokenizer, usual = autoencoder(coor_continuous_range=span), autoencoder()
    reads: dict[str, Any] = {
        "folder": folder,
        "own": Own(VERTICES, FACES),
        "ready": furniture(8),
        "synthetic": "synthetic",
    }
    for name, source in reads.items():
        found, cube = (MeshSource(source, augment=False).at(each) for each in (tokenizer, usual))
        for index in range(3):
            vertices, faces = found[index]["vertices"], found[index]["faces"]
            assert vertices.min() < span[0] + 0.02 * (span[1] - span[0]) and vertices.max() < span[1], name
            moved = tokenizer(vertices[None], faces[None], return_reconstruction=True).targets
            plain = usual(cube[index]["vertices"][None], faces[None], return_reconstruction=True).targets
            assert torch.equal(moved, plain), name
    data = MeshTransformerTrainer(transformer(tokenizer), Own(VERTICES, FACES), **LONG).feed.dataset
    assert data[0]["vertices"].min() < span[0] + 0.02 * (span[1] - span[0]) and data[0]["vertices"].max() < span[1]


def test_own_meshes_are_changed_at_random_only_where_asked_for(folder: str) -> None:
    """The reference changes none; files are, unless they shall not be."""
    tall = [vertices * torch.tensor([1.0, 0.5, 0.25]) for vertices in VERTICES]
    builds: list[Any] = [
        lambda data, **how: MeshAutoencoderTrainer(autoencoder(), **data, **how),
        lambda data, **how: MeshTransformerTrainer(transformer(autoencoder()), **data, **how),
    ]
    for number, build in enumerate(builds):
        for name, augment, is_changed in (
            ("own", None, False),
            ("asked", True, True),
            ("files", None, True),
            ("no", False, False),
        ):
            source = {"folder": folder} if name in ("files", "no") else {"dataset": Own(tall, FACES)}
            how = {**LONG, "results_folder": f"{name}{number}", **({} if augment is None else {"augment": augment})}
            data = build(source, **how).feed.dataset
            draws = {
                data.fetch(0, torch.Generator().manual_seed(seed))["vertices"].abs().sum().item() for seed in range(4)
            }
            assert (len(draws) > 1) == is_changed, name


def test_the_caller_s_autoencoder_stays_trainable(folder: str) -> None:
    tokenizer = autoencoder().train()
    MeshTransformerTrainer(transformer(tokenizer), furniture(8), **LONG).train_step()
    assert tokenizer.training and all(weight.requires_grad for weight in tokenizer.parameters())


def test_what_makes_no_sense_is_one_sentence(folder: str) -> None:
    wrong: list[tuple[str, Any]] = [
        ("give folder or dataset, not both", lambda: MeshAutoencoderTrainer(autoencoder(), furniture(8), folder="x")),
        (
            "give ds_fields or data_kwargs, not both",
            lambda: MeshAutoencoderTrainer(autoencoder(), furniture(8), ds_fields=["a"], data_kwargs=["a"]),
        ),
        (
            "this MeshTransformer reads texts, and the samples have none",
            lambda: MeshTransformerTrainer(transformer(compact(), **TEXT), folder=folder, **OPTIONS).train(),
        ),
        (
            "data.meshes chooses among made-up meshes, .*: leave it out, or write data.meshes=null",
            lambda: training_meshes(folder, meshes={"kinds": ["box"]}).at(compact()),
        ),
        ("give model.autoencoder or model.compact", lambda: build_mesh_transformer({}, autoencoder="x", compact={})),
    ]
    for sentence, build in wrong:
        with pytest.raises(ValueError, match=sentence):
            build()


def test_a_transformer_is_built_on_a_run_on_keywords_or_on_nothing() -> None:
    autoencoder().save("stage")
    compact().save("grid")
    for source, kind in (("stage", MeshAutoencoder), ("grid", CompactMeshTokenizer), (AUTOENCODER, MeshAutoencoder)):
        assert isinstance(build_mesh_transformer(TRANSFORMER, autoencoder=source).autoencoder, kind)
    assert build_mesh_transformer(TRANSFORMER, compact={"num_discrete_coors": 64}).autoencoder.blocks_per_side == 8
    sizes = {"codebook_size": 9, "tokens_per_face": 1}
    assert build_mesh_transformer({**TRANSFORMER, **sizes}).autoencoder is None
    transformer(compact()).save("transformer")
    with pytest.raises(
        ValueError, match=r"model\.autoencoder='transformer' holds a MeshTransformer, not a MeshAutoencoder"
    ):
        build_mesh_transformer(TRANSFORMER, autoencoder="transformer")


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """Each has meshes of other numbers of faces: a face, or a token, must count the same whichever process it is in."""
    script = tmp_path / "two_processes.py"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, str(script), str(Path(__file__).parents[2])], check=True, timeout=600)
    for name in ("autoencoder", "compact"):
        alone, first = learned(name, processes=1), torch.load(f"{name}.pt")
        before = (autoencoder(**OWN_LOSS) if name == "autoencoder" else transformer(compact())).own_state()
        assert max(float((alone[key] - value).abs().max()) for key, value in before.items()) > 1e-4, "it learned"
        for key, value in alone.items():
            torch.testing.assert_close(first[key], value, atol=1e-6, rtol=1e-3, msg=key)
