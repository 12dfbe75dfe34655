"""One recording, in memory or in a file: its rate, how many frames it has, and any stretch of them.

A file is read where it is asked for, without what is before it. What cannot be read is a `BadFile` that says why; one that
was cut off gives, after `shorten`, what is left of it.

Letters: n frames (one sample of each channel), c channels.
"""

import functools
import io
import logging
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from jaxtyping import Float
from torch import Tensor

from helicon.data.dataset import BadFile

logger = logging.getLogger(__name__)

FOREIGN_EXTENSIONS = ("webm", "m4a", "mp4", "aac", "wma")  # sound that libsndfile cannot read
WAVE = "a float or int16 tensor [n], or [c, n] with 1 or 2 channels"

UNKNOWN_LENGTH = 2**40  # libsndfile gives more frames than this for a file that does not tell
PREROLL = 16384  # more frames than an mp3 can refer back to, and than the blocks of a flac or an ogg have
PAGE, MOST_OF_A_PAGE = b"OggS\0", 65307  # how a page of an ogg begins, and its greatest size in bytes


def is_wave(value: Any) -> bool:
    if not isinstance(value, (Tensor, np.ndarray)) or 0 in value.shape:
        return False
    is_sound = str(value.dtype).removeprefix("torch.") in ("float16", "bfloat16", "float32", "float64", "int16")
    return is_sound and (value.ndim == 1 or (value.ndim == 2 and value.shape[0] in (1, 2)))


class Wave:
    """A recording in memory, [n] or [c, n], that is read as a `SoundFile` is."""

    num_before = num_after = 0
    is_cut = False

    def __init__(self, values: Any, hz: int, name: str):
        if hz < 1 or not is_wave(values):
            found = f"a {type(values).__name__}"
            if isinstance(values, (Tensor, np.ndarray)):
                found = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)} at {hz} Hz"
            raise ValueError(f"{name} is no sound, but {found}: a wave is {WAVE}")
        wave = values.detach().cpu().float().numpy() if isinstance(values, Tensor) else values.astype(np.float32)
        wave = wave / 2**15 if "int" in str(values.dtype) else wave
        self.frames = wave.reshape(-1, wave.shape[-1]).T
        self.name, self.hz, self.num_frames = name, hz, len(self.frames)

    def read(self, start: int, stop: int) -> Float[np.ndarray, "n c"]:
        return _finite(self.frames[start:stop], self.name)

    def shorten(self) -> bool:
        return False


class SoundFile:
    """A recording in a file: all of it, or `duration` seconds from `start` on, where its frames count from.

    Opened here, and closed when the last reference goes. The header tells its length, which is checked by reading.
    """

    num_frames: int
    num_before: int  # frames that the file has in front of the recording, which resampling may look at
    num_after: int
    is_cut: bool = False  # the data ends before the recording did

    def __init__(self, source: Path | bytes, name: str, start: float = 0.0, duration: float | None = None):
        self.source, self.name, self.start, self.duration = source, name, start, duration
        self.file = self._open()
        self.hz = self.file.samplerate
        self._measure(self.file.frames if self.file.frames < UNKNOWN_LENGTH else self._count())

    def read(self, start: int, stop: int) -> Float[np.ndarray, "n c"]:
        try:
            frames = self._read(self.file, self.num_before + start, stop - start)
            problem = "the data ends" if len(frames) < stop - start else None
        except (soundfile.SoundFileError, MemoryError) as error:
            problem = _reason(error)
        if problem:
            first, last = ((self.num_before + frame) / self.hz for frame in (start, stop))
            raise BadFile(self.name, f"cannot be read from {first:.2f} s to {last:.2f} s ({problem})")
        return _finite(frames, self.name)

    def shorten(self) -> bool:
        """After a read that failed: the lengths become those of what can be read. False if that is all there was."""
        promised, length = self.file.frames, self.num_frames
        found = self._count()
        self._measure(found)
        self.file = self._open()  # a decoder that failed is of no more use
        self.is_cut = self.num_frames < length
        if found < promised < UNKNOWN_LENGTH:
            _tell_cut(self.name, found / self.hz, promised / self.hz)
        return found < promised

    def _open(self) -> soundfile.SoundFile:
        try:
            with _quiet(self.source):
                return soundfile.SoundFile(io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source)
        except (soundfile.SoundFileError, OSError, TypeError, ValueError) as error:
            raise BadFile(self.name, _why_not(self.source, _reason(error))) from error

    def _read(self, file: soundfile.SoundFile, start: int, count: int) -> Float[np.ndarray, "n c"]:
        preroll = start - self._where_to_seek(file, start)
        with _quiet(self.source):
            if file.tell() != start - preroll:
                file.seek(start - preroll)
            return file.read(preroll + count, dtype="float32", always_2d=True)[preroll:]

    def _where_to_seek(self, file: soundfile.SoundFile, start: int) -> int:
        """The first frames after a seek are wrong in an mp3, and in an ogg (Vorbis) that was read before; in the last page of
        an ogg they may be those of a later place; and in a flac of unknown length, the last block is not found."""
        is_vorbis = file.subtype == "VORBIS"
        is_inexact = file.format == "MP3" or file.frames > UNKNOWN_LENGTH
        if is_vorbis and start > self._last_page:
            start, is_inexact = self._last_page, True
        if is_inexact or (is_vorbis and file.tell() > 0):
            return max(0, start - PREROLL)
        return start

    @functools.cached_property
    def _last_page(self) -> int:
        """The first frame of an ogg's last page. (Each page tells where it ends; of the last one libsndfile takes its
        packets to be as long as they say, though the encoder cuts off what fills up the last.)"""
        tail = _last_bytes(self.source, 2 * MOST_OF_A_PAGE)
        pages = [tail[place:] for place in _places(tail, PAGE)]
        ends = [struct.unpack_from("<q", page, 6)[0] for page in pages if len(page) >= 14]
        ends = [end for end in ends if end >= 0]  # -1: it is the middle of a packet
        return max(0, self.file.frames - (ends[-1] - ends[-2])) if len(ends) > 1 else 0

    def _measure(self, total_frames: int) -> None:
        first = round(self.start * self.hz)
        rest = total_frames - first
        length = rest if self.duration is None else min(round(self.duration * self.hz), rest)
        if length < 1:
            raise BadFile(self.name, f"holds no sound{f' from {self.start:.2f} s on' if self.start else ''}")
        self.num_before, self.num_frames, self.num_after = first, length, rest - length

    def _count(self) -> int:
        """How many frames can be read, found by halving."""

        def is_there(frame: int) -> bool:
            try:
                return len(self._read(self._open(), frame, 1)) == 1
            except (soundfile.SoundFileError, BadFile):
                return False

        low, high = 0, self.file.frames
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if is_there(middle) else (low, middle)
        return low


Recording = SoundFile | Wave


def _finite(frames: Float[np.ndarray, "n c"], name: str) -> Float[np.ndarray, "n c"]:
    if not np.isfinite(frames).all():
        raise BadFile(name, "holds values that are infinite or not numbers")
    return frames


def _last_bytes(source: Path | bytes, count: int) -> bytes:
    if isinstance(source, bytes):
        return source[-count:]
    with source.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - count))
        return file.read()


def _places(content: bytes, mark: bytes) -> Iterator[int]:
    place = content.find(mark)
    while place >= 0:
        yield place
        place = content.find(mark, place + 1)


def _reason(error: Exception) -> str:
    return getattr(error, "error_string", str(error)).rstrip(".")


def _why_not(source: Path | bytes, reason: str) -> str:
    """Why a file cannot be opened. (libsndfile says of most failures "System error" or "Format not recognised".)"""
    content = source
    if isinstance(source, Path):
        try:
            with source.open("rb") as file:
                content = file.read(1)
        except OSError as error:
            return f"cannot be opened ({error.strerror})"
        extension = source.suffix.lower().removeprefix(".")
        if extension in FOREIGN_EXTENSIONS:
            return f"{extension} cannot be read: {remedy(extension)}"
    return f"not a readable sound file ({reason})" if content else "is empty"


def remedy(extension: str) -> str:
    return f"convert it, for example with ffmpeg -i x.{extension} x.flac"


@functools.cache  # once for each file, though it is met in every epoch
def _tell_cut(name: str, seconds: float, promised: float) -> None:
    logger.warning("%s ends after %.2f s of the %.2f s it promises: what is there is used", name, seconds, promised)


_stderr_lock = threading.Lock()


@contextmanager
def _quiet(source: Path | bytes) -> Iterator[None]:
    """libmpg123 writes a line to the process's stderr, past Python, at almost every seek in a good mp3: not in here."""
    is_mp3 = source.suffix.lower() == ".mp3" if isinstance(source, Path) else source.startswith((b"ID3", b"\xff"))
    if not is_mp3:
        yield
        return
    with _stderr_lock, Path(os.devnull).open("wb") as nowhere:
        stderr = os.dup(2)
        try:
            os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
