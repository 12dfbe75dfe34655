"""Frozen encoders of transformers, on tiny random models written to disk."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from helicon.models.text import PretrainedTextEncoder, TextEncoder
from helicon.nn.network import Network, load_network

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "green", "circle", "square", "on", "paper"]
TEXTS = ["a red circle", "", "a green square on a red paper", "a"]
WIDTH = 16


def write_tokenizer(folder: Path, **options: int) -> None:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", **options
    ).save_pretrained(folder)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=10,
        d_model=WIDTH,
        d_kv=8,
        d_ff=20,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.5,
    )
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=10,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=20,
        max_position_embeddings=30,
    )
    return transformers.BertModel(config)


def clip() -> nn.Module:
    shape = {"hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        **shape,
        "vocab_size": 10,
        "max_position_embeddings": 9,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {**shape, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=6))


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=10,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=20,
        decoder_ffn_dim=20,
        max_position_embeddings=30,
        forced_eos_token_id=None,
    )
    return transformers.BartModel(config)


BUILDERS: dict[str, Callable[[], nn.Module]] = {"t5": t5, "bert": bert, "clip": clip, "bart": bart}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, build in BUILDERS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        build().save_pretrained(folders[name])
        write_tokenizer(folders[name])
    return folders


@pytest.fixture(params=BUILDERS)
def folder(request: pytest.FixtureRequest, saved: dict[str, Path]) -> Path:
    return saved[request.param]


def reference(folder: Path, text: str) -> torch.Tensor:
    """What the whole model's text side makes of one text, through its own class."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            return model.get_encoder()(ids).last_hidden_state[0]
        return getattr(model, "text_model", model)(ids).last_hidden_state[0]


def test_it_gives_what_the_model_gives(folder: Path) -> None:
    network = PretrainedTextEncoder(folder)
    batch = network.encode(TEXTS)
    assert isinstance(network, TextEncoder) and network.dim == WIDTH
    assert batch.mask.sum(dim=1).tolist() == [4, 1, 8, 2]
    for row, text in enumerate(TEXTS):
        torch.testing.assert_close(
            batch.embeddings[row, batch.mask[row]], reference(folder, text), atol=1e-5, rtol=1e-5
        )
        assert (batch.embeddings[row, ~batch.mask[row]] == 0).all()
    assert "Decoder" not in str(network.backbone) and "Vision" not in str(network.backbone)


def test_a_text_is_the_same_with_any_batch_mates_and_from_any_cache(folder: Path, tmp_path: Path) -> None:
    fresh = lambda **options: PretrainedTextEncoder(folder, **options)
    uncached = fresh(cache_entries=0)
    network = fresh(cache_entries=2, cache_folder=tmp_path)
    batch, again = network.encode(TEXTS), network.encode(TEXTS[::-1])
    other_run = fresh(cache_folder=tmp_path).encode(TEXTS)
    for row, text in enumerate(TEXTS):
        length = batch.mask[row].sum()
        alone = uncached.encode([text]).embeddings[0]
        assert len(alone) == length
        for embeddings in (batch.embeddings[row], again.embeddings[-1 - row], other_run.embeddings[row]):
            assert torch.equal(embeddings[:length], alone)
    assert len(network.cache.entries) == 2 and len(uncached.cache.entries) == 0
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(TEXTS)
    assert not list(tmp_path.rglob("*.partial"))


def counting(network: PretrainedTextEncoder) -> list[int]:
    """The lengths of the texts the model itself has to read from now on."""
    read: list[int] = []
    network.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return read


def test_the_caches_spare_the_model(saved: dict[str, Path], tmp_path: Path) -> None:
    network = PretrainedTextEncoder(saved["t5"], cache_entries=2, cache_folder=tmp_path / "disk")
    read = counting(network)
    network.encode(["a", "a", "red", "a"])
    assert read == [2, 2]
    network.cache.folder = None
    network.encode(["green", "a"])  # pushes out "red", which was used least recently
    assert read == [2, 2, 2]
    network.encode(["red"])
    assert read == [2, 2, 2, 2]
    later = PretrainedTextEncoder(saved["t5"], cache_folder=tmp_path / "disk")
    read = counting(later)
    later.encode(["a", "red", "paper"])
    assert read == [2]


def test_the_cache_knows_models_and_settings_apart(saved: dict[str, Path], tmp_path: Path) -> None:
    text = "a red circle on paper"
    for options in ({}, {"max_length": 3}, {"layer": 1}):
        for name in ("t5", "bert"):
            expected = PretrainedTextEncoder(saved[name], **options).encode([text])
            cached = PretrainedTextEncoder(saved[name], cache_folder=tmp_path, **options).encode([text])
            assert torch.equal(cached.embeddings, expected.embeddings)
    halved = PretrainedTextEncoder(saved["t5"], cache_folder=tmp_path).to(torch.bfloat16)
    assert halved.encode([text]).embeddings.dtype == torch.bfloat16


def test_a_damaged_cache_file_is_computed_anew(
    saved: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = PretrainedTextEncoder(saved["t5"], cache_folder=tmp_path).encode(["a"]).embeddings
    (path,) = tmp_path.rglob("*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(PretrainedTextEncoder(saved["t5"], cache_folder=tmp_path).encode(["a"]).embeddings, expected)
    assert "damaged" in caplog.text and path.read_bytes() == whole


class Painter(Network):
    def __init__(self, text_encoder: Network, dim: int = 3):
        super().__init__()
        self.text_encoder = text_encoder
        self.project = nn.Linear(WIDTH, dim)

    def forward(self, texts: list[str]) -> torch.Tensor:
        return self.project(self.text_encoder.encode(texts).embeddings)


def test_it_stays_frozen_whatever_its_parent_does(saved: dict[str, Path]) -> None:
    painter = Painter(PretrainedTextEncoder(saved["t5"], cache_entries=0))
    before = painter.text_encoder.encode(["a red circle"]).embeddings
    painter.train().requires_grad_(True).apply(
        lambda module: [p.data.zero_() for p in module.parameters(recurse=False)]
    )
    painter(["a red circle"]).sum().backward()
    assert {name for name, _ in painter.named_parameters()} == {"project.weight", "project.bias"}
    assert not any(p.requires_grad or p.grad is not None for p in painter.text_encoder.backbone.parameters())
    after = painter.text_encoder.encode(["a red circle"])  # dropout of 0.5 would show
    assert torch.equal(after.embeddings, before) and not after.embeddings.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(painter.text_encoder.encode(["a red circle"]).embeddings, before)


def test_it_moves_with_its_parent(saved: dict[str, Path]) -> None:
    painter = Painter(PretrainedTextEncoder(saved["t5"])).to(torch.float64)
    assert painter.text_encoder.encode(["a"]).embeddings.dtype == torch.float64
    painter.to("meta")
    assert {p.device.type for p in painter.text_encoder.backbone.parameters()} == {"meta"}
    assert painter.text_encoder.encode(["a"]).embeddings.device.type == "meta"  # from the cache, to where the parent is


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_output_is_on_the_parents_gpu(saved: dict[str, Path]) -> None:
    painter = Painter(PretrainedTextEncoder(saved["t5"]))
    on_cpu = painter.text_encoder.encode(["a red circle"]).embeddings
    painter.text_encoder.cache.entries.clear()
    batch = painter.cuda().text_encoder.encode(["a red circle"])
    assert batch.embeddings.is_cuda and batch.mask.is_cuda
    torch.testing.assert_close(batch.embeddings.cpu(), on_cpu, atol=1e-4, rtol=1e-4)


def test_a_parent_saves_the_name_and_not_the_weights(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved["t5"].parent)
    relative = Path(saved["t5"].name)
    painter = Painter(
        PretrainedTextEncoder(relative, max_length=3, layer=-2, cache_entries=5, cache_folder=tmp_path / "c")
    )
    painter.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/stages/text_encoder/model.safetensors").stat().st_size < 1000
    monkeypatch.chdir(tmp_path)
    loaded = load_network(tmp_path / "saved")
    assert isinstance(loaded, Painter) and loaded.text_encoder.cache.folder is None
    assert torch.equal(loaded(TEXTS), painter(TEXTS))


def test_another_model_in_the_place_of_the_saved_one_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    t5().save_pretrained(folder)
    write_tokenizer(folder)
    Painter(PretrainedTextEncoder(folder)).save_pretrained(tmp_path / "saved")
    load_network(tmp_path / "saved")
    t5().save_pretrained(folder)
    with pytest.raises(ValueError, match="is not the one this network was trained with"):
        load_network(tmp_path / "saved")


def test_layers(saved: dict[str, Path]) -> None:
    model = transformers.BertModel.from_pretrained(saved["bert"]).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(saved["bert"])("a red circle", return_tensors="pt").input_ids
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states
    for layer in (0, 1, -2):
        found = PretrainedTextEncoder(saved["bert"], layer=layer).encode(["a red circle"]).embeddings
        torch.testing.assert_close(found, states[layer])
    with pytest.raises(ValueError, match="layer=3 must lie between -3 and 2"):
        PretrainedTextEncoder(saved["bert"], layer=3)


def test_long_texts_are_cut_with_one_warning(saved: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    network = PretrainedTextEncoder(saved["clip"])
    assert network.max_length == 9  # all that this model takes
    with caplog.at_level(logging.WARNING, "helicon"):
        batch = network.encode(["a red circle " * 4, "red " * 30])
    assert batch.embeddings.shape == (2, 9, WIDTH) and batch.mask.all()
    (record,) = [record for record in caplog.records if record.name.startswith("helicon")]
    assert "has 13 tokens and is cut to max_length=9" in record.getMessage()
    cut = PretrainedTextEncoder(saved["clip"], max_length=3).encode(["a red circle"])
    assert torch.equal(cut.embeddings, PretrainedTextEncoder(saved["clip"]).encode(["a red"]).embeddings)
    with pytest.raises(ValueError, match="max_length=0 must be at least 1"):
        PretrainedTextEncoder(saved["clip"], max_length=0)


def test_a_text_of_no_tokens(saved: dict[str, Path], tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path)
    network = PretrainedTextEncoder(tmp_path, cache_folder=tmp_path / "cache")
    for _ in range(2):
        batch = network.encode(["", ""])
        assert batch.embeddings.shape == (2, 1, WIDTH) and not batch.mask.any() and (batch.embeddings == 0).all()
        network.cache.entries.clear()
    assert network.encode(["", "a red"]).mask.tolist() == [[False, False], [True, True]]
    assert network.encode([]).embeddings.shape == (0, 1, WIDTH)


def test_copies_stand_alone(saved: dict[str, Path]) -> None:
    network = PretrainedTextEncoder(saved["t5"])
    copied = copy.deepcopy(network)
    assert torch.equal(copied.encode(["a"]).embeddings, network.encode(["a"]).embeddings)
    copied.double()
    assert network.dtype == torch.float32


def test_odd_texts(saved: dict[str, Path]) -> None:
    network = PretrainedTextEncoder(saved["t5"])
    assert network.encode(["\ud800 red"]).mask.sum() == 3
    with pytest.raises(ValueError, match="takes a list of texts"):
        network.encode("a red circle")


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("nobody/no-such-model", str(tmp_path), "no such name!"):
        with pytest.raises(ValueError, match="give the folder of a downloaded model, or use the built-in") as error:
            PretrainedTextEncoder(name)
        assert "\n" not in str(error.value)
