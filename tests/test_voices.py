"""`benchmarks/voices.py`: which tokens stand where, when utterances are joined."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from helicon.models.voicebox.text import CharacterTokenizer

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def voices(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    import voices  # type: ignore[import-not-found]

    for name in set(sys.modules) - before:  # the scripts' short names are free again afterwards
        if str(SCRIPTS) in str(getattr(sys.modules[name], "__file__", "")):
            monkeypatch.delitem(sys.modules, name)
    return voices


def test_tokens_of_joined_utterances_stay_in_their_own_frames(voices: ModuleType) -> None:
    slow, quick = (
        voices.Utterance(text, text, "voice", torch.zeros(1), torch.zeros(frames, 80))
        for text, frames in (("ab", 60), ("cdefgh", 24))
    )
    (one,) = [one for one in voices.joined([slow, quick], 20, 1.4) if one.text == "ab cdefgh"][:1]
    tokenizer = CharacterTokenizer("abcdefgh ")
    batch = voices.batch_of([one, quick], tokenizer)
    assert batch["phonemes"][0].tolist() == tokenizer(["ab cdefgh"])[0].tolist()
    assert batch["phonemes"][1].tolist() == [*tokenizer(["cdefgh"])[0].tolist(), -1, -1, -1]
    assert batch["durations"][0, :3].sum().item() == pytest.approx(slow.seconds)  # with the space
    assert batch["durations"][0, 3:].sum().item() == pytest.approx(quick.seconds)
    assert batch["durations"][1].sum().item() == pytest.approx(quick.seconds)
    assert voices.batch_of([one])["texts"] == ["ab cdefgh"]
