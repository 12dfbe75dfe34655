"""Sound files for the tests of pipelines."""

from pathlib import Path

import soundfile

from helicon.data.synthetic_sounds import SyntheticSounds


def write_sounds(count: int, samples: int = 3200) -> None:
    """Files of 0.4 s in a folder `sounds`, each with its text beside it."""
    Path("sounds").mkdir()
    made_up = SyntheticSounds(count, 8000, 0.5)
    for number in range(count):
        soundfile.write(f"sounds/{number}.wav", made_up[number]["audio"][:samples].numpy(), 8000)
        Path(f"sounds/{number}.txt").write_text(made_up[number]["texts"])
