"""Sounds that were made, as files; and the sounds that others are made from.

A sound is written with a picture of its spectrogram beside it: `voice.wav` and `voice-spectrogram.png`.

Letters: c channels, n samples.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import soundfile
import torch
from jaxtyping import Float
from torch import Tensor

from helicon.data.audio import to_channels
from helicon.data.dataset import BadFile
from helicon.data.recording import SoundFile
from helicon.metrics.audio import spectrogram_image

logger = logging.getLogger(__name__)

SUFFIXES = (".wav", ".flac", ".ogg")  # of files that are written
MAX_TITLE = 80  # letters over a spectrogram
BLOCK = 65536  # frames that are written at a time: libsndfile's Vorbis encoder overflows the stack on minutes at once


@dataclass(frozen=True)
class Sound:
    """A sound, and what it was made from in words."""

    wave: Float[Tensor, "c n"]
    sample_hz: int
    title: str = ""

    def write(self, path: Path) -> None:
        """The sound (what is louder than a file can hold is clipped), and its spectrogram beside it."""
        if not self.wave.isfinite().all():
            raise ValueError(
                f"what was made for {path} has samples that are no finite numbers, and is not written: choose options nearer to their "
                "defaults, or another network"
            )
        try:
            with soundfile.SoundFile(path, "w", self.sample_hz, len(self.wave)) as file:
                self._write_into(file, path)
        except soundfile.SoundFileError as error:
            raise OSError(f"{path} could not be written ({error}): free some space, or choose another place") from error
        if self.wave.shape[1] == 0:
            logger.warning("%s is empty, as the model ended it at once: another seed may give more", path)
            return
        spectrogram_image(self.wave.mean(dim=0), self.sample_hz, self.title[:MAX_TITLE]).save(spectrogram_beside(path))

    def _write_into(self, file: soundfile.SoundFile, path: Path) -> None:
        try:
            for block in self.wave.clamp(-1, 1).split(BLOCK, dim=1):
                file.write(block.numpy().T)
        except soundfile.SoundFileError:
            path.unlink()  # its first part would pass for the whole
            raise


def spectrogram_beside(path: Path) -> Path:
    """Where the picture of a sound file is."""
    return path.with_name(f"{path.stem}-spectrogram.png")


def read_prompt(path: Path, channels: int) -> tuple[Float[Tensor, "*c n"], int]:
    """The sound file that a user named to go on from ([n] of one channel, else [c, n]), and its rate."""
    if not path.is_file():
        raise FileNotFoundError(f"--prompt {path} is {'a folder' if path.is_dir() else 'not there'}: name a sound file")
    try:
        file = SoundFile(path, str(path))
        frames = to_channels(file.read(0, file.num_frames), channels)
    except BadFile as error:
        raise ValueError(str(error)) from error
    return torch.from_numpy(frames.T.copy()), file.hz
