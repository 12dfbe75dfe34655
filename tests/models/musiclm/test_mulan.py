import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helicon.models.musiclm.contrastive import softmax_loss
from helicon.models.musiclm.mulan import Latents, MuLaN, ids_of_texts, ids_of_tokens
from helicon.models.musiclm.pretrained import PretrainedAudioTransformer, PretrainedSpectrogramEncoder
from helicon.nn.network import load_network
from helicon.nn.resample import resample
from models.musiclm.test_pretrained import write_ast
from models.musiclm.tiny import HZ, PLAIN, audio_tower, mulan, padded, pairs, text_tower

TEXTS = ["a loud noise", "a soft and very long tone", "a chirp"]
KINDS: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "softmax": {"decoupled_contrastive_learning": False},
    "sigmoid": {"sigmoid_contrastive_loss": True},
    "hierarchical": {"hierarchical_contrastive_loss": True},
    "hierarchical sigmoid": {"hierarchical_contrastive_loss": True, "sigmoid_contrastive_loss": True},
}


def clips(count: int = 3, samples: int = 1500) -> Tensor:
    return torch.randn(count, samples, generator=torch.Generator().manual_seed(0)) * 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_part_in_the_loss(kind):
    model = mulan(3, **KINDS[kind])
    loss = model(clips(), raw_texts=TEXTS)
    loss.backward()
    assert loss.shape == () and loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", ["decoupled", "softmax", "sigmoid"])
def test_towers_of_one_layer(kind):
    model = mulan(1, **KINDS[kind])
    model(clips(), raw_texts=TEXTS).backward()
    assert model.audio.to_token.weight.grad.abs().max() > 0


def test_what_forward_returns():
    model = mulan(2).eval()
    audio, text = model(clips(), raw_texts=TEXTS, return_latents=True)
    torch.testing.assert_close(audio.norm(dim=-1), torch.ones(3))
    torch.testing.assert_close(text.norm(dim=-1), torch.ones(3))
    torch.testing.assert_close(audio, model.get_audio_latents(clips()))
    torch.testing.assert_close(text, model.get_text_latents(raw_texts=TEXTS))
    every = model(clips(), raw_texts=TEXTS, return_pairwise_similarities=True)
    torch.testing.assert_close(every, audio @ text.T)
    torch.testing.assert_close(model(clips(), raw_texts=TEXTS, return_similarities=True), every.diagonal())
    torch.testing.assert_close(model(clips(), raw_texts=TEXTS), softmax_loss(audio, text, torch.tensor(10.0)))
    assert model(clips(), raw_texts=TEXTS[:2], return_pairwise_similarities=True).shape == (3, 2)


def test_pairs_in_a_padded_batch_lie_where_they_lie_alone():
    model = mulan(2).eval()
    lengths = torch.tensor([1500, 400, 1])
    sounds = clips()
    audio, text = model(padded(sounds, lengths), raw_texts=TEXTS, lengths=lengths, return_latents=True)
    for row, length in enumerate(lengths.tolist()):
        alone = model(sounds[row : row + 1, :length], raw_texts=TEXTS[row : row + 1], return_latents=True)
        torch.testing.assert_close(audio[row], alone[0][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(text[row], alone[1][0], atol=1e-5, rtol=1e-5)


def test_texts_that_were_read_before_give_the_same_loss():
    model = mulan(2, **KINDS["hierarchical"]).eval()
    loss = model(clips(), raw_texts=TEXTS)
    read = model.read_texts(TEXTS, multiple_of=16)
    assert read["texts"].shape == (3, 32)
    torch.testing.assert_close(model(clips(), **read), loss)
    torch.testing.assert_close(model(clips(), read["texts"]), loss)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_of_equal_texts_are_not_told_apart(kind):
    """However it is said which are equal: by numbers, by the strings, or by the tokens."""
    model = mulan(2, audio=PLAIN, **KINDS[kind])
    every_loss = [model.loss, *model.layer_losses]
    for loss in every_loss:
        loss.bias = None if loss.bias is None else torch.nn.Parameter(torch.zeros(1))  # where wrong pairs matter
    texts, numbers = [*TEXTS, TEXTS[0]], torch.tensor([5, 6, 7, 5])
    audio, text = model.embed_audio(clips(4)), model.embed_text(raw_texts=texts)
    expected = model.contrast(audio, text, caption_ids=numbers)
    read = model.read_texts(texts)
    for given in ({"raw_texts": texts}, read, {"texts": read["texts"]}, {"raw_texts": texts, "chunk_size": 3}):
        torch.testing.assert_close(model(clips(4), **given), expected)
    apart = model(clips(4), raw_texts=texts, caption_ids=torch.arange(4))
    assert apart.item() == pytest.approx(model.contrast(audio, text).item(), rel=1e-5)
    assert (apart - expected).abs() > 1e-3
    pairs = [(audio.last, text.last), *zip(audio.layers, text.layers, strict=True)]
    losses = [loss(*each, numbers) for loss, each in zip(every_loss, pairs, strict=True)]
    below = torch.stack(losses[1:]).mean() if losses[1:] else 0.0
    torch.testing.assert_close(expected, losses[0] + below)
    with pytest.raises(ValueError, match="3 caption_ids for 4 pairs: give one for each"):
        model(clips(4), raw_texts=texts, caption_ids=numbers[:3])


def test_numbers_of_captions_are_equal_where_captions_are():
    first, again = ids_of_texts(["a", "b", "ab", "", "\ud800"]), ids_of_texts(["b", "a"])
    assert len(set(first.tolist())) == 5 and first[:2].flip(0).equal(again) and first.min() >= 0
    assert first[0] == 2340832890917691671, "the same in every process"
    rows = torch.randint(3, (4000, 9), generator=torch.Generator().manual_seed(0))
    ids = ids_of_tokens(rows)
    assert len(ids.unique()) == len(rows.unique(dim=0)) and ids.min() >= 0
    lengths = torch.arange(4000) % 10
    mask = torch.arange(9) < lengths[:, None]
    ids = ids_of_tokens(rows, mask)
    assert len(ids.unique()) == len(rows.masked_fill(~mask, -1).unique(dim=0)), "0 is an id, and not padding"
    wider = torch.nn.functional.pad(rows, (0, 4), value=1), torch.nn.functional.pad(mask, (0, 4))
    assert ids_of_tokens(*wider).equal(ids) and ids_of_tokens(wider[0].int(), wider[1]).equal(ids)


@pytest.mark.parametrize("kind", ["decoupled", "hierarchical"])
def test_latents_of_several_passes_have_the_loss_of_one(kind):
    """A large batch is embedded in parts, and compared as a whole."""
    model = mulan(3, audio=PLAIN, **KINDS[kind])
    audio = [model.embed_audio(part) for part in clips().split(2)]
    text = [model.embed_text(raw_texts=part) for part in (TEXTS[:1], TEXTS[1:])]
    joined = [Latents(*(torch.cat(x, dim=-2) for x in zip(*parts, strict=True))) for parts in (audio, text)]
    torch.testing.assert_close(model.contrast(*joined), model(clips(), raw_texts=TEXTS))


def test_the_hierarchical_loss_adds_the_mean_of_its_layers():
    model = mulan(4, audio=PLAIN, hierarchical_contrastive_loss=True, hierarchical_contrastive_loss_layers=2)
    assert model.audio_layers.indices == [0, 2]
    audio, text = model.embed_audio(clips()), model.embed_text(raw_texts=TEXTS)
    assert audio.layers.shape == text.layers.shape == (2, 3, 12)
    torch.testing.assert_close(audio.layers.norm(dim=-1), torch.ones(2, 3))
    below = [softmax_loss(*latents, torch.tensor(10.0)) for latents in zip(audio.layers, text.layers, strict=True)]
    expected = softmax_loss(audio.last, text.last, torch.tensor(10.0)) + sum(below) / 2
    torch.testing.assert_close(model(clips(), raw_texts=TEXTS), expected)


def test_towers_of_different_depths_are_compared_evenly():
    model = MuLaN(audio_tower(7), text_tower(3), 12, hierarchical_contrastive_loss=True)
    assert model.audio_layers.indices == [2, 5] and model.text_layers.indices == [0, 1]


def test_sounds_of_another_rate_are_resampled():
    model = mulan().eval()
    sounds, lengths = clips(2, 3000), torch.tensor([3000, 1001])
    together = model.get_audio_latents(padded(sounds, lengths), lengths, input_sample_hz=2 * HZ)
    for row, length in enumerate(lengths.tolist()):
        alone = model.get_audio_latents(resample(sounds[row : row + 1, :length], 2 * HZ, HZ))
        torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)
    assert (together - model.get_audio_latents(padded(sounds, lengths), lengths)).abs().max() > 1e-2
    same = model.get_audio_latents(sounds, input_sample_hz=HZ)
    torch.testing.assert_close(same, model.get_audio_latents(sounds))


def test_latents_are_those_of_evaluation_in_either_mode():
    model = mulan(2).eval()
    expected = model.get_audio_latents(clips()), model.get_text_latents(raw_texts=TEXTS)
    model.train()
    model.audio.transformer.eval()
    torch.testing.assert_close((model.get_audio_latents(clips()), model.get_text_latents(raw_texts=TEXTS)), expected)
    assert model.audio.training and model.text.training and not model.audio.transformer.training, "and it stays in it"


def test_calls_by_place_mean_what_they_mean_in_the_reference():
    model = mulan(2, audio=PLAIN).eval()
    audio, text = model(clips(), None, TEXTS, True)
    torch.testing.assert_close(model(clips(), None, TEXTS, False, True), (audio * text).sum(dim=-1))
    torch.testing.assert_close(model(clips(), None, TEXTS, False, False, True), audio @ text.T)
    out, layers = model.audio(clips(), True, True)
    assert out.shape == (3, 16) and layers.shape == (1, 3, 16)


def test_what_is_random_in_training_is_its_generator_s():
    model = mulan()
    losses = [model(clips(), raw_texts=TEXTS, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert losses[0].equal(losses[1]) and not losses[0].equal(losses[2])


def test_half_precision_gives_single_precision_latents():
    model = mulan(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        audio, text = model(clips(), raw_texts=TEXTS, return_latents=True)
        loss = model(clips(), raw_texts=TEXTS)
    assert audio.dtype == text.dtype == loss.dtype == torch.float32
    torch.testing.assert_close(audio.norm(dim=-1), torch.ones(3))
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_saved_is_the_model_that_is_loaded(tmp_path, kind):
    model = mulan(2, audio={"positions": "bias"} if kind == "softmax" else {}, **KINDS[kind])
    with torch.no_grad():
        model.loss.log_temperature.fill_(1.0)
    model.save(tmp_path / "mulan")
    loaded = load_network(tmp_path / "mulan")
    assert loaded.config() == model.config() and isinstance(loaded, MuLaN)
    assert loaded(clips(), raw_texts=TEXTS).equal(model.eval()(clips(), raw_texts=TEXTS))


def test_a_pretrained_tower_is_saved_as_what_it_stands_on(tmp_path):
    encoder = PretrainedSpectrogramEncoder(write_ast(tmp_path / "ast"))
    tower = PretrainedAudioTransformer(encoder, 12, dim_head=4, heads=2)
    model = MuLaN(tower, text_tower(2), 8, hierarchical_contrastive_loss=True)
    assert model.sample_hz == 16000
    model(clips(3, 4000), raw_texts=TEXTS).backward()
    model.save(tmp_path / "mulan")
    loaded = load_network(tmp_path / "mulan")
    assert loaded(clips(3, 4000), raw_texts=TEXTS).equal(model.eval()(clips(3, 4000), raw_texts=TEXTS))
    assert not any("encoder" in name for name in model.own_state())


@pytest.mark.parametrize(
    ("depth", "options", "sentence"),
    [
        (2, {"hierarchical_contrastive_loss_layers": 1}, "belongs to hierarchical_contrastive_loss=True"),
        (1, {"hierarchical_contrastive_loss": True}, "make both 2 or more deep"),
        (3, {"hierarchical_contrastive_loss": True, "hierarchical_contrastive_loss_layers": 3}, "give 1 to 2"),
        (3, {"hierarchical_contrastive_loss": True, "hierarchical_contrastive_loss_layers": 0}, "give 1 to 2"),
    ],
)
def test_models_that_cannot_be_are_refused(depth, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        mulan(depth, **options)


def test_what_cannot_be_compared_is_refused():
    model = mulan()
    for wish in ({}, {"return_similarities": True}):
        with pytest.raises(ValueError, match="3 sounds cannot be paired with 2 texts"):
            model(clips(), raw_texts=TEXTS[:2], **wish)
    with pytest.raises(ValueError, match="ask for one"):
        model(clips(), raw_texts=TEXTS, return_latents=True, return_similarities=True)
    with pytest.raises(ValueError, match="needs a batch of 2 or more"):
        model(clips(1), raw_texts=TEXTS[:1])
    with pytest.raises(ValueError, match="audio comes as int16: give floats from -1 to 1"):
        model.get_audio_latents((clips() * 3000).short(), input_sample_hz=2 * HZ)
    for read in (lambda: model(clips(), TEXTS), lambda: model.get_text_latents(TEXTS)):
        with pytest.raises(ValueError, match="texts are a list, and not what was read of them: give strings as raw_"):
            read()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoupled", "softmax", "sigmoid"])
def test_a_tiny_model_learns_which_caption_belongs_to_which_sound(kind):
    """Eight of each: at chance one in eight is found."""
    sounds, captions = pairs(8)
    model = mulan(audio={"spec_aug_freq_mask": 2, "spec_aug_time_mask": 4}, **KINDS[kind])
    assert sum(parameter.numel() for parameter in model.parameters()) < 20_000
    read = model.read_texts(captions)

    def recall() -> list[float]:
        with torch.no_grad():
            similarities = model.eval()(sounds, **read, return_pairwise_similarities=True)
        model.train()
        return [(similarities.argmax(dim=way) == torch.arange(8)).float().mean().item() for way in (0, 1)]

    assert max(recall()) <= 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(200):
        optimizer.zero_grad()
        loss = model(sounds, **read)
        loss.backward()
        optimizer.step()
    assert recall() == [1.0, 1.0]
    assert math.isfinite(loss.item())
