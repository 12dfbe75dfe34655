"""What the stages share: tokens of sounds, whose networks stay as they are; ends; losses of real tokens alone."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.models.audiolm.stage import by_frame, check_sizes, whole_frames, with_end, without_padding
from helicon.nn.network import load_network
from models.audiolm.tiny import (
    ALL_CODES,
    COARSE,
    IDS,
    KINDS,
    SEMANTIC,
    Kind,
    chirps,
    codec,
    lengths_of,
    stage_with_codec,
    wav2vec,
)

LENGTHS = (960, 600)  # samples at 8 kHz


def batch(**more: Any) -> dict[str, Any]:
    """Waves for tokenizer and codec, as the data makes them."""
    return {
        "raw_wave": chirps(LENGTHS, 16000),
        "raw_wave_lengths": torch.tensor(LENGTHS) * 2,
        "raw_wave_for_codec": chirps(LENGTHS),
        "raw_wave_for_codec_lengths": torch.tensor(LENGTHS),
        **more,
    }


# ------------------------------------------------------------------ ends and padding


def test_the_end_stands_behind_rows_that_truly_end() -> None:
    ids = torch.tensor([[1, 2, 3], [4, -1, -1], [5, 6, -1], [-1, -1, -1]])
    ends = torch.tensor([True, True, False, True])
    assert with_end(ids, ends, 9).tolist() == [[1, 2, 3, 9], [4, 9, -1, -1], [5, 6, -1, -1], [9, -1, -1, -1]]
    assert with_end(ids, None, 9).tolist() == [[1, 2, 3, -1], [4, -1, -1, -1], [5, 6, -1, -1], [-1, -1, -1, -1]]


def test_padding_is_marked_by_lengths() -> None:
    ids = torch.arange(12).view(2, 3, 2)
    assert without_padding(ids, torch.tensor([1, 3]))[0].tolist() == [[0, 1], [-1, -1], [-1, -1]]
    assert torch.equal(without_padding(ids, torch.tensor([1, 3]))[1], ids[1])
    assert without_padding(ids, None) is ids


def test_codes_come_by_frame() -> None:
    codes = torch.arange(12).view(2, 6)
    assert by_frame(codes, 3).tolist() == codes.view(2, 2, 3).tolist()
    assert by_frame(codes.view(2, 2, 3), 3).shape == (2, 2, 3)
    for wrong, count in ((codes, 4), (codes.view(2, 3, 2), 3)):
        with pytest.raises(ValueError, match=f"are not those of {count} quantizers"):
            by_frame(wrong, count)


def test_semantic_tokens_come_in_rows() -> None:
    for unique_consecutive in (True, False):
        stage = KINDS["semantic"].stage(unique_consecutive=unique_consecutive)
        with pytest.raises(ValueError, match=r"semantic tokens of shape \[6\] are not \[b, n\]: give rows"):
            stage.deduplicated(torch.arange(6))


@pytest.mark.parametrize("name", KINDS)
def test_a_stage_can_be_sent_to_another_process(name: str) -> None:
    stage = stage_with_codec(name)
    sent = pickle.loads(pickle.dumps(stage))
    given = {"raw_wave": chirps(LENGTHS, 16000 if "wav2vec" in stage.frozen else 8000)}
    if len(stage.frozen) == 2:
        given["raw_wave_for_codec"] = chirps(LENGTHS)
    assert torch.equal(sent(**given, return_loss=True), stage(**given, return_loss=True))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_tokens_of_any_whole_type_are_learned_from(kind: Kind) -> None:
    stage = kind.stage()
    loss, small = (
        stage(**{name: ids.to(kept) for name, ids in kind.tokens.items()}, return_loss=True)
        for kept in (torch.int64, torch.int16)
    )
    assert loss == small


def test_sizes_must_agree() -> None:
    check_sizes(codec=16, codebook_size=16)
    with pytest.raises(ValueError, match="the codec has 16 different tokens and the transformer codebook_size=7"):
        KINDS["coarse"].stage(codec=codec())
    with pytest.raises(
        ValueError, match="the wav2vec has 11 different tokens and the transformer num_semantic_tokens=5"
    ):
        KINDS["semantic"].stage(KINDS["semantic"].build(num_semantic_tokens=5), wav2vec=wav2vec())
    with pytest.raises(ValueError, match="the codec has 3 quantizers, and the transformer is built for 5"):
        KINDS["delayed"].stage(KINDS["delayed"].build(codebook_size=16), codec=codec())
    with pytest.raises(ValueError, match="pad_id=0: past the end of a row stands -1"):
        KINDS["semantic"].stage(pad_id=0)
    with pytest.raises(ValueError, match=r"mask_prob=1.0 must be at least 0 and below 1"):
        KINDS["semantic"].stage(mask_prob=1.0)


# ------------------------------------------------------------------ tokens of sounds


def test_waves_and_the_tokens_of_them_are_the_same() -> None:
    """And of a padded batch each row has the tokens it has alone, repeated ones left out."""
    stage = stage_with_codec("delayed", unique_consecutive=True)
    found = stage.tokens(batch())
    semantic = wav2vec()(chirps(LENGTHS, 16000), lengths=torch.tensor(LENGTHS) * 2)
    codes = stage.codec.encode(chirps(LENGTHS), torch.tensor(LENGTHS))
    cached = {
        "semantic_token_ids": semantic.int(),
        "semantic_token_ids_lengths": wav2vec().code_lengths(torch.tensor(LENGTHS) * 2),
        "token_ids": codes.int().clamp(min=0),
        "token_ids_lengths": stage.codec.code_lengths(torch.tensor(LENGTHS)),
    }
    from_cache = stage.tokens(cached)
    for name in ("semantic_token_ids", "token_ids"):
        assert torch.equal(found[name], from_cache[name]) and found[name].dtype == torch.long
    assert lengths_of(found["token_ids"]) == [24, 15]
    for row, length in enumerate(LENGTHS):
        alone = stage.semantic_ids(chirps(LENGTHS, 16000)[row : row + 1, : length * 2])
        count = lengths_of(alone)[0]
        assert torch.equal(found["semantic_token_ids"][row, :count], alone[0, :count])
        assert (found["semantic_token_ids"][row, count:] == -1).all()


@pytest.mark.parametrize("unique_consecutive", [True, False])
def test_repeated_tokens_are_left_out_where_it_says_so(unique_consecutive: bool) -> None:
    stage = KINDS["semantic"].stage(unique_consecutive=unique_consecutive)
    ids = torch.tensor([[3, 3, 5, 5, 5, 3], [4, 4, 4, -1, -1, -1]])
    found = stage.tokens({"semantic_token_ids": ids, "semantic_token_ids_lengths": torch.tensor([6, 2])})
    expected = [[3, 5, 3, -1, -1, -1], [4, -1, -1, -1, -1, -1]]
    if not unique_consecutive:
        expected = [[3, 3, 5, 5, 5, 3], [4, 4, -1, -1, -1, -1]]
    assert found["semantic_token_ids"].tolist() == expected
    assert found["is_end"] is None


def test_a_stage_takes_the_quantizers_it_has() -> None:
    waves = batch(is_end=torch.tensor([True, False]))
    coarse, fine = stage_with_codec("coarse"), stage_with_codec("fine")
    codes = coarse.codec.encode(chirps(LENGTHS), torch.tensor(LENGTHS))
    assert torch.equal(coarse.tokens(waves)["coarse_token_ids"], codes[..., :2])
    assert torch.equal(coarse.tokens(waves)["is_end"], waves["is_end"])
    split = fine.tokens(waves)
    assert torch.equal(split["coarse_token_ids"], codes[..., :2]) and torch.equal(
        split["fine_token_ids"], codes[..., 2:]
    )
    assert split.keys() == {"coarse_token_ids", "fine_token_ids"}


def test_the_codec_may_share_the_wave() -> None:
    """A batch with one wave has it for both."""
    stage = stage_with_codec("fine")
    waves = {"raw_wave": chirps(LENGTHS), "raw_wave_lengths": torch.tensor(LENGTHS)}
    assert torch.equal(stage.tokens(waves)["coarse_token_ids"], stage.tokens(batch())["coarse_token_ids"])


@pytest.mark.parametrize("name", ["coarse", "delayed"])
def test_one_wave_cannot_have_two_rates(name: str) -> None:
    """It would be coded as a sound of half the pitch, and nobody would say so."""
    stage, sentence = (
        stage_with_codec(name),
        "hears raw_wave at 16000 Hz, and the codec has 8000 Hz: give it raw_wave_for_codec",
    )
    with pytest.raises(ValueError, match=sentence):
        stage(raw_wave=chirps(LENGTHS, 16000), return_loss=True)
    with pytest.raises(ValueError, match=sentence):
        stage.tokens({"raw_wave": chirps(LENGTHS, 16000)})
    ids = stage.semantic_ids(chirps(LENGTHS, 16000))  # what a wave beside them is for is clear
    given = stage(semantic_token_ids=ids, raw_wave=chirps(LENGTHS), return_loss=True)
    both = stage(raw_wave=chirps(LENGTHS, 16000), raw_wave_for_codec=chirps(LENGTHS), return_loss=True)
    assert torch.equal(given, both)


def test_groups_of_quantizers_are_coarse_together() -> None:
    """The first codes of a frame are the first level of every group, and not all levels of the first group."""
    grouped = codec(rq_groups=2, rq_num_quantizers=2)
    assert grouped.num_quantizers == 4
    waves = chirps(LENGTHS)
    by_group = grouped.autoencoder.quantizer.stacks.encode(grouped.encode_latents(waves))  # [b, t, (g q)]
    stage = stage_with_codec("coarse", grouped)
    coarse = stage.tokens({"raw_wave_for_codec": waves, "raw_wave": chirps(LENGTHS, 16000)})["coarse_token_ids"]
    assert torch.equal(coarse, by_group[..., [0, 2]])
    fine = stage_with_codec("fine", grouped).tokens({"raw_wave": waves})
    assert torch.equal(fine["coarse_token_ids"], coarse) and torch.equal(fine["fine_token_ids"], by_group[..., [1, 3]])
    sound = stage.generate(
        semantic_token_ids=IDS, prime_coarse_token_ids=coarse[:, :4], max_time_steps=6, reconstruct_wave=True, seed=0
    )
    assert len(sound[0]) <= 6 * 40  # two levels of one group would not decode


def test_sound_of_several_channels_has_the_meaning_of_their_mean() -> None:
    stage = stage_with_codec("semantic")
    wave = chirps(LENGTHS, 16000)
    stereo = torch.stack((wave * 1.5, wave * 0.5), dim=1)
    assert torch.equal(stage.semantic_ids(stereo), stage.semantic_ids(wave))


# ------------------------------------------------------------------ prompts


def test_a_prompt_ends_with_its_last_whole_frame() -> None:
    """What fills up the last frame is silence that is not of the sound, and nothing should go on from it."""
    stage = stage_with_codec("coarse")
    wave = chirps((960, 960))
    lengths = torch.tensor([955, 610])  # 23 frames of 40, and 15
    codes = stage.prompt_codes(wave, lengths, None)
    assert lengths_of(codes) == [23, 15]
    assert torch.equal(codes[0, :23], stage.codec.encode(wave[:1])[0, :23])
    ids = stage.prompt_ids(wave, lengths, 8000)  # 5 tokens of 160 samples, and 3
    assert lengths_of(ids) == [5, 3]
    assert whole_frames(stage.codec, wave, None, 16000).tolist() == [12, 12]
    with pytest.raises(
        ValueError, match="a prompt of 30 samples is shorter than a frame of the SoundStream, 40 samples"
    ):
        stage.prompt_codes(wave[:, :30], None, None)


def test_a_prompt_is_a_sound() -> None:
    """Whatever stands behind its end."""
    stage, wave, lengths = stage_with_codec("coarse"), chirps((960, 960)), torch.tensor([960, 610])
    wave[1, 700:] = torch.nan
    assert whole_frames(stage.codec, wave, lengths, None).tolist() == [24, 15]
    for lost in (None, torch.tensor([960, 701])):
        with pytest.raises(ValueError, match="a prompt holds values that are infinite or not numbers: give a sound"):
            whole_frames(stage.codec, wave, lost, None)


# ------------------------------------------------------------------ the frozen networks


def test_the_networks_it_stands_on_stay_as_they_are() -> None:
    network = codec().train()
    stage = stage_with_codec("coarse", network)
    before = copy.deepcopy(network.state_dict())
    stage.train()
    stage(raw_wave=chirps(LENGTHS, 16000), raw_wave_for_codec=chirps(LENGTHS), return_loss=True).backward()
    stage.eval()
    assert all(module.training for module in network.modules())
    assert all(weight.requires_grad and weight.grad is None for weight in network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(name.startswith(("codec", "wav2vec")) for name, _ in stage.named_parameters())
    assert stage.frozen == {"codec": network, "wav2vec": wav2vec()}


def test_codes_do_not_depend_on_the_mode_or_precision_of_the_moment() -> None:
    network = codec()
    stage = stage_with_codec("coarse", network)
    expected = stage.codes(chirps(LENGTHS))
    network.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(stage.codes(chirps(LENGTHS)), expected)


def test_the_networks_it_stands_on_move_along_and_keep_their_precision() -> None:
    stage = stage_with_codec("coarse", codec(), wav2vec=None)
    stage.to("meta")
    assert stage.codec.device.type == "meta" and stage.device.type == "meta"
    stage = stage_with_codec("coarse", codec(), wav2vec=None).bfloat16()
    assert next(stage.parameters()).dtype == torch.bfloat16 and next(stage.codec.parameters()).dtype == torch.float32


def test_a_stage_without_networks_learns_and_generates_tokens_and_says_what_it_cannot() -> None:
    for name in KINDS:
        stage = KINDS[name].stage().train()
        loss = stage(**KINDS[name].tokens, return_loss=True)
        loss.backward()
        assert torch.isfinite(loss)
    for name in ("semantic", "coarse", "delayed"):
        with pytest.raises(ValueError, match="was built without wav2vec, which makes semantic tokens of sound"):
            KINDS[name].stage()(raw_wave=chirps(LENGTHS), return_loss=True)
    for name in ("coarse", "fine", "delayed"):
        ids = {} if name == "fine" else {"semantic_token_ids": IDS}
        with pytest.raises(
            ValueError, match=r"was built without a codec, .*: build it with codec=..., or give and take"
        ):
            KINDS[name].stage()(**ids, raw_wave=chirps(LENGTHS), return_loss=True)
        with pytest.raises(ValueError, match="there is nothing to learn from: give a raw_wave or"):
            KINDS[name].stage()(**ids)
    with pytest.raises(ValueError, match="there is nothing to learn from: give a raw_wave or semantic_token_ids"):
        KINDS["semantic"].stage()(return_loss=True)


class Conditioner(nn.Module):
    """Says how loud the beginning of a sound is, or how long a text."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *, namespace: str, wavs: Tensor | None = None, texts: list[str] | None = None) -> Tensor:
        self.calls.append(namespace)
        assert not self.training
        said = torch.tensor([len(text) for text in texts]).float() if texts else wavs[..., :40].abs().mean(dim=-1)  # type: ignore[index]
        return (said[:, None, None] * self.scale).expand(-1, 3, 16)


def test_an_audio_conditioner_stands_in_the_place_of_texts() -> None:
    conditioner = Conditioner().train()
    kind = KINDS["semantic"]
    stage = kind.stage(kind.build(audio_text_condition=True), audio_conditioner=conditioner, wav2vec=wav2vec())
    loud, quiet = (stage(raw_wave=chirps(LENGTHS, 16000) * level) for level in (1.0, 0.5))
    assert (loud - quiet).abs().max() < 1e-4  # a norm takes the level away; the ids are the same
    assert conditioner.calls == ["semantic", "semantic"] and conditioner.training
    expected = stage(
        semantic_token_ids=stage.semantic_ids(chirps(LENGTHS, 16000)),
        text_embeds=conditioner.eval()(wavs=chirps(LENGTHS, 16000), namespace="semantic"),
    )
    torch.testing.assert_close(loud, expected)
    assert stage.condition_of(None) == {}


# ------------------------------------------------------------------ members


def test_texts_are_embedded_by_the_stage_too() -> None:
    stage = KINDS["semantic"].stage(KINDS["semantic"].build(has_condition=True, t5_name={"name": "bytes", "dim": 8}))
    assert stage.embed_text(["a"]).shape == (1, 3, 8)
    assert torch.equal(stage.embed_text(["a"]), stage.transformer.encode_text(["a"]))


@pytest.mark.parametrize("name", KINDS)
def test_saved_and_loaded_with_what_it_stands_on(name: str, tmp_path: Path) -> None:
    stage = stage_with_codec(name, mask_prob=0.3)
    stage.save_pretrained(tmp_path)
    loaded = load_network(tmp_path)
    assert type(loaded) is type(stage) and loaded.mask_prob == 0.3
    waves = {"raw_wave": chirps(LENGTHS, 16000), "raw_wave_for_codec": chirps(LENGTHS)}
    if name in ("semantic", "fine"):
        waves = {"raw_wave": chirps(LENGTHS, 16000 if name == "semantic" else 8000)}
    assert torch.equal(stage(**waves, return_loss=True), loaded(**waves, return_loss=True))
    assert loaded.frozen.keys() == stage.frozen.keys()


def test_num_labels_counts_what_is_predicted() -> None:
    ends = torch.tensor([True, False])
    semantic, codes = sum(lengths_of(IDS)), sum(lengths_of(ALL_CODES))
    expected = {
        "semantic": semantic + 1,
        "coarse": semantic + codes * COARSE + 1,
        "fine": codes * 5,
        "delayed": codes * 5 + 1,
    }
    for name, kind in KINDS.items():
        stage = kind.stage()
        tokens = {**kind.tokens, **({"is_end": ends} if kind.has_end else {})}
        labels = stage.labels(**tokens)
        assert stage.num_labels(**tokens) == expected[name] == sum((label >= 0).sum() for label in labels.values())


def test_a_loss_is_the_mean_over_real_tokens() -> None:
    stage = KINDS["semantic"].stage()
    logits = torch.randn(2, 7, SEMANTIC + 1)
    labels = with_end(IDS, torch.tensor([False, True]), SEMANTIC)
    losses = stage.losses({"semantic": logits}, {}, semantic_token_ids=IDS, is_end=torch.tensor([False, True]))
    chosen = [
        F.log_softmax(logits[b, n], dim=-1)[labels[b, n]] for b in range(2) for n in range(7) if labels[b, n] >= 0
    ]
    assert len(chosen) == 10
    torch.testing.assert_close(losses.total, -torch.stack(chosen).mean())
    torch.testing.assert_close(losses.parts["semantic_cross_entropy"], -torch.stack(chosen).mean())
    nothing = stage.losses({"semantic": logits}, {}, semantic_token_ids=torch.full_like(IDS, -1))
    assert nothing.total == 0  # no token is no loss, and not a division by zero
