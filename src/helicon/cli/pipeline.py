"""`helicon pipeline audiolm --data FOLDER -o OUT [key=value ...]`: every stage of a model, from sounds to samples.

Adding a kind: a function that lists its steps (helicon.cli.steps), and its line in PIPELINES.
"""

import inspect
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from helicon.cli.generate import MANIFEST, loaded
from helicon.cli.steps import RECORD, Clusters, Stage, Step, Tokens, Work, make, replaced
from helicon.config import ConfigError

SAMPLES = 4  # sounds made at the end
MOST_LOOKED_AT = 1000  # items, in search of texts to make them from
SYNTHETIC = "synthetic"


class Kind(StrEnum):
    audiolm = "audiolm"


class Captions(StrEnum):
    column = "column"
    beside = "beside"
    folder = "folder"


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    data: str
    captions: str | None
    seconds: float | None
    size: str | None
    delayed: bool

    @property
    def has_texts(self) -> bool:
        return self.captions is not None or self.data == SYNTHETIC


def pipeline(
    kind: Annotated[Kind, typer.Argument(help="What to train.")],
    data: Annotated[str, typer.Option("--data", help="A folder or a manifest of sounds, or synthetic.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder of all stages.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the recipes: of all stages, as in num_train_steps=100, or of one, as in coarse.batch_size=8; and "
            "options of the other steps, as in kmeans.clusters=100 and tokens.workers=4.",
        ),
    ] = None,
    captions: Annotated[
        Captions | None,
        typer.Option(help="Where the texts of the sounds are; without it, the model learns to read none."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="How much of a sound is heard, and made, at a time; as the recipes say by default."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Which recipes: debug takes soundstream/debug, audiolm/coarse-debug and so on.")
    ] = None,
    delayed: Annotated[
        bool, typer.Option("--delayed", help="One transformer in the place of the coarse and the fine one.")
    ] = False,
) -> None:
    """Train every stage of a model on your data, one after the other. The same command goes on wherever it was stopped."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "a pipeline is one process: for several, train its stages with `accelerate launch -m helicon train`"
        )
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"--seconds {seconds:g} must be more than 0")
    request = Request(data, captions, seconds, size, delayed)
    work = Work.plan(f"helicon pipeline {kind}", out, PIPELINES[kind](request), overrides or ())
    claim(work, kind)
    work.carry_out()
    typer.echo(f"{out} is complete. Make more of it:\n  {next_command(work)}")


def claim(work: Work, kind: Kind) -> None:
    """The folder, if it is a new one or was begun by the same kind of pipeline."""
    folder = work.folder
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, not a folder: choose another place with -o")
    if work.recorded.get("kind", kind) != kind:
        raise FileExistsError(f"{folder} holds a pipeline of another kind: choose another folder with -o")
    if not (folder / RECORD).is_file() and folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} already holds something: choose another folder with -o")
    if not work.recorded:
        work.record("kind", kind)


# ---------------------------------------------------------------------- sounds with AudioLM

CODEC, KMEANS, TOKENS, AUDIOLM, SOUNDS = "codec", "kmeans", "tokens", "audiolm", "samples"
SEMANTIC, COARSE, FINE, DELAYED = "semantic", "coarse", "fine", "delayed"


def audiolm(request: Request) -> list[Step]:
    """Codec, semantic tokenizer, tokens, transformers, all of them as one model, and what that makes."""
    recipe = lambda name: f"audiolm/{name}" + ("" if request.size is None else f"-{request.size}")
    data = json.dumps(request.data)
    settings = [
        f"model.transformer.has_condition={json.dumps(request.has_texts)}",
        *([] if request.has_texts else ["model.transformer.t5_name=null"]),
        *([] if request.seconds is None else [f"data.data_max_length_seconds={request.seconds}"]),
        f"data.captions={json.dumps(request.captions)}",
    ]
    keys = {"data.source": TOKENS, "model.codec": CODEC, "model.wav2vec": KMEANS}
    below = {SEMANTIC: ("data.source", "model.wav2vec"), FINE: ("data.source", "model.codec")}
    names = [SEMANTIC, DELAYED] if request.delayed else [SEMANTIC, COARSE, FINE]
    stages = [Stage(name, recipe(name), {key: keys[key] for key in below.get(name, keys)}, settings) for name in names]
    return [
        Stage(CODEC, f"soundstream/{request.size or 'soundstream'}", {}, [f"data.source={data}"]),
        Clusters(KMEANS, request.data),
        Tokens(TOKENS, request.data, CODEC, KMEANS),
        *stages,
        Bundle(AUDIOLM, {"semantic_transformer": SEMANTIC, **_others(request.delayed)}),
        Samples(SOUNDS, {"model": AUDIOLM, "texts": TOKENS}),
    ]


def _others(delayed: bool) -> dict[str, str]:
    return {"coarse_transformer": DELAYED} if delayed else {"coarse_transformer": COARSE, "fine_transformer": FINE}


@dataclass(frozen=True)
class Bundle:
    """The stages as one `AudioLM`, which needs no other folder."""

    name: str
    stands_on: Mapping[str, str]

    def title(self, work: Work) -> str:
        return "all stages as one model"

    def check(self, work: Work) -> None:
        work.options(self.name, inspect.Signature())
        seconds_of(work)

    def is_done(self, work: Work) -> bool:
        return work.home(self.name).is_dir() and work.recorded.get(self.name) == self._made_of(work)

    def run(self, work: Work) -> None:
        from helicon.engine.checkpoint import resolve
        from helicon.models.audiolm.pipeline import AudioLM

        stages: dict[str, Any] = {key: loaded(resolve(work.home(name))) for key, name in self.stands_on.items()}
        if "fine_transformer" in stages:
            codec = stages["fine_transformer"].codec
            stages["fine_max_frames"] = round(seconds_of(work) * codec.sample_hz / codec.downsample_factor)
        model = AudioLM(**stages)
        with replaced(work.home(self.name)) as partial:
            model.save_pretrained(partial)
        work.record(self.name, self._made_of(work))

    def _made_of(self, work: Work) -> dict[str, str]:
        """The checkpoint of each stage."""
        from helicon.engine.checkpoint import checkpoints

        found = {name: checkpoints(work.home(name)) for name in self.stands_on.values()}
        return {name: folders[-1].name for name, folders in found.items() if folders}


@dataclass(frozen=True)
class Samples:
    """Sounds of the finished model: from texts of the data, or from nothing."""

    name: str
    stands_on: Mapping[str, str]

    def title(self, work: Work) -> str:
        return "what it makes"

    def check(self, work: Work) -> None:
        work.options(self.name, inspect.Signature())

    def is_done(self, work: Work) -> bool:
        is_of_the_model = work.recorded.get(self.name) == work.recorded.get(self.stands_on["model"])
        return work.home(self.name).is_dir() and is_of_the_model

    def run(self, work: Work) -> None:
        from helicon.models.audiolm.sounds import SoundMaker

        model = self.stands_on["model"]
        maker = SoundMaker(loaded(work.home(model)), texts=texts_of(work), seconds=seconds_of(work))
        make(maker, max(1, SAMPLES // len(maker.prompts)), work.home(self.name))
        work.record(self.name, work.recorded[model])


def seconds_of(work: Work) -> float:
    """How much of a sound the stages have learned from at a time."""
    data = work.recipes[SEMANTIC].data
    if data.get("data_max_length_seconds") is None:
        raise ConfigError("how long sounds are must be told in seconds: give data_max_length_seconds to all stages")
    return data["data_max_length_seconds"]


def texts_of(work: Work) -> list[str]:
    """Different texts of the data, from all over it; none, where the model reads none."""
    from helicon.data.dataset import BadFile
    from helicon.data.tokens import TokenCache

    if not work.recipes[SEMANTIC].model["transformer"].get("has_condition"):
        return []
    cache = TokenCache(work.home(TOKENS))
    found: dict[str, None] = {}
    for index in range(0, len(cache), max(1, len(cache) // MOST_LOOKED_AT)):
        with suppress(BadFile):
            found[cache[index]["texts"]] = None
    texts = list(found)
    return texts[:: max(1, len(texts) // SAMPLES)][:SAMPLES]


def next_command(work: Work) -> str:
    """What makes more sounds."""
    first, *_ = (work.home(SOUNDS) / MANIFEST).read_text(encoding="utf-8").splitlines()
    text = json.loads(first)["text"]
    words = ["helicon", "generate", str(work.home(AUDIOLM)), *(["--text", text] if text else [])]
    return shlex.join([*words, "--samples", "8", f"seconds={seconds_of(work):g}"])


PIPELINES: Mapping[Kind, Callable[[Request], Sequence[Step]]] = {Kind.audiolm: audiolm}
