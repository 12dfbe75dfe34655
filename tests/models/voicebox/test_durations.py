import pytest
import torch

import helicon
from helicon.models.voicebox.durations import USUAL, DurationPredictor, frames_of
from helicon.models.voicebox.features import MelVoco
from helicon.models.voicebox.text import PhonemeInventory

SMALL = {"dim_phoneme_emb": 12, "dim": 16, "depth": 2, "dim_head": 8, "heads": 2, "conv_pos_embed_kernel_size": 5}


def predictor(**changes):
    torch.manual_seed(0)
    network = DurationPredictor(**{"num_phoneme_tokens": 7, **SMALL, **changes}).eval()
    torch.nn.init.normal_(network.to_duration.weight)  # (it starts at zero, where everything lasts the same)
    return network


def phonemes(*lengths):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(7, (length,), generator=generator) for length in lengths]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def seconds(ids):
    found = 0.03 + 0.3 * torch.rand(ids.shape, generator=torch.Generator().manual_seed(2))
    return found.masked_fill(ids < 0, 0.0)


def test_before_learning_everything_lasts_the_usual_time():
    network = DurationPredictor(num_phoneme_tokens=7, **SMALL)
    assert network.predict_seconds(phonemes(3, 5)).tolist()[1] == pytest.approx([USUAL] * 5)


def test_evaluation_is_the_same_twice_even_with_dropout():
    network, ids = predictor(ff_dropout=0.5, attn_dropout=0.5), phonemes(4, 6)
    target = seconds(ids)
    first = network(phoneme_ids=ids, target=target)
    assert first == network(phoneme_ids=ids, target=target)
    network.train()
    assert torch.equal(network.predict_seconds(ids), network.predict_seconds(ids)) and network.training
    assert network(phoneme_ids=ids, target=target) != network(phoneme_ids=ids, target=target)


def test_padding_changes_nothing():
    network, ids = predictor(), phonemes(3, 9, 6)
    target = seconds(ids)
    together = network.predict_seconds(ids)
    assert together[ids < 0].eq(0).all()
    for row, count in enumerate((3, 9, 6)):
        alone = network.predict_seconds(ids[row : row + 1, :count])
        torch.testing.assert_close(together[row : row + 1, :count], alone, rtol=1e-5, atol=1e-6)
    spoiled = target.masked_fill(ids < 0, torch.nan)
    hidden = torch.zeros_like(ids, dtype=torch.bool)
    hidden[:, :2] = True
    loss = network(phoneme_ids=ids, target=spoiled, cond_mask=hidden)
    losses = [
        network(
            phoneme_ids=ids[row : row + 1, :count],
            target=target[row : row + 1, :count],
            cond_mask=hidden[row : row + 1, :count],
        )
        for row, count in enumerate((3, 9, 6))
    ]
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)  # two hidden in each


def test_the_loss_is_the_error_of_hidden_logarithms():
    network, ids = predictor(), phonemes(5, 5)
    target = seconds(ids)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[0, 1:3] = hidden[1, 4] = True
    found = network(phoneme_ids=ids, cond=target, cond_mask=hidden)
    expected = (found.log() - target.log()).abs()[hidden].mean()
    torch.testing.assert_close(network(phoneme_ids=ids, target=target, cond_mask=hidden), expected)
    everything = network(phoneme_ids=ids, target=target)  # in evaluation all are hidden
    torch.testing.assert_close(everything, (network.predict_seconds(ids).log() - target.log()).abs().mean())


def test_known_durations_are_context_and_hidden_ones_are_not():
    network, ids = predictor(), phonemes(6)
    known = seconds(ids)
    hidden = torch.tensor([[False, False, True, True, False, False]])
    first = network(phoneme_ids=ids, cond=known, cond_mask=hidden)
    torch.testing.assert_close(network(phoneme_ids=ids, cond=torch.where(hidden, 9.0, known), cond_mask=hidden), first)
    other = network(phoneme_ids=ids, cond=torch.where(hidden, known, 2 * known), cond_mask=hidden)
    assert (other - first).abs()[hidden].min() > 1e-4
    kept = network.predict_seconds(ids, cond=known, cond_mask=hidden)
    assert torch.equal(kept[~hidden], known[~hidden])
    torch.testing.assert_close(kept[hidden], first[hidden])
    dropped = network(phoneme_ids=ids, cond=known, cond_mask=hidden, cond_drop_prob=1.0)
    torch.testing.assert_close(dropped, network(phoneme_ids=ids))
    with pytest.raises(ValueError, match="which durations of cond are known"):
        network(phoneme_ids=ids, cond=known)


def test_guidance_goes_beyond_what_is_known():
    network, ids = predictor(), phonemes(6)
    known, hidden = seconds(ids), torch.arange(6)[None] >= 3
    inputs = {"phoneme_ids": ids, "cond": known, "cond_mask": hidden}
    knowing, unknowing = network(**inputs).log(), network(phoneme_ids=ids).log()
    led = network.forward_with_cond_scale(cond_scale=3.0, **inputs)
    torch.testing.assert_close(led.log(), unknowing + 3 * (knowing - unknowing))
    assert (led.log() - knowing).abs().max() > 0.01
    assert torch.equal(network.forward_with_cond_scale(**inputs).log(), knowing)


def test_what_is_hidden_while_learning():
    network = predictor(p_drop_prob=0.25, frac_lengths_mask=(0.2, 0.6))
    is_phoneme = torch.arange(40)[None] < torch.tensor([20, 40])[:, None].repeat(1000, 1)
    hidden = network.draw_hidden(is_phoneme, torch.Generator().manual_seed(0))
    counts, share = is_phoneme.sum(dim=1), hidden.sum(dim=1) / is_phoneme.sum(dim=1)
    assert not (hidden & ~is_phoneme).any()
    assert share.eq(1).float().mean().item() == pytest.approx(0.25, abs=0.04)
    spans = share[share < 1]
    assert spans.min() >= 0.2 and spans.max() <= 0.6 and spans.mean().item() == pytest.approx(0.4, abs=0.02)
    assert (hidden.int().diff(dim=1, prepend=torch.zeros(2000, 1)).clamp(min=0).sum(dim=1) == 1).all()  # one run each
    assert counts.unique().tolist() == [20, 40]


@pytest.mark.parametrize("frame_hz", [31.25, 86.1328125, 100.0])
def test_frames_sum_to_the_sum(frame_hz):
    ids = phonemes(3, 8, 5)
    durations = seconds(ids)
    frames = frames_of(durations, frame_hz)
    assert frames[ids < 0].eq(0).all() and (frames >= 0).all()
    assert frames.sum(dim=1).tolist() == [round(float(row.double().sum()) * frame_hz) for row in durations]
    ends, true = frames.cumsum(dim=1), durations.double().cumsum(dim=1) * frame_hz
    assert (ends - true).abs().max() <= 0.5 + 1e-4  # no error adds up


def test_frames_sum_to_a_given_total():
    ids = phonemes(3, 8, 5)
    durations = seconds(ids)
    totals = frames_of(durations, 100.0).sum(dim=1) + torch.tensor([4, 0, -2])
    frames = frames_of(durations, 100.0, totals)
    assert torch.equal(frames.sum(dim=1), totals) and frames[ids < 0].eq(0).all() and (frames >= 0).all()
    assert torch.equal(frames[:, :2], frames_of(durations, 100.0)[:, :2])
    assert frames_of(torch.tensor([[0.1, 5.0, 0.1]]), 10.0, torch.tensor([3])).tolist() == [[1, 2, 0]]


def test_frames_of_phonemes():
    network = predictor()
    ids = torch.tensor([[4, 2, 4, -1], [1, 3, 5, 6]])
    durations = torch.tensor([[2, 0, 1, 0], [1, 1, 3, 1]])
    aligned = network.align_phoneme_ids_with_durations(ids, durations)
    assert aligned.tolist() == [[4, 4, 4, -1, -1, -1], [1, 3, 5, 5, 5, 6]]
    many = torch.randint(0, 5, (6, 30), generator=torch.Generator().manual_seed(0))
    named = torch.arange(30).expand(6, -1)
    found = network.align_phoneme_ids_with_durations(named, many)
    for row, expected in enumerate(named[0].repeat_interleave(counts) for counts in many):
        assert torch.equal(found[row, : len(expected)], expected) and found[row, len(expected) :].eq(-1).all()


def test_texts_and_frames_through_the_stages(tmp_path):
    space = MelVoco(n_mels=20, sampling_rate=8000, n_fft=256, hop_length=80)
    inventory = PhonemeInventory(["a", "b", "c"])
    network = predictor(num_phoneme_tokens=None, tokenizer=inventory, audio_enc_dec=space)
    texts = ["a b c a", "c"]
    found = network.predict(texts=texts)
    assert torch.equal(found, frames_of(network.predict_seconds(texts=texts), 100.0))
    assert torch.equal(found, network.predict(inventory(texts), frame_hz=100.0))
    assert found[1, 1:].eq(0).all() and found[:, 0].gt(0).all()
    network.save_pretrained(tmp_path)
    loaded = helicon.load(tmp_path)
    assert torch.equal(loaded.predict(texts=texts), found)
    assert not any("vocabulary" in name for name in network.own_state())


def test_what_is_missing_or_too_much_is_told():
    with pytest.raises(ValueError, match="how many different phonemes"):
        DurationPredictor(**SMALL)
    with pytest.raises(ValueError, match="num_phoneme_tokens=9 is not the 3 of the tokenizer"):
        DurationPredictor(tokenizer=PhonemeInventory(["a", "b"]), num_phoneme_tokens=9, **SMALL)
    for keyword in ({"aligner_kwargs": {"dim_in": 80}}, {"use_gateloop_layers": True}):
        with pytest.raises(ValueError, match="leave it out"):
            predictor(**keyword)
    network = predictor()
    with pytest.raises(ValueError, match="no tokenizer"):
        network.predict_seconds(texts=["a"])
    with pytest.raises(ValueError, match="Give texts or phoneme_ids"):
        network.predict_seconds()
    with pytest.raises(ValueError, match="how many frames has a second"):
        network.predict(phonemes(2))
    with pytest.raises(ValueError, match="nothing is said"):
        network.predict_seconds(torch.empty(1, 0, dtype=torch.long))


def test_every_weight_learns():
    """In the reference package durations are compared with hidden states, and what makes durations of these learns nothing."""
    network, ids = predictor().train(), phonemes(4, 7)
    network(phoneme_ids=ids, target=seconds(ids)).backward()
    idle = [name for name, weight in network.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert idle == []


def test_half_precision():
    network, ids = predictor().train(), phonemes(4, 7)
    with torch.autocast("cpu", torch.bfloat16):
        loss = network(phoneme_ids=ids, target=seconds(ids))
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
