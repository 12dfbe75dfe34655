"""The codes that MusicLM is conditioned on: how they are made, and how the stages of AudioLM learn to read them."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.models.audiolm.task import StageTask
from helicon.models.musiclm.conditioning import MuLaNEmbedQuantizer, TooFewSounds, codes_for
from helicon.nn.network import load_network
from helicon.nn.resample import resample
from models.audiolm.tiny import BYTES, KINDS, as_tuple
from models.musiclm.conditioned import CODES, DIMS, QUANTIZERS, conditioned, quantizer, sounds, unfitted
from models.musiclm.tiny import HZ, mulan, padded

TEXTS = ["a loud tone, high pitch", "a soft pluck, low pitch"]
IDS = torch.tensor([[4, 0, 2], [1, 3, 3]])
STAGES = ["semantic", "coarse", "fine", "delayed"]


@pytest.fixture(scope="module")
def fitted() -> MuLaNEmbedQuantizer:
    return quantizer()


# ------------------------------------------------------------------ codes


def test_each_code_is_the_nearest_to_what_those_before_it_leave(fitted: MuLaNEmbedQuantizer) -> None:
    ids = fitted.codes(wavs=sounds())
    assert ids.shape == (24, QUANTIZERS) and ids.min() >= 0 and ids.max() < CODES
    left = fitted.mulan.get_audio_latents(sounds())
    errors = [left.square().sum(dim=1).mean()]
    for level, codebook in enumerate(fitted.codebooks):
        assert torch.equal(torch.cdist(left, codebook).argmin(dim=1), ids[:, level])
        left = left - codebook[ids[:, level]]
        errors.append(left.square().sum(dim=1).mean())
    assert all(later < 0.8 * earlier for earlier, later in itertools.pairwise(errors))
    # Codebooks are k-means: each centroid is the mean of what falls to it.
    latents = fitted.mulan.get_audio_latents(sounds())
    for code in ids[:, 0].unique().tolist():
        torch.testing.assert_close(
            latents[ids[:, 0] == code].mean(dim=0), fitted.codebooks[0, code], atol=0.05, rtol=0.05
        )
    assert fitted.codes(texts=TEXTS).shape == (2, QUANTIZERS)


def test_sounds_of_another_rate_of_unequal_length_and_with_channels_have_the_codes_they_have_alone(
    fitted: MuLaNEmbedQuantizer,
) -> None:
    expected = fitted.codes(wavs=sounds())
    faster = resample(sounds(), HZ, 3 * HZ)
    assert (fitted.codes(wavs=faster, input_sample_hz=3 * HZ) == expected).float().mean() > 0.95
    assert (fitted.codes(wavs=faster) == expected).float().mean() < 0.8, (
        "it must be told, or sounds are three times too long"
    )
    assert torch.equal(fitted.codes(wavs=torch.stack([sounds(), sounds()], dim=1)), expected)
    lengths = torch.tensor([1500, 4000, 2600])
    alone = [fitted.codes(wavs=sounds()[row : row + 1, :length]) for row, length in enumerate(lengths.tolist())]
    assert torch.equal(fitted.codes(wavs=padded(sounds()[:3], lengths), lengths=lengths), torch.cat(alone))


def test_sounds_that_have_no_finite_latent_are_told() -> None:
    waves = sounds().clone()
    waves[[3, 5]] = torch.nan
    quantizer = unfitted()
    with pytest.raises(ValueError, match="what MuLaN makes of 2 of the 24 sounds is not finite"):
        quantizer.fit([(waves, None)])
    assert not quantizer.is_fitted


@pytest.mark.parametrize("knows", ["what it learned from", "what its tower takes"])
def test_a_sound_that_is_longer_than_mulan_knows_is_heard_in_clips(
    fitted: MuLaNEmbedQuantizer, monkeypatch: pytest.MonkeyPatch, knows: str
) -> None:
    """As in the paper, whose MuLaN hears ten seconds at a time, and what it makes of them is averaged."""
    wave = sounds()[0]  # of 4000 samples
    clips = torch.stack([wave[:1800], wave[1800:3600], wave[-1800:]])
    heard, whole = fitted.latents(clips), fitted.latents(wave[None])[0]
    mean = torch.nn.functional.normalize(heard.mean(dim=0), dim=0)
    assert not torch.allclose(mean, whole, atol=1e-3)
    if knows == "what it learned from":
        monkeypatch.setattr(fitted.mulan, "clip_seconds", 1800 / HZ)
    else:
        monkeypatch.setattr(type(fitted.mulan.audio), "max_samples", 1800, raising=False)
    torch.testing.assert_close(fitted.latents(wave[None])[0], mean)
    lengths = torch.tensor([4000, 1800, 700])
    batch = padded(torch.stack([wave] * 3), lengths)
    found = fitted.latents(batch, lengths=lengths)
    torch.testing.assert_close(found, torch.stack([mean, heard[0], fitted.latents(wave[None, :700])[0]]))
    fast = fitted.latents(resample(wave[None], HZ, 2 * HZ), input_sample_hz=2 * HZ)[0]
    torch.testing.assert_close(fast, mean, atol=0.05, rtol=0.0)


def test_codebooks_and_codes_stay_whatever_is_asked_in_whatever_mode(fitted: MuLaNEmbedQuantizer) -> None:
    """64: the reference's move with every sound and every text they meet in training, and differently in each stage."""
    before, codes = {name: value.clone() for name, value in fitted.own_state().items()}, fitted.codes(wavs=sounds())
    fitted.train()
    fitted.mulan.train()
    assert fitted.mulan.audio.patch_dropout_prob > 0
    try:
        for _ in range(2):
            assert torch.equal(fitted.codes(wavs=sounds()), codes)
            fitted(texts=TEXTS, namespace="coarse")
        assert fitted.mulan.training, "its mode is as it was"
    finally:
        fitted.mulan.eval()
    assert all(torch.equal(value, before[name]) for name, value in fitted.own_state().items())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fitted.codes(wavs=sounds()), codes)
    assert torch.equal(quantizer().to(torch.bfloat16).codes(wavs=sounds()), codes)


def test_the_same_seed_gives_the_same_codebooks_and_rq_ema_decay_changes_nothing(fitted: MuLaNEmbedQuantizer) -> None:
    assert torch.equal(quantizer(rq_ema_decay=0.1).codebooks, fitted.codebooks)
    assert not torch.equal(quantizer(seed=1).codebooks, fitted.codebooks)


def test_fitted_once_with_enough_sounds_before_use() -> None:
    network = unfitted()
    assert not network.is_fitted
    with pytest.raises(ValueError, match="not fitted yet: make the quantizer with `helicon fit-kmeans --model RUN`"):
        network.codes(texts=TEXTS)
    sentence = (
        r"4 sounds are too few for 3 quantizers of 5 codes \(each code needs one or more\): give more of them, or fewer"
    )
    with pytest.raises(TooFewSounds, match=sentence):
        network.fit([(sounds()[:2], None), (sounds()[2:4], torch.tensor([10, 4000]))])
    assert not network.is_fitted, "nothing is half done"
    told: list[tuple[int, int]] = []
    network.fit([(sounds()[:10], None), (sounds()[10:], None)], max_sounds=12, reading=lambda *done: told.append(done))
    assert network.is_fitted and told == [(10, 12), (12, 12)]
    with pytest.raises(ValueError, match=r"this quantizer is fitted, .*: build a new one to fit"):
        network.fit([(sounds(), None)])


@pytest.mark.parametrize(("different", "why"), [(1, "they are heard as one"), (2, "after 1 nothing is left to tell")])
def test_sounds_that_are_told_before_all_codes_are_spent_are_too_few(different: int, why: str) -> None:
    """Codebooks of zeros would give the same code to everything, and the report would say that nothing is left."""
    network = unfitted()
    with pytest.raises(TooFewSounds, match=rf"12 sounds are too few for 3 quantizers of 5 codes \({why}\): give more"):
        network.fit([(sounds()[:different].repeat(12 // different, 1), None)])
    assert not network.is_fitted


def test_what_is_left_is_told_of_sounds_that_were_kept_from_the_fit() -> None:
    made_up = SyntheticSounds(100, HZ, 0.5)
    waves = torch.stack([made_up[index]["audio"][:1200] for index in range(100)])
    network = unfitted(codebook_size=11)
    assert codes_for(100) == 11 and codes_for(3) == 2
    report = network.fit([(waves, None)])
    assert (report.num_frames, report.num_kept) == (90, 10)
    is_kept = torch.arange(100) % 10 == 9
    latents, ids = network.latents(waves), network.codes(waves)
    told = torch.stack([network.codebooks[level, ids[:, level]] for level in range(QUANTIZERS)]).sum(dim=0)
    left = (latents - told).square().sum(dim=1)
    variance = (latents - latents[~is_kept].mean(dim=0)).square().sum(dim=1)
    assert report.unexplained == pytest.approx(float(left[is_kept].sum() / variance[is_kept].sum()), rel=1e-3)
    assert report.unexplained > 1.5 * float(left[~is_kept].sum() / variance[~is_kept].sum()), "those fitted flatter"
    few = unfitted(codebook_size=12).fit([(waves, None)])
    assert (few.num_frames, few.num_kept) == (100, 0), "too few would be left"


def test_each_namespace_has_embeddings_of_its_own(fitted: MuLaNEmbedQuantizer) -> None:
    """65: the reference takes those of the first for all three stages, where it is not told."""
    ids = fitted.codes(texts=TEXTS)
    for name, dim in zip(("semantic", "coarse", "fine"), DIMS, strict=True):
        found = fitted(texts=TEXTS, namespace=name)
        assert found.shape == (2, QUANTIZERS, dim)
        assert torch.equal(found[1, 2], fitted.embeddings[name][2, ids[1, 2]])
    assert not torch.equal(fitted(texts=TEXTS, namespace="semantic"), fitted(texts=TEXTS, namespace="coarse"))
    with pytest.raises(
        ValueError, match="each namespace has embeddings of its own: say which, namespace= one of semantic"
    ):
        fitted(texts=TEXTS)
    with pytest.raises(ValueError, match="there is no namespace 'base': give one of semantic, coarse, fine"):
        fitted(texts=TEXTS, namespace="base")
    alone = quantizer(conditioning_dims=7, namespaces=("music",))
    assert alone(texts=TEXTS).shape == (2, QUANTIZERS, 7)
    several = quantizer(conditioning_dims=7)
    several.set_default_namespace("fine")
    assert torch.equal(several(texts=TEXTS), several(texts=TEXTS, namespace="fine"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"conditioning_dims": (4, 5)}, r"conditioning_dims=\(4, 5\) are 2 and the namespaces .* are 3: give one"),
        ({"namespaces": ("a", "a"), "conditioning_dims": 4}, "give one or more different names"),
        ({"namespaces": (), "conditioning_dims": 4}, "give one or more different names"),
        ({"rq_num_quantizers": 0}, "rq_num_quantizers=0: it must be at least 1"),
        ({"codebook_size": 1}, "codebook_size=1: it must be at least 2"),
    ],
)
def test_sizes_that_cannot_be(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        unfitted(**options)


def test_a_mulan_that_takes_spectra_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes spectra \(accept_spec=True\), and cannot hear sounds: give one that"):
        MuLaNEmbedQuantizer(mulan(audio={"accept_spec": True}), 4)


def test_sounds_or_texts(fitted: MuLaNEmbedQuantizer) -> None:
    for given in ({}, {"wavs": sounds()[:2], "texts": TEXTS}):
        with pytest.raises(ValueError, match="give wavs or texts, and not both"):
            fitted.codes(**given)
    with pytest.raises(ValueError, match="takes a list of texts, not one"):
        fitted.codes(texts=TEXTS[0])


def test_saved_and_loaded_with_its_mulan(fitted: MuLaNEmbedQuantizer, tmp_path: Path) -> None:
    fitted.save_pretrained(tmp_path)
    loaded: Any = load_network(tmp_path)
    assert loaded.is_fitted and torch.equal(loaded.codes(wavs=sounds()), fitted.codes(wavs=sounds()))
    assert torch.equal(loaded(texts=TEXTS, namespace="fine"), fitted(texts=TEXTS, namespace="fine"))
    assert not any(name.startswith("mulan") for name in fitted.own_state()), "a stage is not saved twice"


# ------------------------------------------------------------------ stages that read them


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_learns_embeddings_of_its_own(fitted: MuLaNEmbedQuantizer, name: str, tmp_path: Path) -> None:
    """64: they are the network's, so that they are trained and saved with it."""
    stage = conditioned(name, fitted)
    table = stage.transformer.code_table.embedding.weight
    assert table.shape == (QUANTIZERS * CODES, 16) and table.requires_grad
    namespace = "coarse" if name == "delayed" else name
    if name != "fine":  # whose dims differ
        assert torch.equal(table, fitted.embeddings[namespace].flatten(0, 1))
        assert table.data_ptr() != fitted.embeddings[namespace].data_ptr()
    assert any(parameter is table for parameter in stage.parameters())
    with torch.no_grad():
        table += 1
    stage.save_pretrained(tmp_path)
    loaded: Any = load_network(tmp_path)
    assert torch.equal(loaded.transformer.code_table.embedding.weight, table)
    assert torch.equal(loaded.audio_conditioner.codebooks, fitted.codebooks)
    assert loaded.transformer.arguments["cond_codes"] == [QUANTIZERS, CODES]
    again = type(stage.transformer)(**stage.transformer.arguments)  # as if it had been built so
    assert again.own_state().keys() == stage.transformer.own_state().keys()


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("is_prefix", [False, True])
def test_codes_are_heard_dropped_and_guided_by(name: str, is_prefix: bool) -> None:
    kind = KINDS[name]
    options = {"audio_text_condition": True, "cond_codes": (QUANTIZERS, CODES), "cond_drop_prob": 1.0}
    stage = kind.stage(kind.build(**options, cond_as_self_attn_prefix=is_prefix), mask_prob=0.0)
    losses = lambda ids, **more: stage(**kind.tokens, condition_ids=ids, return_loss=True, **more)
    said, other = losses(IDS), losses(IDS.flip(0))
    assert not torch.isclose(said, other)
    nothing = losses(IDS, cond_drop_prob=1.0)
    assert not torch.isclose(said, nothing) and torch.equal(nothing, losses(IDS.flip(0), cond_drop_prob=1.0))
    torch.testing.assert_close(stage(**kind.tokens, cond_drop_prob=1.0, return_loss=True), nothing)
    assert torch.equal(stage.train()(**kind.tokens, condition_ids=IDS, return_loss=True), nothing), "all are dropped"
    stage.eval()
    # Guidance is null + scale * (cond - null), from one pass over both.
    tokens = dict(kind.tokens)
    if name == "semantic":
        tokens = {"ids": tokens["semantic_token_ids"]}
    network = stage.transformer
    cond, null = (as_tuple(network(**tokens, condition_ids=IDS, cond_drop_prob=drop)) for drop in (0.0, 1.0))
    guided = as_tuple(network.forward_with_cond_scale(**tokens, condition_ids=IDS, cond_scale=3.0))
    for mine, a, b in zip(guided, cond, null, strict=True):
        torch.testing.assert_close(mine, b + 3 * (a - b), atol=2e-4, rtol=1e-3)
        assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("name", STAGES)
def test_generation_follows_codes_and_texts_alike(fitted: MuLaNEmbedQuantizer, name: str) -> None:
    stage = conditioned(name, fitted)
    ids = fitted.codes(texts=TEXTS)
    tokens = (
        {"max_length": 6, "batch_size": 2} if name == "semantic" else {"semantic_token_ids": torch.tensor([[1, 2, 3]])}
    )
    if name == "fine":
        tokens = {"coarse_token_ids": torch.randint(16, (2, 6, 2))}
    if name in ("coarse", "delayed"):
        tokens |= {"max_time_steps": 6}
    made = lambda **said: stage.generate(**tokens, seed=3, **said)
    told = made(text=TEXTS)
    assert torch.equal(told, made(condition_ids=ids))
    assert not torch.equal(told, made(condition_ids=(ids + 1) % CODES)[:, : told.shape[1]])
    assert not torch.equal(told, made(condition_ids=ids, cond_scale=3.0)[:, : told.shape[1]])
    for wrong in (CODES, -1):
        with pytest.raises(ValueError, match=f"condition_ids hold {wrong}, and the transformer knows 0 to {CODES - 1}"):
            made(condition_ids=torch.full_like(ids, wrong))


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_tells_its_conditioner_the_rate_and_the_lengths(
    fitted: MuLaNEmbedQuantizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, task = conditioned(name, fitted), StageTask(conditioned(name, fitted))
    lengths = torch.tensor([3000, 4000])
    waves = torch.where(torch.arange(4000) < lengths[:, None], sounds()[:2], 0.0)
    expected = fitted.codes(wavs=waves, lengths=lengths)
    doubled = resample(waves, HZ, 2 * HZ)
    batch: dict[str, Any] = {"raw_wave": doubled, "raw_wave_lengths": 2 * lengths}
    batch |= {"raw_wave_for_codec": waves, "raw_wave_for_codec_lengths": lengths}
    if name == "semantic":
        del batch["raw_wave_for_codec"]
    if name == "fine":
        del batch["raw_wave"]
    asked: list[dict[str, Any]] = []
    codes = MuLaNEmbedQuantizer.codes
    monkeypatch.setattr(
        MuLaNEmbedQuantizer, "codes", lambda network, **given: asked.append(given) or codes(network, **given)
    )
    assert torch.equal(stage.condition_of_batch(batch)["condition_ids"], expected)
    assert asked[-1]["input_sample_hz"] == (HZ if name == "fine" else 2 * HZ)
    at_its_rate = {**batch, "raw_wave_for_conditioner": waves, "raw_wave_for_conditioner_lengths": lengths}
    assert torch.equal(stage.condition_of_batch(at_its_rate)["condition_ids"], expected)
    assert asked[-1]["wavs"] is waves
    count = len(asked)
    read = task.read(dict(batch))
    assert torch.equal(read["condition_ids"], expected) and len(asked) == count + 1
    assert "raw_wave" not in read
    task.forward(read)
    assert len(asked) == count + 1, "it hears a batch once"
    assert stage.condition_of_batch({"condition_ids": IDS, **batch}).keys() == {"condition_ids"}


def test_a_stage_that_is_called_with_a_wave_hears_it(fitted: MuLaNEmbedQuantizer) -> None:
    for name, rate in {"semantic": 2 * HZ, "fine": HZ, "coarse": 2 * HZ}.items():
        stage = conditioned(name, fitted)
        wave = resample(sounds()[:2], HZ, rate)
        codecs = {"raw_wave_for_codec": sounds()[:2]} if name == "coarse" else {}
        ids = fitted.codes(wavs=wave, input_sample_hz=rate)
        heard = stage(raw_wave=wave, **codecs, return_loss=True)
        assert torch.equal(heard, stage(raw_wave=wave, **codecs, condition_ids=ids, return_loss=True))
        told = stage(raw_wave=wave, **codecs, text=TEXTS, return_loss=True)
        ids = fitted.codes(texts=TEXTS)
        assert torch.equal(told, stage(raw_wave=wave, **codecs, condition_ids=ids, return_loss=True))
    stage = conditioned("coarse", fitted)  # of tokens, and of the codec's wave alone
    tokens = stage.semantic_ids(resample(sounds()[:2], HZ, 2 * HZ))
    ids = fitted.codes(wavs=sounds()[:2])
    heard = stage(semantic_token_ids=tokens, raw_wave=sounds()[:2], return_loss=True)
    codes = stage.codes(sounds()[:2])[..., :2]
    given = {"semantic_token_ids": tokens, "coarse_token_ids": codes}
    assert torch.equal(heard, stage(**given, condition_ids=ids, return_loss=True))


MISTAKES = {
    "no codes": (lambda stage: stage(semantic_token_ids=IDS), "is conditioned on codes: give condition_ids, or a sound"),
    "embeddings": (
        lambda stage: stage(semantic_token_ids=IDS, text_embeds=torch.randn(2, 3, 16)),
        "has learned embeddings of its own, of codes: give condition_ids in the place of text_embeds",
    ),
    "both": (
        lambda stage: stage(semantic_token_ids=IDS, text=TEXTS, condition_ids=IDS, text_embeds=torch.randn(2, 3, 16)),
        "give one of text and text_embeds and condition_ids, not both",
    ),
    "shape": (
        lambda stage: stage(semantic_token_ids=IDS, condition_ids=IDS[:, :2]),
        r"condition_ids of shape \[2, 2\] are not those of 3 quantizers: give \[b, 3\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_told_in_one_sentence(fitted: MuLaNEmbedQuantizer, kind: str) -> None:
    wrong, sentence = MISTAKES[kind]
    with pytest.raises(ValueError, match=sentence):
        wrong(conditioned("semantic", fitted))


def test_transformers_that_do_not_fit_the_codes_are_refused(fitted: MuLaNEmbedQuantizer) -> None:
    kind = KINDS["semantic"]
    with pytest.raises(
        ValueError, match="is conditioned on 3 codes of 9, and the audio_conditioner makes 3 of 5: give"
    ):
        kind.stage(kind.build(audio_text_condition=True, cond_codes=(3, 9)), audio_conditioner=fitted)
    with pytest.raises(
        ValueError, match="takes no codes in the place of texts: build it with audio_text_condition=True"
    ):
        kind.stage(kind.build(has_condition=True, t5_name=BYTES), audio_conditioner=fitted)
    with pytest.raises(
        ValueError, match="takes no codes in the place of texts: build it with audio_text_condition=True"
    ):
        kind.build(cond_codes=(3, 9))
    with pytest.raises(
        ValueError, match="takes no condition_ids: build it with audio_text_condition=True and cond_codes"
    ):
        kind.stage(kind.build(audio_text_condition=True))(**kind.tokens, condition_ids=IDS)
    mute = kind.stage(kind.build(), audio_conditioner=fitted)  # one that reads nothing needs nothing
    assert mute.code_conditioner is None and mute.condition_of(sounds()) == {}
