import logging
import math
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

from helicon.models.musiclm.spectrogram import SILENCE
from helicon.models.musiclm.towers import AudioSpectrogramTransformer
from helicon.nn.network import load_network
from models.musiclm.tiny import PLAIN, audio_tower, padded, text_tower

POSITIONS = ["rotary", "bias"]
TEXTS = ["a red circle", "", "été", "a green square on a red paper"]


class Seen:
    """What a tower's transformer was given."""

    def __init__(self, tower: Any):
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        tower.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: self.calls.append((args, kwargs)), with_kwargs=True
        )

    @property
    def tokens(self) -> Tensor:
        return self.calls[-1][0][0]

    @property
    def mask(self) -> Tensor | None:
        return self.calls[-1][0][1]

    @property
    def named(self) -> dict[str, Any]:
        return self.calls[-1][1]


def test_ten_seconds_by_default_and_as_finely_as_the_benchmark():
    tower = AudioSpectrogramTransformer(16, 1, dim_head=8, heads=2)
    assert tower.num_patches(160_000) == 8 * 63
    fine = AudioSpectrogramTransformer(16, 1, dim_head=8, heads=2, spec_hop_length=40)
    assert fine.num_patches(158_720) == 1984
    seen = Seen(tower.eval())
    assert tower(torch.randn(1, 160_000)).shape == (1, 16)
    assert seen.tokens.shape[1] == 504 and seen.mask is None


def test_settings_follow_the_sample_rate():
    at = {hz: AudioSpectrogramTransformer(16, 1, dim_head=8, heads=2, sample_hz=hz).log_mel for hz in (16000, 24000)}
    assert (at[16000].win_length, at[16000].hop_length, at[16000].n_fft, at[16000].f_max) == (400, 160, 1024, 8000)
    assert (at[24000].win_length, at[24000].hop_length, at[24000].n_fft, at[24000].f_max) == (600, 240, 2048, 12000)


def test_a_hop_is_half_of_a_window_that_is_given():
    tower = audio_tower(spec_win_length=200)
    assert (tower.log_mel.win_length, tower.log_mel.hop_length) == (200, 100)


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_clip_in_a_padded_batch_means_what_it_means_alone(positions):
    tower = audio_tower(2, positions=positions).eval()
    clips, lengths = torch.randn(4, 2000), torch.tensor([2000, 641, 640, 3])
    together, layers = tower(padded(clips, lengths), lengths=lengths, return_all_layers=True)
    for row, length in enumerate(lengths.tolist()):
        alone, own_layers = tower(clips[row : row + 1, :length], return_all_layers=True)
        torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layers[:, row], own_layers[:, 0], atol=1e-5, rtol=1e-5)
    assert (together[0] - together[1]).abs().max() > 1e-2


def test_a_clip_of_nothing_is_a_patch_of_silence():
    tower = audio_tower().eval()
    silence = tower(torch.zeros(1, 10))
    torch.testing.assert_close(tower(torch.zeros(1, 0)), silence)
    torch.testing.assert_close(tower(torch.full((1, 500), torch.nan), lengths=torch.tensor([0])), silence)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("axis", ["time", "frequency"])
def test_order_is_heard(positions, axis):
    """The mean over patches would be the same for the same patches elsewhere."""
    tower = audio_tower(accept_spec=True, positions=positions).eval()
    levels = torch.randn(1, 32, 32)
    moved = levels[:, [*range(8, 16), *range(8), *range(16, 32)]] if axis == "time" else levels.roll(8, dims=2)
    assert (tower(levels) - tower(moved)).abs().max() > 1e-3


def test_a_lone_tone_is_heard_where_it_is():
    """Relative positions cannot tell: silence looks the same above and below, and a patch is normalised by nothing."""
    tower = audio_tower(accept_spec=True).eval()
    levels = torch.full((3, 8, 32), SILENCE)
    levels[0, :, 3], levels[1, :, 11], levels[2, :, 3] = 1.5, 1.5, 0.5
    low, high, soft = tower(levels)
    assert (low - high).abs().max() > 1e-2 and (low - soft).abs().max() > 1e-2


def test_spectra_of_either_layout():
    first, last = (audio_tower(accept_spec=True, accept_spec_time_first=is_first).eval() for is_first in (True, False))
    last.load_own_state(first.own_state())
    levels, lengths = torch.randn(2, 21, 32), torch.tensor([21, 9])
    levels[1, 9:] = torch.nan
    out = first(levels, lengths=lengths)
    assert out.isfinite().all()
    torch.testing.assert_close(last(levels.transpose(1, 2), lengths=lengths), out)
    waves = audio_tower().eval()
    waves.load_own_state(first.own_state())
    sound = torch.randn(1, 1700)
    torch.testing.assert_close(waves(sound), first(waves.log_mel(sound)))


def test_patch_dropout_keeps_as_many_of_every_clip_and_others_of_each():
    tower = audio_tower(**{**PLAIN, "patch_dropout_prob": 0.3}).train()
    seen = Seen(tower)
    clips = torch.randn(3, 2000)  # 25 frames: 4 x 4 patches
    tower(clips, generator=torch.Generator().manual_seed(0))
    grid = seen.named["positions"]
    kept = [{tuple(place) for place in row.tolist()} for row in grid]
    assert grid.shape == (3, 12, 2) and all(len(row) == 12 for row in kept)  # 0.7 * 16, rounded up
    assert kept[0] != kept[1] and kept[1] != kept[2]
    assert all(row < 4 and column < 4 for places in kept for row, column in places)
    assert seen.mask is None
    tower(clips, generator=torch.Generator().manual_seed(0))
    assert seen.named["positions"].equal(grid)
    tower(clips, force_no_patch_dropout=True)
    assert seen.tokens.shape[1] == 16
    tower.eval()(clips)
    assert seen.tokens.shape[1] == 16


def test_patches_that_are_kept_are_those_of_their_places():
    tower = audio_tower(accept_spec=True, **{**PLAIN, "patch_dropout_prob": 0.5}).train()
    seen = Seen(tower)
    levels = torch.randn(2, 24, 32)
    tower(levels, force_no_patch_dropout=True)
    every, columns = seen.tokens, 3
    tower(levels)
    numbers = seen.named["positions"][..., 0] * columns + seen.named["positions"][..., 1]
    torch.testing.assert_close(seen.tokens, every.gather(1, numbers[..., None].expand(-1, -1, 16)))


@pytest.mark.parametrize("prob", [0.25, 0.9, 0.99])
def test_patch_dropout_leaves_something_of_the_shortest_clip(prob):
    tower = audio_tower(**{**PLAIN, "patch_dropout_prob": prob}).train()
    seen = Seen(tower)
    lengths = torch.tensor([5000, 1000, 1])
    columns = torch.tensor([8, 2, 1])
    for _ in range(5):
        out = tower(padded(torch.randn(3, 5000), lengths), lengths=lengths)
        assert out.isfinite().all() and seen.mask is not None
        assert seen.tokens.shape[1] == math.ceil(32 * (1 - prob))
        expected = [math.ceil(4 * count * (1 - prob)) for count in columns.tolist()]
        assert seen.mask.sum(dim=1).tolist() == expected and min(expected) >= 1
        column = seen.named["positions"][..., 1]
        assert (column < columns[:, None])[seen.mask].all()


def test_training_changes_the_levels_and_evaluation_does_not():
    tower = audio_tower(**{**PLAIN, "spec_aug_freq_mask": 16}).train()
    clips = torch.randn(2, 2000)
    first, second = (tower(clips, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert (first - second).abs().max() > 1e-3
    torch.testing.assert_close(first, tower(clips, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(tower.eval()(clips), tower(clips))
    noisy = audio_tower(**PLAIN, spec_aug_noise=0.3).train()
    assert (noisy(clips) - noisy(clips)).abs().max() > 1e-3
    torch.testing.assert_close(noisy.eval()(clips), noisy(clips))


@pytest.mark.parametrize("kind", ["audio", "text"])
@pytest.mark.parametrize("depth", [1, 3])
def test_layers_are_those_below_the_last_and_only_when_asked(kind, depth):
    """(In the package that this replaces a tower of one layer crashed, and all layers were stacked every time.)"""
    tower: Any = (audio_tower if kind == "audio" else text_tower)(depth)
    tower.eval()
    inputs = torch.randn(2, 900) if kind == "audio" else torch.randint(1, 200, (2, 7))
    seen, outputs = Seen(tower), []
    for layer in tower.transformer.layers:
        layer.register_forward_hook(lambda module, args, out: outputs.append(out))
    plain = tower(inputs)
    assert "run_layer" not in seen.named
    outputs.clear()
    out, layers = tower(inputs, return_all_layers=True)
    torch.testing.assert_close(out, plain)
    assert layers.shape == (depth - 1, 2, 16)
    for layer, tokens in zip(layers, outputs, strict=False):
        torch.testing.assert_close(layer, tokens.mean(dim=1) if kind == "audio" else tokens[:, 0])


@pytest.mark.parametrize("kind", ["audio", "text"])
def test_recomputed_activations_give_the_same_gradients(kind):
    make: Any = audio_tower if kind == "audio" else text_tower
    options = PLAIN if kind == "audio" else {}
    plain, recomputed = make(3, **options), make(3, checkpoint_activations=True, **options)
    recomputed.load_own_state(plain.own_state())
    inputs = torch.randn(2, 900) if kind == "audio" else torch.randint(1, 200, (2, 7))
    for tower in (plain, recomputed):
        out, layers = tower(inputs, return_all_layers=True)
        (out.square().sum() + layers.pow(3).sum()).backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert one.grad is not None and one.grad.abs().max() > 0
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n_mels": 20}, "n_mels=20 must be a multiple of the patches' 8 bands"),
        ({"patch_size": 0}, "patch_size=0"),
        ({"patch_dropout_prob": 1.0}, "patch_dropout_prob=1.0"),
        ({"spec_pad_mode": "reflect"}, "spec_pad_mode='reflect'.*leave these out"),
        (
            {"spec_n_fft": 128, "spec_win_length": 24, "n_mels": 128},
            "or leave out spec_n_fft, spec_win_length and spec_h",
        ),
        ({"f_max": 9000.0}, "half of sample_hz=8000$"),
        ({"spec_aug_freq_mask": 17}, "spec_aug_freq_mask=17 may hide at most half"),
        ({"spec_aug_noise": 0.1, "accept_spec": True}, "spec_aug_noise=0.1 is added to waves"),
        ({"dim_head": 6}, "dim_head=6 must be a multiple of 4"),
    ],
)
def test_audio_towers_that_cannot_be_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        audio_tower(**options)


def test_positions_of_another_kind_are_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a user's run has no type checker to catch it
    with pytest.raises(ValueError, match="positions='learned' is neither"):
        audio_tower(positions="learned")


def test_inputs_of_the_other_kind_are_refused():
    with pytest.raises(ValueError, match=r"takes waves \[b, n\].*accept_spec=False"):
        audio_tower()(torch.randn(1, 9, 32))
    with pytest.raises(ValueError, match=r"takes spectra.*accept_spec=True"):
        audio_tower(accept_spec=True)(torch.randn(1, 900))
    with pytest.raises(ValueError, match=r"31 bands.*n_mels=32"):
        audio_tower(accept_spec=True)(torch.randn(1, 9, 31))


def test_patches_need_not_be_square():
    tower = audio_tower(patch_size=(16, 5)).eval()
    assert tower.num_patches(2000) == 2 * 5
    assert tower(torch.randn(2, 2000)).shape == (2, 16)


def test_captions_in_a_batch_mean_what_they_mean_alone():
    """(In the package that this replaces all were cut to the shortest.)"""
    tower = text_tower(2).eval()
    together = tower(raw_texts=TEXTS)
    for row, text in enumerate(TEXTS):
        torch.testing.assert_close(together[row], tower(raw_texts=[text])[0], atol=1e-5, rtol=1e-5)
    assert (tower(raw_texts=["a red circle"]) - tower(raw_texts=["a red circus"])).abs().max() > 1e-3


def test_texts_are_read_once_as_the_tensors_forward_takes():
    tower = text_tower().eval()
    read = tower.read_texts(TEXTS, multiple_of=32)
    assert read["x"].shape == (4, 32) and read["mask"].sum(dim=1).tolist() == [14, 2, 7, 31]
    expected = tower(raw_texts=TEXTS)
    torch.testing.assert_close(tower(**read), expected)
    torch.testing.assert_close(tower(read["x"]), expected)  # padding is known by its id
    assert text_tower(max_seq_len=40).read_texts(["x" * 31], multiple_of=32)["x"].shape == (1, 40)
    odd = text_tower().read_texts(["a\0b", "\ud800"])["x"]
    assert odd[0].tolist() == [257, 97, 98, 258] and odd[1].tolist() == [257, 63, 258, 0]


def test_ids_of_another_vocabulary():
    tower = text_tower(num_tokens=11, pad_id=3).eval()
    short, long = torch.tensor([[5, 0, 10]]), torch.tensor([[5, 0, 10, 3, 3]])
    torch.testing.assert_close(tower(short), tower(long))
    assert (tower(short) - tower(long, mask=torch.ones(1, 5).bool())).abs().max() > 1e-4
    with pytest.raises(ValueError, match="num_tokens=11: give ids"):
        tower(raw_texts=["a"])


def test_ids_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match=r"from 3 to 19999, .* knows 0 to 258: build it with num_tokens=20000"):
        text_tower()(torch.tensor([[3, 19999]]))


def test_texts_that_are_too_long_are_cut_with_notice_and_ids_refused(caplog):
    tower = text_tower(max_seq_len=6).eval()
    with caplog.at_level(logging.WARNING):
        cut = tower(raw_texts=["abcé and more"])
    assert "is cut to max_length=6" in caplog.text
    torch.testing.assert_close(cut, tower(raw_texts=["abc"]))  # not half a character
    with pytest.raises(ValueError, match="7 tokens are more than max_seq_len=6"):
        tower(torch.ones(1, 7, dtype=torch.long))


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({}, "one of the two"),
        ({"x": torch.ones(1, 2).long(), "raw_texts": ["a"]}, "one of the two"),
        ({"raw_texts": ["a"], "mask": torch.ones(1, 3).bool()}, "mask belongs"),
        ({"raw_texts": "a"}, "takes a list of texts"),
        ({"raw_texts": []}, "no texts"),
    ],
)
def test_texts_that_cannot_be_read_are_refused(inputs, sentence):
    with pytest.raises(ValueError, match=sentence):
        text_tower()(**inputs)


def test_text_towers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="pad_id=259"):
        text_tower(pad_id=259)
    with pytest.raises(ValueError, match="max_seq_len=1"):
        text_tower(max_seq_len=1)


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_tower_that_was_saved_is_the_tower_that_is_loaded(tmp_path, positions):
    towers: list[Any] = [audio_tower(2, positions=positions, spec_power=1.0, patch_size=(8, 4)), text_tower(2)]
    inputs: list[dict[str, Any]] = [{"x": torch.randn(2, 1500)}, {"raw_texts": TEXTS}]
    for index, (tower, given) in enumerate(zip(towers, inputs, strict=True)):
        tower.save(tmp_path / str(index))
        loaded = load_network(tmp_path / str(index))
        assert loaded.config() == tower.config()
        assert loaded(**given).equal(tower.eval()(**given))
