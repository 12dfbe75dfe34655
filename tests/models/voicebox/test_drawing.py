"""How a flow speaks: `ConditionalFlowMatcherWrapper.draw` and `sample`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchdiffeq import odeint

from helicon.models.voicebox.durations import DurationPredictor
from helicon.models.voicebox.features import MelVoco
from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.model import Prepared, VoiceBox
from helicon.models.voicebox.solving import Drawn
from helicon.models.voicebox.text import CharacterTokenizer
from helicon.nn.network import load_network
from helicon.nn.ode import EVALUATIONS
from models.audiolm.tiny import CONDITIONS, TEXTS, stage_with_codec, wav2vec
from models.voicebox.flows import (
    HOP,
    HZ,
    STD,
    Best,
    Blocks,
    Letters,
    N,
    Still,
    Turning,
    features,
    ids,
    known,
    seeded,
    sounding,
    wrapped,
)
from models.voicebox.test_model import FEATURES, SIZES, TOKENS, build


def test_saved_and_loaded_it_says_the_same(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer("abc ")
    space = MelVoco(n_mels=6, sampling_rate=400, n_fft=32, hop_length=8)
    torch.manual_seed(0)
    network = VoiceBox(num_cond_tokens=tokenizer.num_tokens, audio_enc_dec=space, **SIZES)
    flow = wrapped(network, tokenizer=tokenizer).eval()
    flow.fit_normalisation(torch.randn(3, 9, 6) * 2 - 1)
    said = {"texts": ["abba", "cab a"], "seconds": 0.24, "seed": 5, "steps": 2, "cond_scale": 1.5}
    audio = flow.sample(**said)
    assert audio.shape == (2, 12 * 8) and audio.isfinite().all()
    flow.save_pretrained(tmp_path / "saved")
    loaded = ConditionalFlowMatcherWrapper.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.sample(**said), audio)
    assert {*loaded.stages()} == {"voicebox.audio_enc_dec", "tokenizer"}
    assert all(name.startswith(("voicebox.", "feature_")) for name in loaded.own_state())


@pytest.mark.parametrize("method", [*EVALUATIONS])
@torch.no_grad()
def test_a_linear_field_leads_where_torchdiffeq_says(method: str) -> None:
    flow = known(Turning)
    flow.fit_normalisation(features(9, 11) * 3 + 1)
    found = flow.draw(lengths=[6, 6], steps=5, method=method, grid="uniform", seed=4)
    noise = torch.randn(2, 6, FEATURES, generator=seeded(4))
    path = odeint(lambda t, y: (torch.sin(3 * t) - 0.4) * y, noise, torch.linspace(0, 1, 6), method=method)
    torch.testing.assert_close(found.features, flow.denormalise(path[-1]), atol=1e-5, rtol=1e-5)
    assert found.evaluations == 5 * EVALUATIONS[method]


@torch.no_grad()
def test_the_best_field_makes_what_it_was_made_for() -> None:
    found = known(Best).draw(lengths=[40] * 50, steps=32, seed=0)
    assert found.features.std().item() == pytest.approx(STD, rel=0.02)


def test_evaluations_are_counted_and_guidance_counts_once() -> None:
    calls: list[int] = []

    class Counted(VoiceBox):
        def velocity(self, prepared: Prepared, x: Tensor, times: Tensor) -> Tensor:
            calls.append(len(x))
            return super().velocity(prepared, x, times)

    torch.manual_seed(0)
    flow = wrapped(Counted(num_cond_tokens=TOKENS, dim_in=FEATURES, **SIZES))
    said = {"text_token_ids": ids(3, 2), "lengths": N, "seed": 0}
    assert flow.draw(**said, steps=6).evaluations == len(calls) == 12 and {*calls} == {2}
    calls.clear()
    assert flow.draw(**said, steps=6, cond_scale=2.0).evaluations == len(calls) == 12 and {*calls} == {4}
    calls.clear()
    part = flow.draw(**said, steps=4, cond_scale=2.0, guidance_interval=(0.0, 0.5), method="euler", grid="uniform")
    assert part.evaluations == 4 and calls == [4, 4, 4, 2]
    calls.clear()
    assert flow.draw(lengths=[N, N], steps=1, cond_scale=2.0).evaluations == 2 and calls == [
        2,
        2,
    ]  # nothing to guide by
    assert flow.draw(**said, steps=5, grid="pruned", method="rk4").evaluations == 20
    adaptive = wrapped(flow.voicebox, use_torchode=True, ode_atol=1e-3, ode_rtol=1e-3)
    assert adaptive.draw(**said).evaluations > 6
    assert wrapped(flow.voicebox, torchdiffeq_ode_method="dopri5").solving.method == "adaptive"


def test_seeds_steps_and_grids_say_what_is_made() -> None:
    flow, said = wrapped(), {"text_token_ids": ids(3, 2), "lengths": N, "steps": 5}
    first = flow.draw(**said, seed=1).features
    torch.manual_seed(99)
    assert torch.equal(flow.draw(**said, seed=1).features, first)
    others = [
        flow.draw(**said, seed=2),
        flow.draw(**said | {"steps": 6}, seed=1),
        *(flow.draw(**said, grid=grid, seed=1) for grid in ("uniform", "pruned")),
        flow.draw(**said, cond_scale=1.5, seed=1),
        flow.draw(**said, cond_scale=1.5, guidance_interval=(0.2, 0.4), seed=1),
        flow.draw(**said),
    ]
    made = [first, *(drawn.features for drawn in others)]
    for i in range(len(made)):
        for j in range(i):
            assert (made[i] - made[j]).abs().max() > 1e-4, (i, j)


@pytest.mark.parametrize("alignment", ["free", "frames"])
def test_the_prompt_is_kept_and_changes_what_follows(alignment: str) -> None:
    """Without a cond_mask the prompt was hidden: a known mistake."""
    flow = wrapped(build(alignment=alignment))
    flow.fit_normalisation(features(9, 11) * 3 + 1)
    prompt = features(2, 3)
    said = {"text_token_ids": ids(3, 2), "lengths": torch.tensor([7, 5]), "seed": 0, "steps": 2}
    found = flow.draw(cond=prompt, **said)
    assert torch.equal(found.features[:, :3], prompt)  # to the last bit
    assert found.hidden.tolist() == [[False] * 3 + [True] * 4, [False] * 3 + [True] * 2 + [False] * 2]
    assert found.lengths.tolist() == [7, 5] and (found.features[1, 5:] == 0).all()
    without, other = flow.draw(**said).features, flow.draw(cond=-prompt, **said).features
    for row, length in enumerate((7, 5)):
        for different in (without, other):
            change = (found.features - different)[row, 3:length].abs().amax(dim=-1)
            assert change.min() > 1e-3
    shorter = flow.draw(cond=prompt, cond_lengths=torch.tensor([3, 1]), **said)
    assert (
        torch.equal(shorter.features[1, :1], prompt[1, :1])
        and shorter.hidden[1].tolist() == [False] + [True] * 4 + [False] * 2
    )
    spoiled = prompt.clone()
    spoiled[1, 1:] = float("nan")
    again = flow.draw(cond=spoiled, cond_lengths=torch.tensor([3, 1]), **said)
    assert torch.equal(again.features, shorter.features)  # what does not count is not seen
    assert torch.equal(flow.draw(cond=prompt[:1], **said).features[0], found.features[0])  # one for all
    plain = wrapped(flow.voicebox).draw(cond=flow.normalise(prompt), **said).features
    expected = flow.denormalise(plain)[found.hidden]
    torch.testing.assert_close(found.features[found.hidden], expected, atol=1e-4, rtol=1e-4)


def test_given_frames_are_on_the_way_what_they_were_in_training() -> None:
    """Of their velocity nothing is learned, for the loss leaves them out."""
    seen: list[tuple[float, Tensor]] = []

    class Watched(Still):
        def velocity(self, prepared: Prepared, x: Tensor, times: Tensor) -> Tensor:
            seen.append((float(times), x))
            return torch.full_like(x, 9.0)

    flow, prompt = known(Watched, sigma=0.1), features(1, 3)
    flow.fit_normalisation(features(9, 11) * 3 + 1)
    flow.draw(cond=prompt, lengths=5, steps=4, seed=0)
    noise = torch.randn(1, 5, FEATURES, generator=seeded())
    assert len(seen) == 8
    for time, x in seen:
        expected = (1 - 0.9 * time) * noise[:, :3] + time * flow.normalise(prompt)
        torch.testing.assert_close(x[:, :3], expected, atol=1e-5, rtol=1e-5)


def test_a_sound_that_is_cut_off_within_a_frame_goes_on_before_it() -> None:
    flow, audio = sounding(), torch.randn(2, 15, generator=seeded())
    said = {"semantic_token_ids": ids(4), "steps": 1, "seed": 0}
    assert (~flow.draw(cond=audio, **said).hidden).sum(dim=1).tolist() == [3, 3]
    shorter = flow.draw(cond=audio, cond_lengths=torch.tensor([8, 6]), **said)
    assert (~shorter.hidden).sum(dim=1).tolist() == [2, 1]
    mended = flow.draw(cond=audio, cond_mask=torch.tensor([[True, False, False, False]]), **said)
    assert mended.hidden.tolist() == [[True, False, False, False]] * 2


def test_guidance_leads_away_from_what_is_made_without_text_and_prompt() -> None:
    flow = known(Still)

    class Signed(Still):
        def velocity(self, prepared: Prepared, x: Tensor, times: Tensor) -> Tensor:
            return torch.ones_like(x) * (~prepared.hidden).any(dim=1)[:, None, None]

    flow = known(Signed)
    made = {
        scale: flow.draw(cond=features(1, 2), lengths=N, cond_scale=scale, seed=0, steps=3).features[:, 2:]
        for scale in (1.0, 0.0, 3.0)
    }
    torch.testing.assert_close(made[1.0] - made[0.0], torch.ones(1, 5, FEATURES))
    torch.testing.assert_close(made[3.0] - made[0.0], 3 * torch.ones(1, 5, FEATURES))


def test_infilling_keeps_what_is_given_to_the_last_bit() -> None:
    flow = sounding()
    flow.fit_normalisation(features(9, 11) * 3 + 1)
    audio = torch.randn(1, 40, generator=seeded())
    hidden = torch.zeros(1, 10, dtype=torch.bool)
    hidden[:, 3:6] = True
    said = {"semantic_token_ids": ids(4), "cond_mask": hidden, "seed": 0, "steps": 2}
    made = flow.sample(cond=audio, **said)
    assert made.shape == (1, 40)
    kept = torch.cat((made[:, :12], made[:, 24:]), dim=1)
    assert torch.equal(kept, torch.cat((audio[:, :12], audio[:, 24:]), dim=1))
    assert (made - audio)[:, 12:24].abs().min() > 1e-4
    longer = flow.draw(cond=audio, **said, lengths=12)
    assert longer.hidden[0].tolist() == [False] * 3 + [True] * 3 + [False] * 4 + [True] * 2


def test_lengths_are_right_for_any_pair_of_rates() -> None:
    """100 tokens at 50 a second are 150 frames at 75 a second, not 67: a known mistake."""
    for frame_hz, token_hz, tokens, frames in (
        (75, 50, 100, 150),
        (50, 75, 150, 100),
        (100, 12.5, 4, 32),
        (75, 40, 3, 6),
    ):
        space = Blocks(HOP * frame_hz)
        flow = wrapped(build(audio_enc_dec=space, alignment="frames"), semantic_hz=float(token_hz))
        said = ids(tokens)
        assert flow.draw(semantic_token_ids=said, steps=1, method="euler").lengths.tolist() == [frames]
    flow = sounding()
    assert flow.draw(semantic_token_ids=ids(4, 2), steps=1).lengths.tolist() == [10, 5]
    for seconds in ([0.1, 0.3], torch.tensor([0.1, 0.3])):
        assert flow.draw(semantic_token_ids=ids(4, 2), seconds=seconds, steps=1).lengths.tolist() == [5, 15]
    assert flow.draw(semantic_token_ids=ids(4), seconds=torch.tensor(0.1), steps=1).lengths.tolist() == [5]
    durations = torch.tensor([[2, 3, 1], [4, 4, 0]])
    found = flow.draw(phoneme_ids=ids(3, 2), phoneme_durations=durations, steps=1)
    assert found.lengths.tolist() == [6, 8]


def test_a_predictor_says_how_long_a_text_lasts(tmp_path: Path) -> None:
    space, tokenizer = Blocks(), CharacterTokenizer("abcdefgh ")
    sizes = {"dim": 12, "depth": 1, "heads": 2, "dim_head": 6, "dim_phoneme_emb": 6, "conv_pos_embed_kernel_size": 3}
    predictor = DurationPredictor(tokenizer=tokenizer, **sizes).eval()
    torch.nn.init.normal_(predictor.to_duration.weight, std=0.3)
    texts = ["a bad face", "cab"]
    frames = predictor.predict(texts=texts, frame_hz=HZ / HOP)
    for alignment in ("free", "frames"):
        known = {"num_cond_tokens": tokenizer.num_tokens}
        flow = wrapped(
            VoiceBox(audio_enc_dec=space, alignment=alignment, **known, **SIZES), duration_predictor=predictor
        )
        found = flow.draw(texts=texts, steps=1, seed=0)
        assert found.lengths.tolist() == frames.sum(dim=1).tolist()
        if alignment == "frames":
            given = {"phoneme_ids": tokenizer(texts), "phoneme_durations": frames}
            assert torch.equal(flow.draw(**given, steps=1, seed=0).features, found.features)
        by_ids = flow.draw(text_token_ids=tokenizer(texts), steps=1, seed=0)
        assert torch.equal(by_ids.features, found.features)
    flow.save_pretrained(tmp_path / "saved")
    assert torch.equal(load_network(tmp_path / "saved").draw(texts=texts, steps=1, seed=0).features, found.features)
    # One that reads texts in its own way tells the length of a sound, whatever the tokens of the network are.
    other = wrapped(build(audio_enc_dec=space), duration_predictor=predictor, tokenizer=Letters())
    assert other.draw(texts=texts, steps=1).lengths.tolist() == frames.sum(dim=1).tolist()
    with pytest.raises(ValueError, match="knows other tokens"):
        other.draw(text_token_ids=ids(3), steps=1)
    # Nor is it asked where the length is known.
    hidden = torch.arange(9)[None] > 3
    for wish in ({"lengths": 9}, {"seconds": 9 * HOP / HZ}, {"cond": features(1, 9), "cond_mask": hidden}):
        assert other.draw(text_token_ids=ids(3), **wish, steps=1).lengths.tolist() == [9]
    with pytest.raises(ValueError, match="the duration_predictor has 10 tokens"):
        wrapped(build(alignment="frames"), duration_predictor=predictor, tokenizer=Letters())


def test_semantic_tokens_of_texts_and_of_sounds() -> None:
    speaker = stage_with_codec("semantic", options=CONDITIONS["text"])
    space = Blocks()
    flow = wrapped(build(audio_enc_dec=space, alignment="frames"), text_to_semantic=speaker)
    assert flow.semantic_hz == 50.0 and flow.frame_hz == 50.0
    wanted = speaker.generate(text=TEXTS, batch_size=2, max_length=6, seed=3)
    found = flow.draw(texts=TEXTS, max_semantic_token_ids=6, seed=3, steps=1)
    assert torch.equal(found.features, flow.draw(semantic_token_ids=wanted, seed=3, steps=1).features)
    audio = 0.1 * torch.randn(1, 60, generator=seeded())
    heard = wav2vec()(audio, input_sample_hz=HZ)
    assert heard.shape[1] > 1
    assert flow(audio, generator=seeded()) == flow(audio, semantic_token_ids=heard, generator=seeded())
    longer = flow.draw(texts=TEXTS[:1], cond=audio, max_semantic_token_ids=25, seconds=0.5, seed=3, steps=1)
    assert torch.equal(longer.features[:, :15], space.encode(audio))
    with pytest.raises(ValueError, match="unique_consecutive=False"):
        wrapped(build(audio_enc_dec=space), text_to_semantic=stage_with_codec("semantic", unique_consecutive=True))
    with pytest.raises(ValueError, match="both read texts"):
        wrapped(build(audio_enc_dec=space), text_to_semantic=speaker, tokenizer=Letters())
    with pytest.raises(ValueError, match="semantic_hz=25"):
        wrapped(build(audio_enc_dec=space), text_to_semantic=speaker, semantic_hz=25.0)


def test_what_semantic_tokens_go_on_from_comes_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = stage_with_codec("semantic", options=CONDITIONS["text"])
    flow = wrapped(build(audio_enc_dec=Blocks(), alignment="frames"), text_to_semantic=speaker)
    given: dict[str, Any] = {}
    monkeypatch.setattr(ConditionalFlowMatcherWrapper, "device", torch.device("meta"))
    monkeypatch.setattr(speaker, "generate", lambda **options: given.update(options) or ids(3))
    prime = {"prime_wave": torch.zeros(1, 60), "prime_lengths": torch.tensor([50])}
    flow._semantic(["oh"], prime, None, 6, None)
    assert {given[name].device.type for name in prime} == {"meta"} and given["prime_wave_input_sample_hz"] == HZ
    flow._semantic(["oh"], {"prime_wave": torch.zeros(1, 60), "prime_lengths": None}, None, 6, None)
    assert given["prime_wave"].device.type == "meta"


def test_sounds_without_any_condition() -> None:
    for flow in (wrapped(), wrapped(build(condition_on_text=False))):
        found = flow.draw(lengths=[5, 3], steps=2, seed=0)
        assert isinstance(found, Drawn) and found.features.shape == (2, 5, FEATURES) and found.hidden.sum() == 8
        guided = flow.draw(lengths=[5, 3], steps=2, seed=0, cond_scale=2.0)
        assert torch.equal(guided.features, found.features)
        assert flow.draw(lengths=4, batch_size=3, steps=1).features.shape == (3, 4, FEATURES)
    prompted = wrapped(build(condition_on_text=False))
    given = {"cond": features(1, 2), "lengths": 5, "steps": 2, "seed": 0}
    assert (prompted.draw(**given).features - prompted.draw(**given, cond_scale=2.0).features).abs().max() > 1e-3
    loss = prompted(features(), generator=seeded())
    assert loss.isfinite()


def test_what_is_padded_does_not_change_what_is_made() -> None:
    """The noise of a seed depends on the batch; the velocity must not."""

    class Quiet(VoiceBox):
        def velocity(self, prepared: Prepared, x: Tensor, times: Tensor) -> Tensor:
            return super().velocity(prepared, x * 0, times)

    torch.manual_seed(0)
    flow = wrapped(Quiet(num_cond_tokens=TOKENS, dim_in=FEATURES, **SIZES))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    said, steps = ids(3, 2), {"steps": 2, "seed": 0}
    noise = torch.randn(2, 7, FEATURES, generator=seeded())
    together = flow.draw(text_token_ids=said, lengths=[7, 4], **steps).features - noise
    alone = flow.draw(text_token_ids=said[1:, :2], lengths=4, **steps).features
    alone = alone - torch.randn(1, 4, FEATURES, generator=seeded())
    torch.testing.assert_close(together[1:, :4], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text_token_ids": ids(3)}, "how long shall it be"),
        ({"text_token_ids": ids(3), "phoneme_ids": ids(3), "lengths": 5}, "give one of text_token_ids and phoneme_ids"),
        ({"text_token_ids": ids(6), "lengths": 5}, "6. tokens cannot be said in .5. frames"),
        ({"texts": ["a"], "lengths": 5}, "no tokenizer"),
        ({"lengths": 5, "seconds": 1.0}, "not both"),
        ({"lengths": 0}, "at least 1"),
        ({"seconds": 1.0}, "without an audio_enc_dec"),
        ({"cond": features(1, 5), "lengths": 5}, "not longer than their prompts"),
        ({"cond_mask": torch.ones(1, 3, dtype=torch.bool), "lengths": 5}, "give cond"),
        (
            {"cond": features(1, 5), "cond_mask": torch.ones(1, 3, dtype=torch.bool)},
            "cond_mask has 3 frames, and cond 5",
        ),
        ({"cond": features(2, 2), "lengths": [5, 5, 5]}, "cond: 2 cannot belong to 3"),
        ({"lengths": 5, "method": "heun"}, "method='heun'"),
        ({"lengths": 5, "guidance_interval": (0.5, 0.2)}, "guidance_interval"),
        ({"lengths": 5, "steps": 0}, "steps=0"),
        ({"lengths": 5, "cond_scale": float("inf")}, "cond_scale=inf must be a finite number"),
        ({"lengths": 5, "atol": float("nan")}, "atol=nan must be a finite number"),
        ({"lengths": 5, "step": 3}, "sample has no option 'step': did you mean steps?"),
        ({"text_token_ids": ids(3) + TOKENS, "lengths": 5}, "text_token_ids has .*, and this VoiceBox knows 0 to 10"),
        ({"cond": features(1, 5), "cond_mask": torch.ones(1, 5)}, "cond_mask is of torch.float32: give bools"),
        (
            {"cond": torch.zeros(40), "lengths": 5},
            r"cond has the shape \[40\]: give waves \[b, n\], one of them as wave\[None\]",
        ),
        ({"cond": torch.zeros(1, 40, dtype=torch.int16), "lengths": 5}, "audio comes as int16: .*samples are / 32768"),
        ({"cond": features(1, 3) * float("nan"), "lengths": 5}, "cond has values that are infinite or not numbers"),
        (
            {"phoneme_ids": ids(3), "phoneme_durations": torch.ones(1, 3)},
            "phoneme_durations are of torch.float32: give whole",
        ),
        (
            {"cond": torch.zeros(1, 2, 40), "lengths": 5},
            f"features of 40 numbers a frame, and this VoiceBox takes {FEATURES} .dim_in.; waves are .b, n., one channel",
        ),
    ],
)
def test_wrong_wishes_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrapped().draw(**given)
