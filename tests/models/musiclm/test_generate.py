"""MusicLM: candidates of all texts in one batch, ranked by what MuLaN hears; and what it makes for the command line."""

from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from torch import Tensor
from typer.testing import CliRunner

import helicon
from helicon.cli import app
from helicon.models.audiolm.pipeline import AudioLM
from helicon.models.musiclm.conditioning import MuLaNEmbedQuantizer
from helicon.models.musiclm.generate import Candidates, MusicLM
from helicon.models.musiclm.music import MusicMaker
from helicon.nn.resample import resample
from models.audiolm.tiny import KINDS, codec, stage_with_codec, wav2vec
from models.musiclm.conditioned import CODEC, conditioned, quantizer, sounds
from models.musiclm.tiny import HZ, mulan

SHORT: dict[str, Any] = {"seconds": 8 * 40 / HZ, "seed": 5}
TEXTS = ["a loud tone, high pitch", "a soft pluck, low pitch"]


@pytest.fixture(scope="module")
def music() -> MusicLM:
    fitted = quantizer()
    stages = {"semantic_transformer": "semantic", "coarse_transformer": "delayed"}
    return MusicLM(AudioLM(**{role: conditioned(name, fitted) for role, name in stages.items()}), fitted)


def same(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(
        one.shape == two.shape and torch.equal(one, two) for one, two in zip(first, second, strict=True)
    )


class Recorded:
    """In the place of an AudioLM's forward: says what it was asked, and gives these sounds."""

    def __init__(self, waves: list[Tensor]):
        self.waves, self.asked = waves, list[dict[str, Any]]()

    def __call__(self, model: AudioLM, **asked: Any) -> list[Tensor]:
        self.asked.append(asked)
        count = len(asked["condition_ids"])
        first = sum(len(one["condition_ids"]) for one in self.asked[:-1])
        return self.waves[first : first + count]


def test_the_best_of_several_for_one_text_or_for_many(music: MusicLM) -> None:
    best = music(TEXTS[0], num_samples=3, **SHORT)
    found = music(TEXTS[0], num_samples=3, return_all=True, **SHORT)
    assert isinstance(found, Candidates) and torch.equal(found.waves[0], best) and best.ndim == 1
    assert found.similarities.shape == (3,) and (found.similarities.diff() <= 0).all()
    torch.testing.assert_close(music.similarities(found.waves, [TEXTS[0]] * 3), found.similarities)
    both = music(TEXTS, num_samples=3, **SHORT)
    assert isinstance(both, list) and len(both) == 2 and not best.requires_grad
    every = music(TEXTS, num_samples=3, return_all=True, **SHORT)
    assert same(both, [candidates.waves[0] for candidates in every])
    assert same(music(TEXTS, num_samples=3, **SHORT), both)
    assert not same(music(TEXTS, num_samples=3, **{**SHORT, "seed": 6}), both)


def test_all_candidates_are_made_at_once_or_in_pieces_and_lists_of_unequal_sounds_are_ranked(
    music: MusicLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65: the reference makes one at a time, and breaks where the sounds of a batch end at different times."""
    waves = [sounds()[row, : 1200 + 400 * row] for row in range(6)]
    expected = torch.stack(
        [
            music.quantizer.mulan.get_audio_latents(wave[None])[0]
            @ music.quantizer.mulan.get_text_latents(raw_texts=[TEXTS[row // 3]])[0]
            for row, wave in enumerate(waves)
        ]
    )
    for batch_size, sizes in ((None, [6]), (4, [4, 2])):
        recorded = Recorded(waves)
        monkeypatch.setattr(AudioLM, "forward", lambda model, **asked: recorded(model, **asked))  # noqa: B023
        found = music(TEXTS, num_samples=3, return_all=True, batch_size=batch_size, seed=1, cond_scale=2.0)
        assert [len(asked["condition_ids"]) for asked in recorded.asked] == sizes
        assert len({asked["seed"] for asked in recorded.asked}) == len(sizes)
        assert all(asked["cond_scale"] == 2.0 for asked in recorded.asked)
        for row, candidates in enumerate(found):
            values = expected[3 * row : 3 * row + 3]
            torch.testing.assert_close(candidates.similarities, values.sort(descending=True).values)
            assert same(candidates.waves, [waves[3 * row + int(index)] for index in values.argsort(descending=True)])
    ids = torch.cat([asked["condition_ids"] for asked in recorded.asked])
    assert torch.equal(ids, music.quantizer.codes(texts=TEXTS).repeat_interleave(3, dim=0))


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_all_candidates_of_a_text_go_on_from_its_prompt(
    music: MusicLM, monkeypatch: pytest.MonkeyPatch, batch_size: int | None
) -> None:
    recorded = Recorded([*sounds()[:4]])
    monkeypatch.setattr(AudioLM, "forward", lambda model, **asked: recorded(model, **asked))
    prompts, lengths = sounds()[:2, :800], [800, 500]
    given: dict[str, Any] = {"prime_wave": prompts.numpy(), "prime_lengths": lengths}
    best = music(TEXTS, num_samples=2, seed=1, batch_size=batch_size, **given)
    asked = {name: torch.cat([one[name] for one in recorded.asked]) for name in given}
    assert len(best) == 2 and torch.equal(asked["prime_wave"], prompts.repeat_interleave(2, dim=0))
    assert asked["prime_lengths"].tolist() == [800, 800, 500, 500]
    for one in (prompts[0], prompts[:1]):  # for all
        music(TEXTS, seed=1, prime_wave=one)
        assert recorded.asked[-1]["prime_wave"] is one
    with pytest.raises(ValueError, match="prime_wave has 2 rows for 3 texts: give one for each, or one for all"):
        music([*TEXTS, "a"], prime_wave=prompts, batch_size=1)


def test_there_is_no_guidance_by_default(music: MusicLM, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded([*sounds()[:2]])
    monkeypatch.setattr(AudioLM, "forward", lambda model, **asked: recorded(model, **asked))
    music(TEXTS[0], seed=1)
    MusicMaker(music, texts=TEXTS).make([0], 1)
    assert [asked["cond_scale"] for asked in recorded.asked] == [1.0, 1.0]


def test_mulan_hears_candidates_at_its_own_rate() -> None:
    """65: the reference feeds it what the codec gives: a MuLaN of 16 kHz hears a sound of 24 kHz slower and lower than it is."""
    fitted = MuLaNEmbedQuantizer(mulan(audio={"sample_hz": 16000}).eval(), 16, 2, codebook_size=4)
    slow = resample(sounds()[:12], HZ, 16000)
    fitted.fit([(slow, None)])
    fast_codec = codec(target_sample_hz=24000)
    stages = {"semantic_transformer": "semantic", "coarse_transformer": "delayed"}
    options = {"audio_text_condition": True}
    built = {
        role: stage_with_codec(name, fast_codec, options, audio_conditioner=fitted) for role, name in stages.items()
    }
    music = MusicLM(AudioLM(**built), fitted)
    assert music.sample_hz == 24000
    fast = [*resample(slow, 16000, 24000)]
    text = fitted.mulan.get_text_latents(raw_texts=TEXTS[:1])
    expected = fitted.mulan.get_audio_latents(slow) @ text[0]
    torch.testing.assert_close(music.similarities(fast, TEXTS[:1] * 12), expected, atol=5e-3, rtol=0)
    unheard = fitted.mulan.get_audio_latents(torch.stack(fast)) @ text[0]
    assert (unheard - expected).abs().max() > 0.05
    stereo = [torch.stack((wave, wave)) for wave in fast]
    torch.testing.assert_close(music.similarities(stereo, TEXTS[:1] * 12, batch_size=5), expected, atol=5e-3, rtol=0)


def test_a_candidate_that_is_longer_than_what_mulan_learned_from_is_heard_in_clips(
    music: MusicLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wave, said = sounds()[0], music.quantizer.latents(texts=TEXTS[:1])[0]
    whole = music.similarities([wave], TEXTS[:1])[0]
    monkeypatch.setattr(music.quantizer.mulan, "clip_seconds", 1800 / HZ)
    found = music.similarities([wave, wave[:900]], [TEXTS[0]] * 2)
    torch.testing.assert_close(found[0], music.quantizer.latents(wave[None])[0] @ said)
    torch.testing.assert_close(found[1], music.quantizer.latents(wave[None, :900])[0] @ said)
    assert not torch.isclose(found[0], whole)


def test_a_candidate_that_is_not_finite_is_never_the_best(music: MusicLM, monkeypatch: pytest.MonkeyPatch) -> None:
    waves = [*sounds()[:3].clone()]
    waves[1][:] = torch.nan
    recorded = Recorded(waves)
    monkeypatch.setattr(AudioLM, "forward", lambda model, **asked: recorded(model, **asked))
    found = music(TEXTS[0], num_samples=3, return_all=True, seed=1)
    assert found.waves[2] is waves[1] and found.similarities[:2].isfinite().all()


def test_one_candidate_is_not_ranked(music: MusicLM, monkeypatch: pytest.MonkeyPatch) -> None:
    both = music(TEXTS, return_all=True, **SHORT)

    def refuse(*_: Any) -> None:
        raise AssertionError("there is nothing to rank")

    monkeypatch.setattr(MusicLM, "similarities", refuse)
    assert same(music(TEXTS, **SHORT), [candidates.waves[0] for candidates in both])
    assert music(TEXTS[0], **SHORT).ndim == 1


def test_saved_and_loaded_it_makes_the_same_with_its_quantizer_saved_once(music: MusicLM, tmp_path: Path) -> None:
    music.save_pretrained(tmp_path)
    loaded: Any = helicon.load(tmp_path)
    assert same(loaded(TEXTS, num_samples=2, **SHORT), music(TEXTS, num_samples=2, **SHORT))
    assert len(list(tmp_path.rglob("mulan"))) == 1


def test_an_audiolm_that_was_built_without_the_quantizer(music: MusicLM, tmp_path: Path) -> None:
    """As other packages do it: MusicLM alone is given the quantizer."""
    own = music.audio_lm
    bare = AudioLM(
        semantic_transformer=own.semantic.transformer,
        coarse_transformer=own.coarse.transformer,
        codec=CODEC,
        wav2vec=wav2vec(),
    )
    network = MusicLM(bare, music.quantizer)
    assert same(network(TEXTS, **SHORT), music(TEXTS, **SHORT))
    network.save_pretrained(tmp_path)
    assert same(helicon.load(tmp_path)(TEXTS, **SHORT), music(TEXTS, **SHORT))
    assert MusicMaker(network, texts=TEXTS, seconds=0.04).make([1], 3)[0].title == TEXTS[1]
    for text in ("", " "):
        with pytest.raises(ValueError, match="an empty text says nothing"):
            MusicMaker(network, texts=[TEXTS[0], text])


def test_quantizers_and_stages_that_do_not_belong_together_are_refused(music: MusicLM) -> None:
    with pytest.raises(
        ValueError, match=r"with another audio_conditioner \(MuLaNEmbedQuantizer\) than the mulan_embed"
    ):
        MusicLM(music.audio_lm, quantizer(seed=1))
    frozen = {"codec": CODEC, "wav2vec": wav2vec()}

    def bare(**options: Any) -> AudioLM:
        sizes = {"codebook_size": 16, "num_quantizers": 3}
        networks = KINDS["semantic"].build(**options), KINDS["delayed"].build(**sizes, **options)
        return AudioLM(semantic_transformer=networks[0], coarse_transformer=networks[1], **frozen)

    with pytest.raises(
        ValueError, match="the stages have no audio_conditioner: give the mulan_embed_quantizer they were"
    ):
        MusicLM(bare())
    with pytest.raises(ValueError, match="none of the transformers is conditioned on anything: train them with"):
        MusicLM(bare(), music.quantizer)
    with pytest.raises(ValueError, match="the semantic transformer was not trained with the codes of this mulan_embed"):
        MusicLM(bare(audio_text_condition=True, cond_codes=(3, 9)), music.quantizer)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"text": []}, "there is no text to make music of: give one or more"),
        ({"text": ""}, "the text '' says nothing of what is to be heard: give one with words in it"),
        ({"text": ["a", " "], "num_samples": 2}, "the text ' ' says nothing"),
        ({"text": "a", "num_samples": 0}, "num_samples=0 must be at least 1"),
        ({"text": "a", "batch_size": 0}, "batch_size=0 must be at least 1"),
    ],
)
def test_mistakes_are_told_in_one_sentence(music: MusicLM, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        music(**asked)


# ------------------------------------------------------------------ the command line


def test_the_command_line_makes_music(music: MusicLM) -> None:
    music.save_pretrained("music")
    words = [
        "generate",
        "music",
        "--text",
        TEXTS[0],
        "--text",
        TEXTS[1],
        "-o",
        "out",
        "seconds=0.04",
        "num_candidates=3",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "MusicLM of" in result.stdout
    wave, hz = soundfile.read(sorted(Path("out").glob("*.wav"))[0])
    assert hz == HZ and 0 < len(wave) <= 0.04 * HZ


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "MusicLM makes music of words: say with --text what is to be heard"),
        (["--text", "a", "num_candidates=0"], "num_candidates=0 must be at least 1"),
        (["--text", "a", "--prompt", "a.wav"], "--prompt is nothing for the network in"),
        (["--text", "a", "seconds=0"], "seconds=0 must be at least a frame of the codec"),
    ],
)
def test_mistakes_on_the_command_line(music: MusicLM, words: list[str], sentence: str) -> None:
    music.save_pretrained("music")
    result = CliRunner().invoke(app, ["generate", "music", *words])
    assert result.exit_code == 1 and sentence in result.stderr.splitlines()[-1]
