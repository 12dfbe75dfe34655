from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from helicon.models.musiclm.mulan import MuLaN
from helicon.models.musiclm.pretrained import (
    PretrainedAudioTransformer,
    PretrainedSpectrogramEncoder,
    PretrainedTextTransformer,
)
from helicon.models.musiclm.towers import AudioSpectrogramTransformer, TextTransformer
from helicon.models.text import PretrainedTextEncoder
from helicon.nn.network import load_network
from models.musiclm.tiny import HZ, audio_tower, padded, text_tower
from models.text.test_pretrained import bert, write_tokenizer

TEXTS = ["a red circle", "", "été", "a green square on a red paper"]


def write_ast(folder: Path, seed: int = 0) -> Path:
    """A tiny AST of 40 frames and 16 bands: 2 x 5 patches of 8 x 8."""
    config = transformers.ASTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=20,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        max_length=40,
        num_mel_bins=16,
    )
    torch.manual_seed(seed)
    model = transformers.ASTModel(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    transformers.ASTFeatureExtractor(num_mel_bins=16, max_length=40).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("samples", [6640, 3000])
def test_a_pretrained_ast_is_what_transformers_makes_of_it(tmp_path, samples):
    folder = write_ast(tmp_path / "ast")
    encoder = PretrainedSpectrogramEncoder(folder)
    assert encoder.max_samples == 6640
    wave = torch.randn(samples) * 0.1
    extractor = transformers.ASTFeatureExtractor.from_pretrained(folder)
    values = extractor(wave.numpy(), sampling_rate=16000, return_tensors="pt").input_values
    with torch.no_grad():
        states = transformers.ASTModel.from_pretrained(folder).eval()(values).last_hidden_state[0, 2:]
    columns, mask = encoder.encode(wave[None])
    torch.testing.assert_close(columns[0], states.unflatten(0, (2, 5)).mean(dim=0), atol=1e-3, rtol=1e-3)
    assert mask.tolist() == [[True] * (5 if samples == 6640 else 3) + [False] * (0 if samples == 6640 else 2)]


def test_a_pretrained_audio_tower(tmp_path):
    folder = write_ast(tmp_path / "ast")
    tower = PretrainedAudioTransformer(PretrainedSpectrogramEncoder(folder), 12, dim_head=4, heads=2).eval()
    assert tower.sample_hz == 16000 and not any("encoder" in name for name, _ in tower.named_parameters())
    clips, lengths = torch.randn(3, 6000), torch.tensor([6000, 2500, 5])
    together, layers = tower(padded(clips, lengths), lengths=lengths, return_all_layers=True)
    assert layers.shape == (1, 3, 12)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(together[row], tower(clips[row : row + 1, :length])[0], atol=1e-5, rtol=1e-5)
    assert (together[0] - together[1]).abs().max() > 1e-3
    tower.save(tmp_path / "tower")
    assert load_network(tmp_path / "tower")(clips).equal(tower(clips))
    with pytest.raises(ValueError, match=r"7000 samples is longer than the 40 frames.*cut it to 6640"):
        tower(torch.randn(1, 7000))
    with pytest.raises(ValueError, match="PretrainedTextTransformer stands on a PretrainedTextEncoder, not on"):
        PretrainedTextTransformer(tower.encoder, 12)
    write_ast(folder, seed=1)
    with pytest.raises(ValueError, match="not the one this was saved with"):
        load_network(tmp_path / "tower")


def test_a_pretrained_text_tower(tmp_path):
    folder = tmp_path / "bert"
    torch.manual_seed(0)
    bert().save_pretrained(folder)
    write_tokenizer(folder)
    tower = PretrainedTextTransformer(PretrainedTextEncoder(folder), 12, dim_head=4, heads=2).eval()
    texts = ["a red circle", "a green square on a red paper"]
    together = tower(raw_texts=texts)
    assert not any("encoder" in name for name, _ in tower.named_parameters())
    for row, text in enumerate(texts):
        torch.testing.assert_close(together[row], tower(raw_texts=[text])[0], atol=1e-5, rtol=1e-5)
    read = tower.read_texts(texts, multiple_of=16)
    assert read["x"].shape == (2, 16, 16)
    torch.testing.assert_close(tower(**read), together)
    assert tower(raw_texts=texts, return_all_layers=True)[1].shape == (1, 2, 12)
    tower.save(tmp_path / "tower")
    assert load_network(tmp_path / "tower")(raw_texts=texts).equal(together)
    model, ids = MuLaN(audio_tower(), tower), torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(
        ValueError, match="a PretrainedTextTransformer takes embeddings, not ids of tokens: give strings"
    ):
        model(torch.zeros(2, 900), ids)
    with pytest.raises(ValueError, match="a TextTransformer takes ids of tokens, not embeddings: give strings as raw"):
        MuLaN(audio_tower(), text_tower()).get_text_latents(read["x"])


def test_towers_take_the_arguments_users_know():
    """By place, as far as the reference packages have them."""
    audio = AudioSpectrogramTransformer(
        16, 1, 8, 8, 2, 0.0, 4, 0.0, False, True, 256, 2, 200, 80, sample_hz=HZ, n_mels=32
    )
    text = TextTransformer(16, 1, 100, 20, 8, 2, 0.0, 0.0, 4, 1)
    assert audio.log_mel.n_fft == 256 and audio.dim == text.dim == 16 and text.pad_id == 1 and text.max_seq_len == 20
