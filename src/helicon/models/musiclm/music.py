"""From what stands on the command line to sound files: MusicLM's side of `helicon generate`."""

from collections.abc import Sequence

from helicon.data.sound import Sound
from helicon.models.audiolm.sounds import SoundMaker
from helicon.models.musiclm.generate import COND_SCALE, MusicLM


class MusicMaker(SoundMaker):
    """Makes music of texts."""

    def __init__(
        self,
        network: MusicLM,
        *,
        texts: Sequence[str] = (),
        num_candidates: int = 1,
        seconds: float | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        filter_thres: float | None = None,
        cond_scale: float = COND_SCALE,
    ):
        """
        Args:
            texts: what is to be heard.
            num_candidates: as many are made for each sound, and the one that MuLaN hears as closest to its text is taken.
            The others: see `SoundMaker`.
        """
        if not texts:
            raise ValueError("MusicLM makes music of words: say with --text what is to be heard")
        if num_candidates < 1:
            raise ValueError(f"num_candidates={num_candidates} must be at least 1")
        super().__init__(
            network.audio_lm,
            texts=texts,
            seconds=seconds,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            filter_thres=filter_thres,
            cond_scale=cond_scale,
        )
        self.music, self.num_candidates = network, num_candidates

    def _readable(self, texts: list[str]) -> list[str]:
        """(MusicLM has seen to it that someone reads them.)"""
        if not all(text.strip() for text in texts):
            raise ValueError("an empty text says nothing of what is to be heard: give words behind --text")
        return texts

    def make(self, which: Sequence[int], seed: int) -> list[Sound]:
        """A sound for each of these texts; all candidates are made as one batch."""
        asked = [self.texts[index] for index in which]
        best = self.music(asked, num_samples=self.num_candidates, seed=seed, **self.options)
        return [self._sound(wave, text) for wave, text in zip(best, asked, strict=True)]
