"""What packages with ears of their own say of speech: how many words they hear wrong, and whose voice they hear.

    pip install moonshine-voice==0.0.64 resemblyzer "setuptools<81"      # (newer versions of the first carry no weights)

A folder holds `sounds.jsonl` with a row for each utterance (`name`, `text`, `voice`) and for each row the sounds `NAME-KIND.flac`: the
"recording", and other kinds of the same utterance.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

Wave = np.ndarray  # [n], float32
Hears = Callable[[Wave], str]
Recognises = Callable[[Wave], np.ndarray]

HZ = 16000
ENGLISH = "-en"  # how the names of voices end that speak it
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def judged(folder: Path) -> list[dict[str, Any]]:
    """Of each kind of sound: the words heard wrong of those that are said (English alone), and how like the voice of the prompt (or, of
    a prompt itself, of the recording) it is, and how like the others."""
    sounds = written(folder)
    heard, recognised = transcriber(), speaker_encoder()
    marks = {key: recognised(wave) for key, wave in sounds.items()}
    rows = [json.loads(line) for line in (folder / "sounds.jsonl").read_text(encoding="utf-8").splitlines()]
    found = []
    for kind in dict.fromkeys(kind for _, kind in sounds):
        of_kind = [row for row in rows if (row["name"], kind) in sounds]
        english = [row for row in of_kind if row["voice"].endswith(ENGLISH) and kind != "prompt"]
        pairs = [(words(row["text"]), words(heard(sounds[row["name"], kind]))) for row in english]
        said = sum(len(true) for true, _ in pairs)
        row = {
            "case": kind,
            "sounds": len(of_kind),
            "words": said or None,
            "word error rate": sum(edits(*pair) for pair in pairs) / said if said else None,
        }
        found.append(row | similarities(kind, of_kind, rows, marks))
    return found


def written(folder: Path) -> dict[tuple[str, str], Wave]:
    """The sounds, by name and kind."""
    found = {}
    for path in sorted(folder.glob("*-*.flac")):
        wave, hz = soundfile.read(path, dtype="float32")
        if hz != HZ:
            raise SystemExit(f"{path} has {hz} samples a second, and these packages hear {HZ}")
        name, _, kind = path.stem.rpartition("-")
        found[name, kind] = wave
    if not found or not (folder / "sounds.jsonl").exists():
        raise SystemExit(f"{folder} holds no sounds NAME-KIND.flac with their sounds.jsonl")
    return found


def similarities(
    kind: str,
    of_kind: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    marks: Mapping[tuple[str, str], np.ndarray],
) -> dict[str, float | None]:
    """The mean cosine to the prompts' voices: to the own one, and to those of other voices."""
    against = "recording" if kind == "prompt" else "prompt"
    values: dict[bool, list[float]] = defaultdict(list)
    for row in of_kind:
        for other in rows:
            is_same = other["voice"] == row["voice"]
            if (other["name"], against) in marks and (not is_same or other["name"] == row["name"]):
                values[is_same].append(float(marks[row["name"], kind] @ marks[other["name"], against]))
    mean = lambda found: float(np.mean(found)) if found else None
    return {"similarity, own voice": mean(values[True]), "similarity, other voices": mean(values[False])}


def transcriber() -> Hears:
    try:
        from moonshine_voice import ModelArch, Transcriber
        from moonshine_voice.utils import get_model_path
    except ImportError:
        raise SystemExit("words are heard by moonshine-voice: pip install moonshine-voice==0.0.64") from None
    model = Transcriber(str(get_model_path("tiny-en")), ModelArch.TINY)
    return lambda wave: " ".join(line.text for line in model.transcribe_without_streaming(wave.tolist(), HZ).lines)


def speaker_encoder() -> Recognises:
    try:
        from resemblyzer import VoiceEncoder, preprocess_wav
    except ImportError:
        raise SystemExit('voices are recognised by resemblyzer: pip install resemblyzer "setuptools<81"') from None
    model = VoiceEncoder("cpu", verbose=False)

    def recognise(wave: Wave) -> np.ndarray:
        spoken = preprocess_wav(wave, source_sr=HZ)  # without its silences
        return model.embed_utterance(spoken if len(spoken) else wave)

    return recognise


def words(text: str) -> list[str]:
    """In small letters, with digits written out, as they are spoken."""
    spelled = re.sub(r"\d", lambda digit: f" {DIGITS[int(digit[0])]} ", text.lower())
    return re.findall(r"[a-z']+", spelled.replace("-", " "))


def edits(true: Sequence[str], heard: Sequence[str]) -> int:
    """How many words have to be put in, taken out or changed, at least."""
    costs = list(range(len(heard) + 1))
    for row, word in enumerate(true, 1):
        before, costs[0] = costs[0], row
        for column, other in enumerate(heard, 1):
            before, costs[column] = (
                costs[column],
                min(costs[column] + 1, costs[column - 1] + 1, before + (word != other)),
            )
    return costs[-1]
