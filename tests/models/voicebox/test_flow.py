"""How a flow learns."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helicon.models.voicebox.flow import Randomness
from helicon.models.voicebox.model import VoiceBox, stretched
from helicon.models.voicebox.text import CharacterTokenizer
from helicon.nn.network import load_network
from models.voicebox.flows import (
    MEAN,
    STD,
    Best,
    Letters,
    N,
    Still,
    features,
    ids,
    known,
    seeded,
    sounding,
    wrapped,
)
from models.voicebox.test_model import FEATURES, KINDS, SIZES, TOKENS, build
from off_host import OffHost


class Noted(VoiceBox):
    """Keeps what it was called with."""

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        self.given = {"x": x, **given}
        return super().forward(x, **given)


def test_the_context_is_the_clean_sound_and_the_target_the_path() -> None:
    """Not the flow target, of which the noise is a part: a known mistake."""
    sigma = 0.1
    part = {"p_drop_prob": 0.0, "frac_lengths_mask": (0.5, 0.6)}
    flow = wrapped(Noted(num_cond_tokens=TOKENS, dim_in=FEATURES, **part, **SIZES), sigma=sigma).eval()
    x1 = features()
    flow.fit_normalisation(features(9, 11) * 3 + 1)
    lots = flow.randomness(x1, generator=seeded())
    flow(x1, text_token_ids=ids(3, 2), randomness=lots)
    given, clean, t = flow.voicebox.given, flow.normalise(x1), lots.times[:, None, None]
    assert torch.equal(given["cond"], clean) and torch.equal(given["cond_mask"], lots.hidden)
    torch.testing.assert_close(given["target"], clean - 0.9 * lots.noise)
    torch.testing.assert_close(given["x"], (1 - 0.9 * t) * lots.noise + t * clean)
    seen = given["cond"][~given["cond_mask"]]
    assert len(seen) and torch.equal(seen, clean[~lots.hidden])
    other = lots._replace(noise=-lots.noise)
    flow(x1, text_token_ids=ids(3, 2), randomness=other)
    assert torch.equal(flow.voicebox.given["cond"], clean)  # no noise in it
    flow(x1, text_token_ids=ids(3, 2), cond=-x1, randomness=other)
    assert torch.equal(flow.voicebox.given["cond"], flow.normalise(-x1))


@torch.no_grad()
def test_the_loss_of_gaussians_is_what_it_must_be() -> None:
    x1 = MEAN + STD * features(200, 40)
    for sigma in (0.0, 0.3):
        loss = known(Still, sigma=sigma)(x1, generator=seeded())
        assert loss.item() == pytest.approx(MEAN**2 + STD**2 + (1 - sigma) ** 2, rel=0.02)
    # The best that can be: its error at t is STD^2 / ((1 - t)^2 + t^2 STD^2), of which the integral is STD pi / 2.
    loss = known(Best)(x1 - MEAN, generator=seeded())
    assert loss.item() == pytest.approx(STD * math.pi / 2, rel=0.02)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
@torch.no_grad()
def test_a_batch_of_unequal_lengths_is_each_sound_alone(options: dict[str, Any]) -> None:
    flow, lengths, said = wrapped(build(**options)), (7, 4), (3, 2)
    x1 = features()
    is_frame = torch.arange(7) < torch.tensor(lengths)[:, None]
    lots = flow.randomness(x1, is_frame, generator=seeded())
    tokens = {"text_token_ids": ids(*said)} if flow.voicebox.condition_on_text else {}
    nan = x1.masked_fill(~is_frame[..., None], float("nan"))
    together = flow(nan, lengths=torch.tensor(lengths), **tokens, randomness=lots)
    assert together == flow(nan, mask=is_frame, **tokens, randomness=lots)
    total = torch.tensor(0.0)
    for row, length in enumerate(lengths):
        noise, times, hidden, keep = (part[row : row + 1] for part in lots)
        own = Randomness(noise[:, :length], times, hidden[:, :length], keep)
        given = {name: value[row : row + 1, : said[row]] for name, value in tokens.items()}
        total += own.num_hidden * flow(x1[row : row + 1, :length], **given, randomness=own)
    torch.testing.assert_close(together, total / lots.num_hidden, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_waves_and_their_features_give_the_same_loss() -> None:
    flow = sounding()
    audio, lengths = torch.randn(2, 30, generator=seeded()), torch.tensor([30, 17])
    frames, counts = flow.features(audio, lengths)
    assert frames.shape == (2, 8, FEATURES) and counts.tolist() == [8, 5]
    assert flow.features(audio)[1].tolist() == [8, 8]
    given = {"semantic_token_ids": ids(3, 2)}
    of_waves = flow(audio, lengths=lengths, **given, generator=seeded())
    assert of_waves == flow(frames, lengths=counts, **given, generator=seeded())
    assert of_waves != flow(audio, **given, generator=seeded())


def test_validation_repeats_itself_and_changes_no_mode() -> None:
    flow = wrapped(build(ff_dropout=0.5))
    given = {"x1": features(), "text_token_ids": ids(3, 2)}
    for mode in (False, True):
        flow.train(mode)
        before = [module.training for module in flow.modules()]
        losses = [flow(**given, generator=seeded()) for _ in range(2)]
        assert (losses[0] == losses[1]) == (not mode)  # dropout alone is not the generator's
        flow.draw(**{"text_token_ids": ids(3, 2)}, lengths=N, steps=1)
        assert [module.training for module in flow.modules()] == before
    flow.train()
    made = [flow.draw(text_token_ids=ids(3, 2), lengths=N, steps=1, seed=0).features for _ in range(2)]
    assert torch.equal(*made)  # nothing drops out while it speaks
    flow.eval()
    state = torch.get_rng_state()
    flow(**given, generator=seeded())
    assert torch.equal(state, torch.get_rng_state())
    assert flow(**given, generator=seeded()) != flow(**given, generator=seeded(1))


def test_what_is_random_is_drawn_as_it_should_be() -> None:
    flow = wrapped(build(p_drop_prob=0.0, frac_lengths_mask=(0.5, 0.5)), cond_drop_prob=0.2).train()
    x1, is_frame = torch.zeros(4000, 10, FEATURES), torch.arange(10) < torch.tensor([10, 6])[:, None].repeat(2000, 1)
    lots = flow.randomness(x1, is_frame, generator=seeded())
    assert (~lots.keep).float().mean().item() == pytest.approx(0.2, abs=0.02)
    assert torch.equal(lots.hidden[~lots.keep], is_frame[~lots.keep])  # nothing is given to them
    assert torch.equal(lots.hidden[lots.keep].sum(dim=1), is_frame[lots.keep].sum(dim=1) // 2)
    assert lots.num_hidden == lots.hidden.sum() and not (lots.hidden & ~is_frame).any()
    ordered = lots.times.sort().values * 4000
    assert torch.equal(ordered.floor(), torch.arange(4000.0))  # one in each of as many strata
    assert not torch.equal(lots.times, lots.times.sort().values)
    assert lots.noise.mean().abs() < 0.01 and lots.noise.std().item() == pytest.approx(1, abs=0.01)
    assert flow.eval().randomness(x1, generator=seeded()).keep.all()  # validation always has the condition
    assert not flow.randomness(x1, cond_drop_prob=1.0).keep.any()
    given = flow.randomness(x1, is_frame, cond_mask=torch.ones(4000, 10, dtype=torch.bool), generator=seeded())
    assert torch.equal(given.hidden, is_frame)


def test_guidance_is_learned_unless_someone_says_otherwise() -> None:
    flow = wrapped().train()
    keep = flow.randomness(torch.zeros(2000, 1, FEATURES), generator=seeded()).keep
    assert (~keep).float().mean().item() == pytest.approx(0.2, abs=0.03)


def test_no_step_of_learning_waits_for_the_device() -> None:
    flow = wrapped(build(alignment="frames")).train()
    phonemes, frames = ids(3, 2), torch.tensor([[2, 3, 2], [1, 3, 9]])
    given = {"phoneme_ids": phonemes, "phoneme_durations": frames, "lengths": torch.tensor([7, 4])}
    with OffHost():
        flow(features(), **given, generator=seeded()).backward()


def test_half_precision_keeps_the_loss_in_single() -> None:
    flow = wrapped()
    given = {"x1": features(), "text_token_ids": ids(3, 2)}
    exact = flow(**given, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        loss = flow(**given, generator=seeded())
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=0.03)


@torch.no_grad()
def test_phonemes_with_durations_are_frames_of_tokens_and_read_as_those_without() -> None:
    """Those with durations were refined among repetitions of themselves, and those without were not: a network that had learned from the
    former understood nothing of the latter."""
    flow = wrapped(build(alignment="frames"))
    lots = flow.randomness(features(), generator=seeded())
    phonemes, durations = torch.tensor([[4, 2, 9], [7, 1, -1]]), torch.tensor([[2, 1, 4], [4, 3, 0]])
    spread = torch.tensor([[4, 4, 2, 9, 9, 9, 9], [7, 7, 7, 7, 1, 1, 1]])
    found = flow(features(), phoneme_ids=phonemes, phoneme_durations=durations, randomness=lots)
    torch.testing.assert_close(found, flow(features(), phoneme_ids=spread, randomness=lots))
    without = flow(features(), phoneme_ids=phonemes, randomness=lots)
    assert found != without
    even = torch.tensor([[2, 3, 2], [3, 4, 0]])
    found = flow(features(), phoneme_ids=phonemes, phoneme_durations=even, randomness=lots)
    torch.testing.assert_close(found, without)


def test_features_are_standardised_and_that_is_saved(tmp_path: Path) -> None:
    flow = wrapped()
    raw, is_frame = features(20, 30) * 4 + torch.arange(FEATURES), torch.rand(20, 30) < 0.5
    raw[..., 2] = 1.5  # never changes
    flow.fit_normalisation(raw.masked_fill(~is_frame[..., None], float("nan")), is_frame)
    real = flow.normalise(raw)[is_frame]
    expected = torch.ones(FEATURES)
    expected[2] = 0
    torch.testing.assert_close(real.mean(dim=0), torch.zeros(FEATURES), atol=1e-5, rtol=0)
    torch.testing.assert_close(real.std(dim=0, correction=0), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(flow.denormalise(flow.normalise(raw)), raw, atol=1e-5, rtol=1e-5)
    flow.save_pretrained(tmp_path / "saved")
    loaded = load_network(tmp_path / "saved")
    assert torch.equal(loaded.feature_std, flow.feature_std) and torch.equal(loaded.feature_mean, flow.feature_mean)
    with pytest.raises(ValueError, match="finite"):
        flow.fit_normalisation(raw * float("inf"))


COMPILED = """
import torch
from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.model import VoiceBox
torch.manual_seed(0)
sizes = dict(dim=16, depth=2, heads=2, dim_head=8, num_register_tokens=2, dim_cond_emb=8, text_depth=1)
flow = ConditionalFlowMatcherWrapper(VoiceBox(num_cond_tokens=7, dim_in=5, **sizes))
x1, ids, lengths = torch.randn(2, 9, 5), torch.randint(7, (2, 4)), torch.tensor([9, 6])
lots = flow.randomness(x1, torch.arange(9) < lengths[:, None])
given = dict(lengths=lengths, text_token_ids=ids, randomness=lots)
whole = torch.compile(flow, fullgraph=True, backend="eager")
assert torch.allclose(whole(x1, **given), flow(x1, **given), atol=1e-5)
"""


@pytest.mark.slow
def test_a_pass_is_one_graph() -> None:
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


def test_lengths_may_be_a_list() -> None:
    flow, given = wrapped(), {"text_token_ids": ids(3, 2)}
    lots = flow.randomness(features(), torch.arange(N) < torch.tensor([[7], [4]]), generator=seeded())
    expected = flow(features(), lengths=torch.tensor([7, 4]), **given, randomness=lots)
    assert torch.equal(flow(features(), lengths=[7, 4], **given, randomness=lots), expected)
    said = {"cond": features(2, 3), "lengths": [7, 5], "seed": 0, "steps": 1}
    drawn = flow.draw(cond_lengths=[3, 1], **given, **said).features
    assert torch.equal(drawn, flow.draw(cond_lengths=torch.tensor([3, 1]), **given, **said).features)


def test_wrong_batches_and_arguments_are_named() -> None:
    flow, x1 = wrapped(), features()
    with pytest.raises(ValueError, match="learns what is said"):
        flow(x1)
    with pytest.raises(ValueError, match="not both"):
        flow(x1, mask=torch.ones(2, N, dtype=torch.bool), lengths=torch.tensor([7, 7]), text_token_ids=ids(3, 2))
    with pytest.raises(ValueError, match='alignment="frames"'):
        flow(x1, phoneme_ids=ids(3, 2), phoneme_durations=ids(3, 2).clamp(min=0))
    with pytest.raises(ValueError, match="belong to phoneme_ids"):
        flow(x1, text_token_ids=ids(3, 2), phoneme_durations=ids(3, 2).clamp(min=0))
    with pytest.raises(ValueError, match="what is said: 1 cannot belong to 2 sounds: give one for each"):
        wrapped(tokenizer=Letters())(x1, texts=["a bad face"])
    with pytest.raises(ValueError, match="cond has 5 frames, and x1 7"):
        flow(x1, text_token_ids=ids(3, 2), cond=features(2, 5))
    with pytest.raises(ValueError, match="num_cond_tokens=11"):
        wrapped(tokenizer=CharacterTokenizer("abc "))
    with pytest.raises(ValueError, match="cond_drop_prob=1"):
        wrapped(cond_drop_prob=1.0)
    with pytest.raises(ValueError, match="sigma=1"):
        wrapped(sigma=1.0)
    with pytest.raises(ValueError, match="torchode is not used"):
        wrapped(torchode_method_klass=int)
    with pytest.raises(ValueError, match="no codes"):
        sounding().sample(lengths=3, decode_to_codes=True)
    with pytest.raises(ValueError, match="without audio_enc_dec has no codes"):
        flow.sample(lengths=3, decode_to_codes=True)
    with pytest.raises(
        ValueError, match=r"without an audio_enc_dec to know .* or give features, and lengths in frames"
    ):
        flow.sample(seconds=3)


def spoken(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Three to six tokens in 18 to 24 frames, each a place among the features, in one of many voices (a shift of all frames)."""
    places = 3 * torch.nn.functional.normalize(torch.randn(6, 8, generator=seeded()), dim=-1)
    count, lengths = (
        torch.randint(3, 7, (rows,), generator=generator),
        torch.randint(18, 25, (rows,), generator=generator),
    )
    tokens = torch.randint(6, (rows, 6), generator=generator).masked_fill(torch.arange(6) >= count[:, None], -1)
    said = tokens.gather(1, stretched(count, lengths, 24))
    voice = 0.5 * torch.randn(rows, 1, 8, generator=generator)
    noise = 0.1 * torch.randn(rows, 24, 8, generator=generator)
    return {
        "x1": places[said] + voice + noise,
        "lengths": lengths,
        "text_token_ids": tokens,
        "said": said,
        "places": places,
    }


@pytest.mark.slow
def test_it_learns_to_say_what_is_written() -> None:
    """After 60 steps 96 % of all frames, and with guidance all, are nearest to the token they should be, of six."""
    torch.manual_seed(0)
    sizes = {
        "dim": 32,
        "depth": 2,
        "heads": 2,
        "dim_head": 16,
        "dim_cond_emb": 32,
        "time_hidden_dim": 32,
        "text_depth": 1,
    }
    network = VoiceBox(num_cond_tokens=6, dim_in=8, alignment="frames", conv_pos_embed_kernel_size=7, **sizes)
    flow, generator = wrapped(network), seeded(1)
    flow.fit_normalisation(spoken(256, generator)["x1"])
    optimizer = torch.optim.AdamW(flow.parameters(), lr=5e-3, betas=(0.9, 0.99))
    for _ in range(60):
        batch = {name: value for name, value in spoken(32, generator).items() if name not in ("said", "places")}
        optimizer.zero_grad()
        flow(**batch, generator=generator).backward()
        torch.nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
        optimizer.step()
    test = spoken(64, seeded(2))
    wish = {"lengths": test["lengths"], "steps": 8, "seed": 0}

    def right(**options: Any) -> float:
        made = flow.draw(**wish, **options)
        nearest = torch.cdist(made.features, test["places"].expand(64, -1, -1)).argmin(dim=-1)
        return (nearest == test["said"])[made.hidden].float().mean().item()

    said = {"text_token_ids": test["text_token_ids"]}
    plain, guided, nothing = right(**said), right(**said, cond_scale=2.0), right()
    assert plain > 0.9 and guided > 0.97 and guided > plain and nothing < 0.3
