"""Sounds found by a text, or by another sound: what a MuLaN makes of them, kept and compared.

Recordings are cut into clips, each with a latent, and one fits as well as its best clip does. The latents are kept in a folder:

    index.json                    the network, how long clips are, of each recording its file and where its clips begin; and what cannot be read
    latents-<hash>.safetensors    the latents of all clips, in that order

A file is read again only if its size or date has changed. `index.json` is replaced last, in one rename: a kill leaves the index there was.
One process at a time fills an index; another waits for it, and goes on from what it left.

Letters: c clips, f clips with finite latents, d features of a latent, q queries, r recordings.
"""

import fcntl
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from helicon.data.audio import AudioTransform
from helicon.data.dataset import BadFile
from helicon.data.loader import NUM_BAD_FILES_TOLD, Loader
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.data.tokens import network_hash, write_whole
from helicon.models.musiclm.clips import Clips, FilePart, Heard, Part, gathered, parts_of
from helicon.models.musiclm.mulan import MuLaN
from helicon.nn.network import Network, load_state

logger = logging.getLogger(__name__)

CLIP_SECONDS = 10.0  # as in the paper
CLIPS_AT_ONCE = 256  # that are read before their latents are kept, and the rest of the last recording
FORMAT = 2
NOT_FINITE = "what the network makes of it is not finite"
INDEX_FILE, LOCK_FILE = "index.json", ".lock"

Latents = Float[Tensor, "c d"]


@dataclass(frozen=True)
class Found:
    """A recording, and where the clip of it begins that fits best."""

    name: str  # of its file, absolute
    begin: float  # in seconds, from the beginning of the file
    seconds: float  # how long the clip is
    similarity: float  # a cosine


@dataclass(frozen=True)
class Updated:
    """What `SoundIndex.update` did, in numbers of recordings."""

    read: int
    kept: int
    bad: Mapping[str, str]  # those that cannot be read, and why


class SoundIndex:
    """The latents of a collection of sounds, and what in it fits a text or a sound.

    index = SoundIndex(helicon.load("runs/mulan"), folder="index")
    index.update("sounds")  # a folder or a manifest; only what is new or changed is read
    for found in index.search(["a slow waltz"], top=5)[0]:
        print(found.similarity, found.name, found.begin)
    """

    def __init__(self, network: Network, folder: str | Path | None = None, seconds: float | None = None):
        """
        Args:
            network: a MuLaN, or one that stands on it.
            folder: where latents are kept; those that are there are used, if they are of the same network. None keeps nothing.
            seconds: how long clips are: by default as long as those the network was trained on, or 10 s where it does not know.
        """
        self.mulan = mulan_in(network)
        seconds = (self.mulan.longest_seconds or CLIP_SECONDS) if seconds is None else seconds
        if not 0 < seconds < float("inf"):
            raise ValueError(f"seconds={seconds:g} must be more than 0: it is how long clips are")
        self.seconds = seconds
        self.transform = AudioTransform(self.mulan.sample_hz, max_length_seconds=seconds, pad=False)
        self.folder = None if folder is None else Path(folder).expanduser()
        self.parts: list[Part] = []
        self.begins: list[list[float]] = []  # of the clips of each
        self.durations: list[float] = []  # of each, to the end of its last clip
        self.bad: dict[Part, str] = {}  # what cannot be read, and why
        self._in_part: dict[str, str] = {}  # recordings of which some clips cannot be read, and why
        self._blocks: list[Latents] = []
        self._num_unsaved = 0  # clips, bad files, and recordings left out
        self._read_hash = ""  # of the index file that all this is from
        self._read_latents = ""  # the file that it names
        if self.folder is not None:
            self._network_hash = network_hash(self.mulan)
            self._read(self.folder)

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def latents(self) -> Latents:
        """Of all clips, recording by recording."""
        if len(self._blocks) != 1:
            self._blocks = [torch.cat([torch.zeros(0, self.mulan.dim_latent), *self._blocks])]
        return self._blocks[0]

    @property
    def owners(self) -> Int[Tensor, " c"]:
        """Which recording each clip is of."""
        counts = torch.tensor([len(begins) for begins in self.begins], dtype=torch.long)
        return torch.arange(len(self)).repeat_interleave(counts)

    @property
    def _firsts(self) -> list[int]:
        """The first clip of each recording, and the number of all clips."""
        return [0, *accumulate(map(len, self.begins))]

    # ------------------------------------------------------------------ what is in it

    def update(
        self,
        source: str | Path | SyntheticSounds,
        *,
        batch_size: int = 32,
        num_workers: int = 0,
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> Updated:
        """Makes the index that of a folder or manifest: what is new or changed is read, what is gone left out.

        Args:
            batch_size: clips that go through the network at once.
            num_workers: processes that read.
            progress: called with the number of recordings read, and of all that are to be.
        """
        parts, gone = parts_of(source)
        self._in_part = {}
        is_kept = self.folder is not None and not isinstance(source, SyntheticSounds)
        with self._alone() if is_kept else nullcontext():
            known, wanted = {*self.parts}, {*parts}
            self._choose(parts)
            met = {*self.parts, *self.bad}
            new = [part for part in parts if part not in met]
            num_done = 0
            try:
                for clips in self._cut(new, max(CLIPS_AT_ONCE, batch_size)):
                    tell = lambda done, before=num_done: progress(before + done, len(new))
                    self._add(clips, batch_size, num_workers, tell)
                    num_done += len(clips.parts)
                    # (So that little is written often, and much rarely.)
                    if is_kept and self._num_unsaved >= max(CLIPS_AT_ONCE, self._firsts[-1] // 10):
                        self._save()
            finally:
                self._choose(parts)
                if is_kept and self._num_unsaved:
                    self._save()
        bad = {**gone, **{part.name: reason for part, reason in self.bad.items()}}
        if not self.parts:
            path, reason = next(iter(bad.items()))
            raise ValueError(
                f"none of the {len(bad)} files can be read, for example {path} ({reason}): check the format and the path of the data"
            )
        _tell("skipped", bad)
        _tell("heard in part", self._in_part)
        num_kept = len(known & wanted)
        return Updated(len(self) - num_kept, num_kept, bad)

    def _choose(self, wanted: Sequence[Part]) -> None:
        """Leaves out all recordings but these, and puts them in this order (so that what is equal is found in no other)."""
        places = {part: number for number, part in enumerate(self.parts)}
        numbers = [places[part] for part in wanted if part in places]
        bad = {part: self.bad[part] for part in wanted if part in self.bad}
        self._num_unsaved += len(self) - len(numbers) + len(self.bad) - len(bad)
        firsts = self._firsts
        self._blocks = [self.latents[[clip for number in numbers for clip in range(*firsts[number : number + 2])]]]
        self.parts, self.begins, self.durations, self.bad = (
            [self.parts[number] for number in numbers],
            [self.begins[number] for number in numbers],
            [self.durations[number] for number in numbers],
            bad,
        )

    def _cut(self, parts: Sequence[Part], num_clips: int) -> Iterator[Clips]:
        """The clips of recordings, so many at a time, and the rest of the last recording."""
        clips = Clips(self.transform, self.seconds)
        for part in parts:
            clips.add(part)
            if len(clips) >= num_clips:
                yield clips
                clips = Clips(self.transform, self.seconds)
        if clips.parts:
            yield clips

    def _add(self, clips: Clips, batch_size: int, num_workers: int, tell: Callable[[int], object]) -> None:
        """Hears recordings. If that is interrupted, those whose clips have all been heard are in the index."""
        heard: list[tuple[list[Heard], Latents]] = []
        try:
            if len(clips):
                loader = Loader(clips, batch_size=batch_size, shuffle=False, num_workers=num_workers, collate=gathered)
                for read, batch in loader.validation():
                    none = torch.zeros(0, self.mulan.dim_latent)
                    latents = none if batch is None else self._embed(batch["audio"], batch["audio_lengths"]).cpu()
                    heard.append(_comparable(read, latents))
                    tell(clips.num_whole(read[-1].clip + 1))
        finally:
            self._take(clips, [one for read, _ in heard for one in read], [latents for _, latents in heard])
        tell(len(clips.parts))

    def _take(self, clips: Clips, heard: Sequence[Heard], latents: Sequence[Latents]) -> None:
        """Puts the recordings in of which all clips, read in order, have been heard."""
        num_whole = clips.num_whole(len(heard))
        problems = dict(clips.problems)
        begins: list[list[float]] = [[] for _ in clips.parts]
        durations = [0.0 for _ in clips.parts]
        for one in heard:
            number, begin = clips.places[one.clip]
            if one.problem is None:
                begins[number].append(begin)
                durations[number] = begin + one.seconds
            else:
                problems.setdefault(number, one.problem)  # where it ends, not the last that is missed
        found = [number for number in range(num_whole) if begins[number]]
        num_clips = sum(len(begins[number]) for number in found)
        bad = {clips.parts[number]: problems[number] for number in range(num_whole) if not begins[number]}
        self._in_part |= {clips.parts[number].name: problems[number] for number in found if number in problems}
        if num_clips:
            self._blocks.append(torch.cat([*latents])[:num_clips])
        self.parts += [clips.parts[number] for number in found]
        self.begins += [begins[number] for number in found]
        self.durations += [durations[number] for number in found]
        self.bad |= bad
        self._num_unsaved += num_clips + len(bad)

    @torch.inference_mode()
    def _embed(self, waves: Float[Tensor, "c n"], lengths: Int[Tensor, " c"]) -> Latents:
        device = self.mulan.device
        is_cuda = device.type == "cuda"
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
            # (Lengths that are all the whole are left out: to mask costs time.)
            is_padded = bool((lengths < waves.shape[1]).any())
            return self.mulan.get_audio_latents(waves.to(device), lengths.to(device) if is_padded else None).float()

    # ------------------------------------------------------------------ what fits

    def search(self, texts: Sequence[str], top: int = 10) -> list[list[Found]]:
        """For each text the recordings that fit it, the best first."""
        return self.nearest(self.embed_texts(texts), top)

    def like(self, path: str | Path, top: int = 10, latent: Float[Tensor, " d"] | None = None) -> list[Found]:
        """The recordings that sound like the one in a file, the best first; that file itself is left out.

        `latent` is what `embed_sound` made of the file, if that was called before.
        """
        whole = self.embed_sound(path) if latent is None else latent
        own = FilePart.name_of(path)
        num_own = sum(other.name == own for other in self.parts)
        found = self.nearest(whole[None], top + num_own)[0]
        return [other for other in found if other.name != own][:top]

    def embed_sound(self, path: str | Path) -> Float[Tensor, " d"]:
        """The latent of a whole file: the mean of its clips, of unit length."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is not there: name a sound file")
        try:
            part = FilePart.of(Path(path))
            clips = Clips(self.transform, self.seconds)
            clips.add(part)
            samples = [clips.read(index)[0] for index in range(len(clips))]
        except BadFile as error:
            raise ValueError(str(error)) from error
        if clips.problems:
            raise ValueError(f"{part.name}: {clips.problems[0]}")
        latents = [self._embed(sample["audio"][None], torch.tensor([sample["audio_lengths"]])) for sample in samples]
        whole = F.normalize(torch.cat(latents).mean(dim=0), dim=0)
        if not whole.isfinite().all():
            raise ValueError(f"{part.name}: {NOT_FINITE}")
        return whole

    def embed_texts(self, texts: Sequence[str]) -> Float[Tensor, "q d"]:
        """Latents to compare with those of the clips."""
        if isinstance(texts, str) or not texts or not all(text.strip() for text in texts):
            raise ValueError(f"texts={texts!r}: give a list of texts that have words in them")
        with torch.inference_mode():
            return self.mulan.get_text_latents(raw_texts=list(texts)).float().cpu()

    def nearest(self, queries: Float[Tensor, "q d"], top: int = 10) -> list[list[Found]]:
        """For each latent (of unit length) the recordings whose best clip is nearest, the nearest first."""
        if not self.parts:
            raise ValueError("this index is empty: fill it with update, from a folder or a manifest")
        if top < 1:
            raise ValueError(f"top={top} must be at least 1")
        similarities = queries.cpu() @ self.latents.T
        best = torch.full((len(queries), len(self)), -torch.inf)
        best = best.scatter_reduce(1, self.owners.expand_as(similarities), similarities, "amax")
        ranked = best.argsort(dim=1, descending=True, stable=True)[:, :top]
        firsts = self._firsts
        return [
            [self._found(number, firsts[number], row) for number in numbers.tolist()]
            for row, numbers in zip(similarities, ranked, strict=True)
        ]

    def _found(self, number: int, first: int, similarities: Float[Tensor, " c"]) -> Found:
        part, begins = self.parts[number], self.begins[number]
        own = similarities[first : first + len(begins)]
        clip = int(own.argmax())
        start = part.start if isinstance(part, FilePart) else 0.0
        seconds = min(self.seconds, self.durations[number] - begins[clip])
        return Found(part.name, start + begins[clip], seconds, float(own[clip]))

    # ------------------------------------------------------------------ the folder

    @property
    def _made_with(self) -> dict[str, Any]:
        return {"format": FORMAT, "network": self._network_hash, "seconds": self.seconds}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The folder, for this process alone, and what another has left there meanwhile."""
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / LOCK_FILE).open("w")
        except OSError as error:
            if not (self.folder / INDEX_FILE).is_file():
                raise OSError(
                    f"{self.folder} cannot be written ({error.strerror}): choose another folder for the index"
                ) from error
            yield  # an index that one may only read: it is enough, as long as no sound is new
            return
        with lock as file:
            _wait_for(file.fileno(), self.folder)
            self._read(self.folder)
            yield

    def _save(self) -> None:
        assert self.folder is not None
        content = save({"latents": self.latents.contiguous()})
        name = f"latents-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
        write_whole(self.folder / name, content)
        rows = [
            {**_row(part), "begins": begins, "heard": duration}
            for part, begins, duration in zip(self.parts, self.begins, self.durations, strict=True)
        ]
        bad = [{**_row(part), "reason": reason} for part, reason in self.bad.items()]
        text = json.dumps({**self._made_with, "latents": name, "recordings": rows, "bad": bad}).encode()
        write_whole(self.folder / INDEX_FILE, text)
        for path in self.folder.glob("latents-*.safetensors"):
            if path.name == self._read_latents != name:
                path.unlink(missing_ok=True)
        self._read_hash, self._read_latents, self._num_unsaved = hashlib.sha256(text).hexdigest(), name, 0

    def _read(self, folder: Path) -> None:
        """Takes over what is kept in a folder, if it was made with the same network and clips and is not known yet."""
        path = folder / INDEX_FILE
        if not path.is_file():
            is_own = lambda name: name.startswith((".", "latents-"))  # what a kill leaves
            if folder.exists() and (not folder.is_dir() or not all(is_own(other.name) for other in folder.iterdir())):
                raise FileExistsError(f"{folder} is there already and no index of sounds: choose another folder for it")
            return
        text = path.read_bytes()
        if self._read_hash == (found := hashlib.sha256(text).hexdigest()):
            return
        self._read_hash = found
        try:
            index = json.loads(text)
            self._read_latents = index["latents"]
            if any(index[name] != value for name, value in self._made_with.items()):
                logger.info("%s is of another network, clips or version: every file is read anew", folder)
                return
            begins = [row.pop("begins") for row in index["recordings"]]
            durations = [row.pop("heard") for row in index["recordings"]]
            reasons = [row.pop("reason") for row in index["bad"]]
            parts = [FilePart(**row) for row in index["recordings"]]
            bad = [FilePart(**row) for row in index["bad"]]
            latents = load_state(folder / index["latents"])["latents"]
            if latents.shape != (sum(map(len, begins)), self.mulan.dim_latent):
                raise ValueError(f"it has {len(latents)} latents")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if path.is_file() and path.read_bytes() != text:
                self._read(folder)  # another process has just saved, and deleted these latents
            else:
                logger.warning("%s is damaged (%s): every file is read anew", folder, error)
            return
        self.parts, self.begins, self.durations, self._blocks = [*parts], begins, durations, [latents]
        self.bad, self._num_unsaved = dict(zip(bad, reasons, strict=True)), 0


def _row(part: Part) -> dict[str, Any]:
    assert isinstance(part, FilePart)
    return asdict(part)


def _wait_for(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.warning("another process is filling %s: waiting for it", folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:  # some network file systems have no locks
        logger.warning("%s cannot be locked (%s): see to it that one process alone fills it", folder, error)


def mulan_in(network: Network) -> MuLaN:
    """The MuLaN that a network is, or that it stands on."""
    found = _held(network)
    if found is None:
        raise ValueError(
            f"a {type(network).__name__} holds no MuLaN, by which sounds are compared with texts: give the run of one, or what stands on it"
        )
    if getattr(found.audio, "accept_spec", False):
        raise ValueError(
            "this MuLaN takes spectra (accept_spec=True), and cannot hear sounds: give one that takes waves"
        )
    return found


def _held(network: Network) -> MuLaN | None:
    if isinstance(network, MuLaN):
        return network
    return next(filter(None, map(_held, network.stages().values())), None)


def _comparable(read: Sequence[Heard], latents: Latents) -> tuple[list[Heard], Float[Tensor, "f d"]]:
    """Clips whose latents are not finite are as good as unreadable."""
    is_finite = latents.isfinite().all(dim=1)
    is_good = iter(is_finite.tolist())  # of those that could be read
    checked = [one if one.problem is not None or next(is_good) else replace(one, problem=NOT_FINITE) for one in read]
    return checked, latents[is_finite]


def _tell(what: str, problems: Mapping[str, str]) -> None:
    for number, (name, reason) in enumerate(problems.items()):
        level = logging.WARNING if number < NUM_BAD_FILES_TOLD else logging.DEBUG
        logger.log(level, "%s %s", what, f"{name}: {reason}".encode(errors="backslashreplace").decode())
