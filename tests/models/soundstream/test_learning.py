"""A tiny codec really learns a few sounds: with its default losses, and an adversary for the second half."""

import math

import pytest
import torch
from torch import Tensor

from helicon.models.soundstream.model import SoundStream
from helicon.models.soundstream.trainers import SoundStreamTrainer

HZ = 8000


class Voices(torch.utils.data.Dataset):
    """Half a second each of something like a sung vowel: harmonics of a wavering pitch, and a little breath."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        time = torch.arange(HZ // 2) / HZ
        pitch = (90 + 15 * index) * (1 + 0.03 * torch.sin(2 * math.pi * (4 + index % 3) * time))
        phase = 2 * math.pi * pitch.cumsum(0) / HZ
        harmonics = [torch.sin(k * phase + k) / k for k in range(1, 9)]
        envelope = torch.sin(math.pi * time * 2).clamp(min=0) ** 0.5
        return 0.2 * envelope * torch.stack(harmonics).sum(0) + 0.003 * torch.randn(len(time), generator=generator)


@pytest.mark.slow
def test_a_handful_of_sounds_is_learned_wave_and_spectrum():
    torch.manual_seed(0)
    codec = SoundStream(
        channels=8,
        strides=(4, 5),
        channel_mults=(4, 12),
        codebook_dim=48,
        codebook_size=64,
        rq_num_quantizers=6,
        enc_cycle_dilations=(1, 3),
        dec_cycle_dilations=(1, 3),
        attn_heads=2,
        attn_dim_head=16,
        attn_window_size=16,
        target_sample_hz=HZ,
        multi_spectral_window_powers_of_two=(6, 8, 10),
        multi_spectral_n_mels=(8, 32, 80),
        discr_periods=(2, 3),
        discr_windows=(256,),
        discr_channels=4,
    )
    trainer = SoundStreamTrainer(
        codec,
        dataset=Voices(),
        val_dataset=Voices(),
        num_train_steps=200,
        batch_size=8,
        grad_accum_every=1,
        optimizer="muon",
        lr=3e-3,
        warmup_steps=10,
        scheduler="cosine",
        max_grad_norm=1.0,
        discr_start_step=100,
        apply_grad_penalty_every=0,
        ema_beta=0.9,
        ema_update_after_step=0,
        ema_update_every=1,
        save_results_every=1000,
        save_model_every=1000,
        tensorboard=False,
        results_folder="run",
    )
    before = trainer.validate()
    trainer.train()
    after = trainer.validate()
    assert before["valid_si_sdr"] < -10 and before["valid_log_mel_distance"] > 1.5
    assert after["valid_si_sdr"] > 15, "decibels"
    assert after["valid_log_mel_distance"] < 0.6
    assert after["valid_codebook_use"] > 0.9
