"""From what stands on the command line to sound files: AudioLM's side of `helicon generate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from helicon.data.sound import SUFFIXES, Sound, read_prompt, spectrogram_beside
from helicon.models.audiolm.pipeline import AudioLM
from helicon.models.audiolm.wrappers import (
    CoarseTransformerWrapper,
    DelayedTransformerWrapper,
    FineTransformerWrapper,
    SemanticTransformerWrapper,
)
from helicon.nn.network import Network
from helicon.nn.sampling import Sampling


class SoundMaker:
    """Makes sounds with an AudioLM, or with its stages: from texts, from the beginning of a sound, or from nothing."""

    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    sheet = None  # no file holds several sounds
    beside = staticmethod(spectrogram_beside)

    def __init__(
        self,
        network: Network,
        *,
        texts: Sequence[str] = (),
        prompt: Path | None = None,
        coarse: Network | None = None,
        fine: Network | None = None,
        fine_max_frames: int | None = None,
        learned_seconds: float | None = None,
        seconds: float | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        filter_thres: float | None = None,
        cond_scale: float | None = None,
    ):
        """
        Args:
            network: an `AudioLM`, or its semantic stage together with the others.
            texts: what is to be heard, of a model that reads texts; none leaves it to the model.
            prompt: the sound file that every sound begins with.
            coarse, fine: the other stages; a delayed one as `coarse` stands for both.
            learned_seconds: how long the sounds are that the stages learned from, of which an AudioLM knows itself: longer ones are
                made piece by piece.
            fine_max_frames: as many frames as the fine stage learned from, where it learned from others.
            seconds: the most that a sound lasts, its prompt with it; by default as long as what the AudioLM learned from, where it
                knows that, or 512 frames of the codec.
            temperature: of the tokens, in all stages; 0 takes the likeliest.
            top_k: tokens are drawn from so many of the likeliest.
            top_p: tokens are drawn from the likeliest whose probabilities add up to it.
            filter_thres: tokens are drawn from the likeliest 1 - filter_thres of all; by default 0.9, or nothing beside top_k or top_p.
            cond_scale: how closely the text is followed; 1 is no guidance. By default 3, or 1 for stages that are conditioned on codes, as
                MusicLM's are.
        """
        # Which refuses numbers that cannot be.
        Sampling(temperature, top_k, top_p, filter_thres, 1.0 if cond_scale is None else cond_scale)
        self.network = _whole(network, coarse, fine, fine_max_frames, learned_seconds)
        self.texts = self._readable(list(texts))
        self.options: dict[str, Any] = {
            "seconds": self._possible(seconds),
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "filter_thres": filter_thres,
            "cond_scale": cond_scale,
        }
        if prompt is not None:
            self.options |= self._beginning(prompt)

    @property
    def prompts(self) -> list[str]:
        return self.texts or [""]

    def make(self, which: Sequence[int], seed: int) -> list[Sound]:
        """A sound for each of these prompts, as one batch."""
        text = [self.texts[index] for index in which] if self.texts else None
        made = self.network.generate(text=text, batch_size=len(which), seed=seed, **self.options)
        return [self._sound(wave, self.prompts[index]) for wave, index in zip(made, which, strict=True)]

    def _sound(self, wave: Tensor, text: str) -> Sound:
        wave = wave.float().cpu()
        return Sound(wave[None] if wave.ndim == 1 else wave, self.network.sample_hz, text)

    def _readable(self, texts: list[str]) -> list[str]:
        """The texts, once it is seen that someone reads them."""
        if not texts:
            return texts
        if not self.network.reads_texts:
            raise ValueError("this AudioLM was trained without texts: leave --text out")
        stages = (self.network.semantic, self.network.coarse, self.network.fine)
        if any(
            stage.transformer.has_condition and stage.transformer.text_encoder is None
            for stage in stages
            if stage is not None and stage.audio_conditioner is None
        ):
            raise ValueError("this AudioLM reads embedded texts, or codes: call its generate with those, in Python")
        return texts

    def _possible(self, seconds: float | None) -> float | None:
        codec = self.network.codec
        frame = codec.downsample_factor / codec.sample_hz
        if seconds is not None and not frame <= seconds < float("inf"):
            raise ValueError(f"seconds={seconds:g} must be at least a frame of the codec, {frame:g}")
        return seconds

    def _beginning(self, path: Path) -> dict[str, Any]:
        """The sound to go on from, as `AudioLM.generate` takes it."""
        wave, hz = read_prompt(path, self.network.codec.channels)
        codec, wav2vec = self.network.codec, self.network.semantic.wav2vec
        if wav2vec is None:
            raise ValueError("the stages were trained without their semantic tokenizer, which a --prompt needs")
        least = max(hearer.downsample_factor / hearer.sample_hz for hearer in (codec, wav2vec))
        most = self.options["seconds"] or self.network.usual_frames * codec.downsample_factor / codec.sample_hz
        lasts = wave.shape[-1] / hz
        if lasts < least:
            raise ValueError(f"{path} lasts {lasts:.3f} s, and the model needs {least:.3f} s to hear anything")
        if lasts >= most:
            raise ValueError(
                f"{path} lasts {lasts:.2f} s, and the sound that begins with it {most:.2f} s: "
                f"give more, as in seconds={lasts + 5:.0f}, or a shorter prompt"
            )
        return {"prime_wave": wave[None].to(self.network.device), "prime_wave_input_sample_hz": hz}


def _whole(
    network: Network,
    coarse: Network | None,
    fine: Network | None,
    fine_max_frames: int | None,
    learned_seconds: float | None,
) -> AudioLM:
    """The AudioLM that was given, whole or in stages."""
    if isinstance(network, AudioLM):
        given = {"--coarse": coarse, "--fine": fine}
        for name, value in {**given, "fine_max_frames": fine_max_frames, "learned_seconds": learned_seconds}.items():
            if value is not None:
                raise ValueError(f"an AudioLM has all its stages: leave {name} out")
        return network
    assert isinstance(network, SemanticTransformerWrapper)
    if coarse is None:
        raise ValueError(
            "a semantic stage makes no sound by itself: name the others with --coarse RUN and --fine RUN, "
            "or a delayed one as --coarse RUN"
        )
    if not isinstance(coarse, (CoarseTransformerWrapper, DelayedTransformerWrapper)):
        raise ValueError(f"--coarse holds a {type(coarse).__name__}: give the run of a coarse or of a delayed stage")
    if fine is not None and not isinstance(fine, FineTransformerWrapper):
        raise ValueError(f"--fine holds a {type(fine).__name__}: give the run of a fine stage")
    if isinstance(coarse, DelayedTransformerWrapper) and (fine is not None or fine_max_frames is not None):
        raise ValueError("--coarse holds a delayed stage, which makes all codes: leave --fine and fine_max_frames out")
    if isinstance(coarse, CoarseTransformerWrapper) and fine is None:
        raise ValueError(
            "--coarse holds a stage that makes the first codes: name the one that makes the others, --fine"
        )
    return AudioLM(
        semantic_transformer=network,
        coarse_transformer=coarse,
        fine_transformer=fine,
        fine_max_frames=fine_max_frames,
        learned_seconds=learned_seconds,
    )
