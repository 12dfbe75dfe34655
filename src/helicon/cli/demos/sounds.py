"""Sounds from words."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helicon.cli import page
from helicon.cli.demos.outline import PAGE, CaptionedSounds, Demo, both, files_of, steps_of, varied
from helicon.cli.generate import loaded
from helicon.cli.page import Page
from helicon.cli.pipelines.audiolm import Bundle, seconds_of
from helicon.cli.steps import Clusters, Stage, Tokens, Work, make

SOUNDS = "sounds"
SOUNDS_OF_EACH = 2
CODEC = Stage("codec", "soundstream/demo")
KMEANS = Clusters("kmeans", "synthetic", {"hours": 0.1})
TOKENS = Tokens("tokens", "synthetic", {"codec": CODEC.name, "semantic": KMEANS.name})
SEMANTIC = Stage("semantic", "audiolm/semantic-demo", {"model.wav2vec": KMEANS.name, "data.source": TOKENS.name})
DELAYED = Stage("delayed", "audiolm/delayed-demo", {"model.codec": CODEC.name, **SEMANTIC.stands_on})
AUDIOLM = Bundle("audiolm", {"semantic_transformer": SEMANTIC.name, "coarse_transformer": DELAYED.name})
HOW_DRAWN: Mapping[str, float] = {
    "cond_scale": 2.0,
    "top_p": 0.7,
    "filter_thres": 0.0,
}  # what the recipes were tuned with


def show_sounds(work: Work) -> None:
    """Makes sounds for captions, and the page."""
    from helicon.models.audiolm.sounds import SoundMaker

    seen, never_seen = captions_of_sounds(work.recipes[SEMANTIC.name].data)
    options: dict[str, Any] = {"seconds": seconds_of(work), **HOW_DRAWN}
    maker = SoundMaker(loaded(work.home(AUDIOLM.name)), texts=[*seen, *never_seen], **options)
    make(maker, SOUNDS_OF_EACH, work.home(SOUNDS))
    sound_page(work, seen, never_seen, options).write(work.folder / PAGE)


def captions_of_sounds(data: Mapping[str, Any], most: int = 4) -> tuple[list[str], list[str]]:
    """Captions of different sounds that the model has learned from, and of sounds that were kept from it.

    (Of the latter not those of a whole kind at a pitch, which it has no way to know.)
    """
    from helicon.data.synthetic_sounds import KINDS, SyntheticSounds

    choices = dict(data.get("sounds") or {})
    kept = [(kind, pitch) for kind, pitch in choices.pop("held_out", ())]
    asked = [pair for pair in kept if pair[0] not in KINDS]

    def drawn(**pairs: Any) -> list[str]:
        sounds = SyntheticSounds(1000, seed=data.get("seed", 0) + 1, **pairs, **choices)
        found = map(sounds.attributes, reversed(range(1000)))
        return varied({(f"{a.direction} {a.kind}", a.pitch): a.caption for a in found}, most)

    return drawn(held_out=kept), drawn(only=asked) if asked else []


def sound_page(work: Work, seen: Sequence[str], never_seen: Sequence[str], options: Mapping[str, float]) -> Page:
    codec, semantic, delayed = (page.metrics(work.home(stage.name)) for stage in (CODEC, SEMANTIC, DELAYED))
    shown = Page(
        "Sounds from words",
        "Three networks, trained one after the other on made-up sounds: the first learned to write a sound as a few codes for each "
        "moment, the second to tell from a caption what happens in a sound, the third to write the codes for that.",
    )
    heard = Heard.read(work.home(SOUNDS))
    remark = f"{SOUNDS_OF_EACH} sounds for each caption, drawn with seed 0 and not chosen. {heard.verdict(seen)}"
    shown.section("What it makes", page.paragraph(remark), heard.gallery(seen))
    if never_seen:
        remark = (
            "These captions were kept from it while it learned, though every word of them, and the same sound in other lengths, was "
            f"not. {heard.verdict(never_seen)}"
        )
        shown.section("What it never heard", page.paragraph(remark), heard.gallery(never_seen))
    shown.section(
        "How far it came",
        page.tiles(_sound_numbers(codec, semantic, delayed)),
        _sound_curves(codec, semantic, delayed),
    )
    samples = sorted((work.home(CODEC.name) / "samples").glob("*-spectrograms.png"))
    if samples:
        remark = "Sounds the codec has not learned from, and what its codes keep of them (online and averaged weights)."
        shown.section("What the codes keep", page.wide(page.media(samples[-1], "spectrograms"), remark))
    further = _sound_commands(work, seen[0], options)
    shown.section(
        "Go on from here",
        page.commands(further),
        files_of(work, {SOUNDS: "The sounds above, their spectrograms and captions."}),
    )
    return shown


class Heard(CaptionedSounds):
    def verdict(self, captions: Sequence[str]) -> str:
        """How many of the sounds are what their captions say, in words."""
        right = [sounds_right(path, text) for text in captions for path in self.files[text]]
        return f"{sum(right)} of {len(right)} have the pitch and the direction asked for, as far as a simple rule can tell."


def sounds_right(path: Path, caption: str) -> bool:
    """Whether a sound seems to have the pitch of its caption, and to rise or fall where that says so."""
    import soundfile
    import torch

    from helicon.data.synthetic_sounds import DIRECTIONS
    from helicon.metrics.audio import describe_sound

    wave, hz = soundfile.read(path, dtype="float32", always_2d=True)
    found = describe_sound(torch.from_numpy(wave).mean(dim=1), hz)
    direction = next((word for word in DIRECTIONS if f" {word} " in caption), "steady")
    return caption.endswith(f", {found.pitch} pitch") and found.direction == direction


def _sound_numbers(*stages: Mapping[str, page.Points]) -> list[tuple[str, str]]:
    codec, semantic, delayed = stages
    return [
        (page.last(codec, "valid_si_sdr", "{:.1f} dB"), "SI-SDR of held-out sounds, written as codes and read again"),
        (page.last(codec, "valid_codebook_use", "{:.0f} %", 100), "of the codes are in use in the held-out data"),
        (
            page.last(semantic, "valid_loss", "{:.2f}"),
            "nats for a semantic token: how much the true one surprises the second network",
        ),
        (page.last(delayed, "valid_loss", "{:.2f}"), "nats for a code, which is what the third makes"),
    ]


def _sound_curves(*stages: Mapping[str, page.Points]) -> str:
    codec, semantic, delayed = stages
    si_sdr = page.Curve("held out", codec.get("valid_si_sdr", []), is_measured=True)
    return page.charts(
        page.chart("Codec: error of the mel spectra", both(codec, "mel"), is_logarithmic=True),
        page.chart("Codec: SI-SDR in dB", [si_sdr], "{:.1f}"),
        page.chart("From words to semantic tokens: loss", both(semantic, "loss")),
        page.chart("From those to codes: loss", both(delayed, "loss")),
    )


def _sound_commands(work: Work, caption: str, options: Mapping[str, float]) -> list[tuple[str, str]]:
    chosen = "".join(f" {name}={value:g}" for name, value in options.items())
    model, delayed = (shlex.quote(str(work.home(name))) for name in (AUDIOLM.name, DELAYED.name))
    resume = f"helicon resume {delayed} num_train_steps={4 * steps_of(work.home(DELAYED.name))}"
    beginning = shlex.quote(str(work.home(SOUNDS) / "00000.wav"))
    return [
        ("other words, more sounds of each", f'helicon generate {model} --text "{caption}" --samples 8{chosen}'),
        ("go on from a sound", f"helicon generate {model} --prompt {beginning} seconds={2 * options['seconds']:g}"),
        ("train on for longer; the demo's command then renews this page", resume),
        ("your own sounds, on a GPU", "helicon pipeline audiolm --data my/sounds -o runs/mine"),
        ("everything that can be trained", "helicon recipes"),
    ]


DEMO = Demo((CODEC, KMEANS, TOKENS, SEMANTIC, DELAYED, AUDIOLM), show_sounds)
