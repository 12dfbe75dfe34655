"""What can be trained, and what makes things once it is: the only list. A new family adds one line to `entries` and a recipe.

Classes are named by text and imported when they are used, so that the list itself is light.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from helicon.config import ConfigError, Constructor, Recipe, check, nearest, signature_without

if TYPE_CHECKING:
    from helicon.engine.trainer import Trainer
    from helicon.nn.network import Network


@runtime_checkable
class Made(Protocol):
    """One thing a network made: a picture, a sound, a mesh."""

    def write(self, path: Path) -> object: ...


@runtime_checkable
class Maker(Protocol):
    """Makes files with a trained network (`helicon generate`).

    Built as `maker(network, texts=..., **options)`. The keywords of the constructor are the options of the command line: those that
    are not there are refused, and so a constructor raises ValueError for everything else it can tell is wrong before work begins.
    """

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of the files, the usual one first."""
        ...

    @property
    def prompts(self) -> Sequence[str]:
        """What is to be made, in words: one or more things of each."""
        ...

    def make(self, which: Sequence[int], seed: int) -> Sequence[Made]:
        """One thing for each of these indices of `prompts`, as one batch."""
        ...

    def beside(self, path: Path) -> Path | None:
        """The picture that is written with a file of this name; None where there is none."""
        ...

    @property
    def sheet(self) -> Callable[[Sequence[Any]], Made] | None:
        """Shows several things as one picture: one of each prompt, then again one of each. None where there is none."""
        ...


@dataclass(frozen=True)
class Entry:
    """One kind of model that can be trained from a recipe."""

    summary: str
    model: str  # module:class or function, gives the Network from the recipe's `model` section
    trainer: str  # module:class, a Trainer whose first argument is that network
    data: str  # module:function, gives the dataset from the recipe's `data` section
    debug_recipe: str  # trains in seconds on made-up data: what the contract test runs
    # By the class of a network, as its config names it: module:class, the Maker that makes things with it.
    makers: Mapping[str, str] = field(default_factory=dict)
    # Likewise: module:class, the data.tokens.Tokenizer that makes with it the token caches this kind of model learns from.
    tokenizers: Mapping[str, str] = field(default_factory=dict)

    def recipe_sections(self) -> Mapping[str, Constructor]:
        """The constructors whose signatures are the schema of a recipe."""
        data, trainer = _named(self.data), _named(self.trainer)
        first = next(iter(signature_without(trainer).parameters))
        # What a program passes itself, and what the `data` section says already.
        given = {"dataset", "val_dataset", "train_dataloader", "val_dataloader", "folder", "accelerator", "ds_fields"}
        given |= {"data_kwargs"}  # another name of the last
        given |= signature_without(data).parameters.keys() - {"seed"}
        options = signature_without(trainer, first, *given)
        return {"model": _named(self.model), "data": data, "trainer": _with_aliases(options)}


entries: dict[str, Entry] = {
    "soundstream": Entry(
        summary="audio codec: waves to a few codes a frame and back",
        model="helicon.models.soundstream.model:SoundStream",
        trainer="helicon.models.soundstream.trainers:SoundStreamTrainer",
        data="helicon.models.soundstream.trainers:training_sounds",
        debug_recipe="soundstream/debug",
        makers={"helicon.models.soundstream.model:SoundStream": "helicon.models.soundstream.sounds:CodedSoundMaker"},
    ),
    "semantic": Entry(
        summary="AudioLM, first stage: semantic tokens, from texts or from nothing",
        model="helicon.models.audiolm.trainers:build_semantic",
        trainer="helicon.models.audiolm.trainers:StageTrainer",
        data="helicon.models.audiolm.data:training_audio",
        debug_recipe="audiolm/semantic-debug",
        makers={
            "helicon.models.audiolm.wrappers:SemanticTransformerWrapper": "helicon.models.audiolm.sounds:SoundMaker",
            "helicon.models.audiolm.pipeline:AudioLM": "helicon.models.audiolm.sounds:SoundMaker",
        },
    ),
    "coarse": Entry(
        summary="AudioLM, second stage: the codec's first codes from semantic tokens",
        model="helicon.models.audiolm.trainers:build_coarse",
        trainer="helicon.models.audiolm.trainers:StageTrainer",
        data="helicon.models.audiolm.data:training_audio",
        debug_recipe="audiolm/coarse-debug",
        tokenizers=dict.fromkeys(
            (
                "helicon.models.soundstream.model:SoundStream",
                "helicon.models.soundstream.codecs:EncodecWrapper",
                "helicon.models.soundstream.codecs:DacCodec",
                "helicon.models.soundstream.codecs:MimiCodec",
                "helicon.models.semantic.tokenizer:MelKmeans",
                "helicon.models.semantic.tokenizer:HubertWithKmeans",
                "helicon.models.semantic.tokenizer:Wav2Vec2Quantizer",
            ),
            "helicon.models.audiolm.data:AudioTokenizer",
        ),
    ),
    "fine": Entry(
        summary="AudioLM, third stage: the codec's other codes from its first",
        model="helicon.models.audiolm.trainers:build_fine",
        trainer="helicon.models.audiolm.trainers:StageTrainer",
        data="helicon.models.audiolm.data:training_audio",
        debug_recipe="audiolm/fine-debug",
    ),
    "delayed": Entry(
        summary="AudioLM, second and third stage in one: all codes, one step a frame",
        model="helicon.models.audiolm.trainers:build_delayed",
        trainer="helicon.models.audiolm.trainers:StageTrainer",
        data="helicon.models.audiolm.data:training_audio",
        debug_recipe="audiolm/delayed-debug",
    ),
    "vqgan": Entry(
        summary="image tokenizer: pictures to a grid of codes and back",
        model="helicon.models.muse.vqgan:VQGanVAE",
        trainer="helicon.models.muse.trainers:VQGanVAETrainer",
        data="helicon.models.muse.trainers:training_images",
        debug_recipe="muse/vqgan-debug",
    ),
    "maskgit": Entry(
        summary="pictures from words: fills in the tokens of an image tokenizer",
        model="helicon.models.muse.trainers:build_maskgit",
        trainer="helicon.models.muse.trainers:MaskGitTrainer",
        data="helicon.models.muse.trainers:training_images",
        debug_recipe="muse/maskgit-debug",
        makers={
            "helicon.models.muse.maskgit:MaskGit": "helicon.models.muse.pictures:PictureMaker",
            "helicon.models.muse.pipeline:Muse": "helicon.models.muse.pictures:PictureMaker",
        },
        tokenizers={
            "helicon.models.muse.vqgan:VQGanVAE": "helicon.models.muse.trainers:ImageTokenizer",
            "helicon.models.muse.maskgit:MaskGit": "helicon.models.muse.trainers:ImageTokenizer",
        },
    ),
    "voicebox": Entry(
        summary="speech from words, in the voice of a prompt; fills in what is missing of a recording",
        model="helicon.models.voicebox.trainers:build_voicebox",
        trainer="helicon.models.voicebox.trainers:VoiceBoxTrainer",
        data="helicon.models.voicebox.data:training_speech",
        debug_recipe="voicebox/voicebox-debug",
        makers={
            "helicon.models.voicebox.flow:ConditionalFlowMatcherWrapper": "helicon.models.voicebox.speech:SpeechMaker",
        },
        tokenizers=dict.fromkeys(
            (
                "helicon.models.voicebox.features:MelVoco",
                "helicon.models.voicebox.features:CodecLatents",
                "helicon.models.voicebox.features:EncodecVoco",
                "helicon.models.voicebox.vocoder:Vocoder",
                "helicon.models.voicebox.flow:ConditionalFlowMatcherWrapper",
            ),
            "helicon.models.voicebox.data:SpeechTokenizer",
        ),
    ),
    "duration-predictor": Entry(
        summary="how long each phoneme of a text lasts",
        model="helicon.models.voicebox.trainers:build_durations",
        trainer="helicon.models.voicebox.duration_task:DurationPredictorTrainer",
        data="helicon.models.voicebox.data:training_speech",
        debug_recipe="voicebox/durations-debug",
    ),
    "vocoder": Entry(
        summary="vocoder: log-mel frames to sound",
        model="helicon.models.voicebox.vocoder:Vocoder",
        trainer="helicon.models.voicebox.vocoder_task:VocoderTrainer",
        data="helicon.models.soundstream.trainers:training_sounds",
        debug_recipe="voicebox/vocoder-debug",
    ),
    "mulan": Entry(
        summary="sounds and texts in one space: which belong together",
        model="helicon.models.musiclm.trainers:build_mulan",
        trainer="helicon.models.musiclm.trainers:MuLaNTrainer",
        data="helicon.models.musiclm.data:training_captioned",
        debug_recipe="musiclm/mulan-debug",
        makers={"helicon.models.musiclm.generate:MusicLM": "helicon.models.musiclm.music:MusicMaker"},
    ),
    "mesh-autoencoder": Entry(
        summary="mesh tokenizer: a few codes for each vertex, and back",
        model="helicon.models.meshgpt.autoencoder:MeshAutoencoder",
        trainer="helicon.models.meshgpt.trainers:MeshAutoencoderTrainer",
        data="helicon.models.meshgpt.data:training_meshes",
        debug_recipe="meshgpt/autoencoder-debug",
    ),
    "mesh-transformer": Entry(
        summary="meshes from words: the tokens of one face after another",
        model="helicon.models.meshgpt.trainers:build_mesh_transformer",
        trainer="helicon.models.meshgpt.trainers:MeshTransformerTrainer",
        data="helicon.models.meshgpt.data:training_meshes",
        debug_recipe="meshgpt/transformer-debug",
        makers={"helicon.models.meshgpt.transformer:MeshTransformer": "helicon.models.meshgpt.meshes:MeshMaker"},
        tokenizers=dict.fromkeys(
            (
                "helicon.models.meshgpt.autoencoder:MeshAutoencoder",
                "helicon.models.meshgpt.compact:CompactMeshTokenizer",
                "helicon.models.meshgpt.transformer:MeshTransformer",
            ),
            "helicon.models.meshgpt.data:MeshTokenizer",
        ),
    ),
}


def build_trainer(recipe: Recipe, *, results_folder: Path | None = None, resume: bool = False) -> "Trainer":
    """The trainer a recipe describes, with its network and its data."""
    from helicon.engine.runtime import seed_everything

    if recipe.trains not in entries:
        raise ConfigError(f"nothing that can be trained is called {recipe.trains!r}: {nearest(recipe.trains, entries)}")
    entry = entries[recipe.trains]
    sections = entry.recipe_sections()
    keywords = {name: check(constructor, getattr(recipe, name), name) for name, constructor in sections.items()}
    options = keywords["trainer"]
    if results_folder is not None:
        options["results_folder"] = results_folder
    options.setdefault("results_folder", Path("runs") / recipe.name.replace("/", "-"))
    if resume:
        options["resume"] = True
    seed_everything(options.get("seed", 0))
    network = _built("model", _named(entry.model), **keywords["model"])
    dataset = _built("data", _named(entry.data), **keywords["data"])
    return _built("trainer", _named(entry.trainer), network, dataset=dataset, **options)


def _built(section: str, constructor: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What a section describes; a wrong keyword deep inside it (of a scheduler, a quantizer) is the user's to mend."""
    try:
        return constructor(*arguments, **keywords)
    except TypeError as error:
        raise ConfigError(f"the section {section} cannot be built: {error}") from error


def _with_aliases(options: inspect.Signature) -> inspect.Signature:
    """The options, also by the names other packages give them."""
    from helicon.engine.options import ALIASES

    known = options.parameters
    others = [known[name].replace(name=alias, default=None) for alias, name in ALIASES.items() if name in known]
    return options.replace(parameters=[*known.values(), *others])


def load(path: str | Path, use_ema: bool = True) -> "Network":
    """The network of a run, a checkpoint or a saved folder, with the stages it stands on."""
    from helicon.engine.checkpoint import resolve
    from helicon.nn.network import load_network

    return load_network(resolve(Path(path)), use_ema=use_ema)


def maker_of(folder: Path) -> Callable[..., Maker]:
    """Who makes things with the network that is saved in a folder."""
    from helicon.nn.network import read_config

    network = read_config(folder)["class"]
    makers = {name: maker for entry in entries.values() for name, maker in entry.makers.items()}
    if network not in makers:
        able = sorted(name.partition(":")[2] for name in makers)
        raise ValueError(
            f"{folder} holds a {network.partition(':')[2]}, which makes nothing by itself: give a run of one that does "
            f"({', '.join(able)})"
        )
    return _named(makers[network])


def tokenizer_of(folder: Path) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The Tokenizer that makes token caches with the network saved in a folder, and the factory of the data it reads."""
    from helicon.nn.network import read_config

    network = read_config(folder)["class"]
    found = {name: (kind, entry.data) for entry in entries.values() for name, kind in entry.tokenizers.items()}
    if network not in found:
        able = sorted(name.partition(":")[2] for name in found)
        raise ValueError(
            f"{folder} holds a {network.partition(':')[2]}, which makes no tokens: give a run of one that does ({', '.join(able)})"
        )
    kind, data = found[network]
    return _named(kind), _named(data)


def _named(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
