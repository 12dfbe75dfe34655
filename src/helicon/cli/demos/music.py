"""Sounds found by words: what MuLaN learns, which MusicLM is told by."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helicon.cli import page
from helicon.cli.demos.outline import PAGE, Demo, both, files_of, steps_of, varied
from helicon.cli.generate import MANIFEST, loaded
from helicon.cli.page import Page
from helicon.cli.steps import Stage, Work, replaced

if TYPE_CHECKING:
    from helicon.data.synthetic_sounds import SyntheticSounds
    from helicon.metrics.retrieval import Recall
    from helicon.models.musiclm.search import Found, SoundIndex

COLLECTION, INDEX = "collection", "index"
NUM_SOUNDS = 300  # to look for something in
NUM_QUERIES, NUM_SHOWN = 4, 3  # texts on the page, of those it has read and of others; and sounds for each
SECONDS = 1.0  # of a sound, unless the recipe says otherwise
MULAN = Stage("mulan", "musiclm/mulan-demo")


def show_music(work: Work) -> None:
    """Looks for texts among sounds that were never heard, and writes the page."""
    from helicon.engine.checkpoint import resolve
    from helicon.models.musiclm.search import SoundIndex

    network: Any = loaded(resolve(work.home(MULAN.name)))
    data = work.recipes[MULAN.name].data
    sounds = sounds_anew(data, network.sample_hz)
    write_sounds(sounds, work.home(COLLECTION))
    index = SoundIndex(network, work.home(INDEX), sounds.seconds)
    index.update(work.home(COLLECTION))
    captions = captions_in(work.home(COLLECTION))
    findings = [Findings.of(index, captions, texts) for texts in texts_of(data, sounds) if texts]
    music_page(work, findings).write(work.folder / PAGE)


def sounds_anew(data: Mapping[str, Any], sample_hz: int) -> "SyntheticSounds":
    """Made-up sounds like those of a recipe, but none of them; and also such as were kept from it altogether."""
    from helicon.data.synthetic_sounds import SyntheticSounds

    choices = {name: value for name, value in (data.get("sounds") or {}).items() if name != "held_out"}
    seconds = data.get("data_max_length_seconds") or SECONDS
    return SyntheticSounds(NUM_SOUNDS, sample_hz, seconds, data.get("seed", 0) + 1, **choices)


def texts_of(data: Mapping[str, Any], sounds: "SyntheticSounds") -> tuple[list[str], list[str]]:
    """The captions of the sounds, those it has read and those that were kept from it; such as differ most come first."""
    from helicon.data.synthetic_sounds import SyntheticSounds

    choices = dict(data.get("sounds") or {})
    kept = [(kind, pitch) for kind, pitch in choices.pop("held_out", ())]
    never_read: set[str] = set()
    if kept:
        others = SyntheticSounds(1000, only=kept, **choices)
        never_read = {others.attributes(index).caption for index in range(len(others))}

    def chosen(is_wanted: Callable[[str], bool]) -> list[str]:
        found = [
            attributes for attributes in map(sounds.attributes, range(len(sounds))) if is_wanted(attributes.caption)
        ]
        first = varied({(f"{a.direction} {a.kind}", a.pitch): a.caption for a in reversed(found)}, NUM_QUERIES)
        return list(dict.fromkeys([*first, *(attributes.caption for attributes in found)]))

    return chosen(lambda caption: caption not in never_read), chosen(lambda caption: caption in never_read)


def write_sounds(sounds: "SyntheticSounds", folder: Path) -> None:
    """The sounds as files, with a manifest that has their captions."""
    import soundfile

    with replaced(folder) as partial:
        partial.mkdir()
        lines = []
        for number in range(len(sounds)):
            sample, name = sounds[number], f"{number:05d}.wav"
            soundfile.write(partial / name, sample["audio"].numpy(), sounds.sample_hz)
            lines.append(json.dumps({"path": name, "text": sample["texts"]}) + "\n")
        (partial / MANIFEST).write_text("".join(lines), encoding="utf-8")


def captions_in(folder: Path) -> dict[str, str]:
    """The caption of each file."""
    lines = map(json.loads, (folder / MANIFEST).read_text(encoding="utf-8").splitlines())
    return {str((folder / line["path"]).absolute()): line["text"] for line in lines}


@dataclass(frozen=True)
class Findings:
    """What was found for the first of some texts; and how often, of all of them, the right sounds are among the first."""

    captions: Mapping[str, str]  # of each file
    found: Mapping[str, Sequence["Found"]]  # by text
    recall: "Recall"

    @classmethod
    def of(cls, index: "SoundIndex", captions: Mapping[str, str], texts: Sequence[str]) -> "Findings":
        import torch

        from helicon.metrics.retrieval import AT, Recall, chance_at, recall_at

        own = [captions[part.name] for part in index.parts]
        similarities = index.embed_texts(texts) @ index.latents.T
        is_right = torch.tensor([[caption == text for caption in own] for text in texts])
        num_right = is_right.sum(dim=1).tolist()
        recall = Recall(
            len(own),
            {k: recall_at(similarities, k, is_right) for k in AT},
            {k: chance_at(num_right, len(own), k) for k in AT},
        )
        some = texts[:NUM_QUERIES]
        return cls(captions, dict(zip(some, index.search(some, NUM_SHOWN), strict=True)), recall)

    def is_right(self, query: str, sound: "Found") -> bool:
        return self.captions[sound.name] == query

    def verdict(self) -> str:
        right = [self.is_right(query, sound) for query, sounds in self.found.items() for sound in sounds]
        own = list(self.captions.values())
        best = sum(min(len(sounds), own.count(query)) for query, sounds in self.found.items())
        return f"{sum(right)} of these {len(right)} are what was asked for, where the best search would show {best}."

    def gallery(self) -> str:
        return page.gallery(
            (
                (query, [self._piece(query, rank, sound) for rank, sound in enumerate(sounds, start=1)])
                for query, sounds in self.found.items()
            ),
            is_wide=True,
        )

    def _piece(self, query: str, rank: int, sound: "Found") -> str:
        mark = "✓" if self.is_right(query, sound) else "✗"
        caption = self.captions[sound.name]
        path = Path(sound.name)
        return page.sound(path, pictured(path, caption), caption, f"{rank}. {mark} {caption} ({sound.similarity:.2f})")


def pictured(path: Path, caption: str) -> Path:
    """The spectrogram of a sound, beside it."""
    import soundfile
    import torch

    from helicon.data.sound import spectrogram_beside
    from helicon.metrics.audio import spectrogram_image

    picture = spectrogram_beside(path)
    if not picture.exists():
        wave, hz = soundfile.read(path, dtype="float32")
        spectrogram_image(torch.from_numpy(wave), hz, caption).save(picture)
    return picture


# ---------------------------------------------------------------------- the page


def music_page(work: Work, findings: Sequence[Findings]) -> Page:
    numbers = page.metrics(work.home(MULAN.name))
    read, *never_read = findings
    shown = Page(
        "Sounds found by words",
        "Two networks, trained together on made-up sounds and their captions: one hears, the other reads, and what belongs together comes "
        "to lie close.",
    )
    remark = (
        f"Of {len(read.captions)} sounds that it never heard, the {NUM_SHOWN} that lie closest to a text, each with the caption it was made "
        f"from, which nobody told it. {read.verdict()} Of all captions, as texts to look for:"
    )
    shown.section("What it finds", page.paragraph(remark), page.tiles(_recalls(read.recall)), read.gallery())
    for found in never_read:
        remark = (
            "No sound with these captions was among those it learned from: it puts together what it knows of each word. "
            f"{found.verdict()} Of all captions that were kept from it:"
        )
        pieces = (page.tiles(_recalls(found.recall)), found.gallery())
        shown.section("What it finds for words it never read together", page.paragraph(remark), *pieces)
    shown.section("How far it came", _curves(numbers))
    made = {
        COLLECTION: "The sounds that were looked through, with a manifest of their captions.",
        INDEX: "What the network makes of them, so that a sound is heard only once.",
    }
    shown.section("Go on from here", page.commands(_commands(work, read)), files_of(work, made))
    return shown


def _recalls(recall: "Recall") -> list[tuple[str, str]]:
    what = lambda k: "a right sound comes first" if k == 1 else f"a right sound is among the first {k}"
    return [
        (f"{100 * value:.0f} %", f"{what(k)}; by chance {100 * recall.chance_at[k]:.0f} %")
        for k, value in recall.at.items()
    ]


def _curves(numbers: Mapping[str, page.Points]) -> str:
    recalls = {"first": "valid_text_to_audio_recall_at_1", "among ten": "valid_text_to_audio_recall_at_10"}
    return page.charts(
        page.chart("Contrastive loss", both(numbers, "loss")),
        page.chart(
            "Held-out texts whose sound is found",
            [page.Curve(name, numbers.get(key, []), is_measured=True) for name, key in recalls.items()],
        ),
    )


def _commands(work: Work, findings: Findings) -> list[tuple[str, str]]:
    run, collection = (shlex.quote(str(work.home(name))) for name in (MULAN.name, COLLECTION))
    text = next(iter(findings.found))
    search = f"helicon search {run} --data {collection}"
    return [
        ("look for something else; your own folder of sounds will do", f"{search} --text {shlex.quote(text)}"),
        (
            "look for sounds that are like another",
            f"{search} --like {shlex.quote(str(work.home(COLLECTION) / '00000.wav'))}",
        ),
        (
            "train on for longer; the demo's command then renews this page",
            f"helicon resume {run} num_train_steps={4 * steps_of(work.home(MULAN.name))}",
        ),
        (
            "your own sounds with their texts, on a GPU",
            "helicon train musiclm/mulan data.source=my/sounds data.captions=beside",
        ),
        ("music from texts, on a GPU", "helicon pipeline musiclm --data my/sounds --captions beside -o runs/mine"),
        ("everything that can be trained", "helicon recipes"),
    ]


DEMO = Demo((MULAN,), show_music)
