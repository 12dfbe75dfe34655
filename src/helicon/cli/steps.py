"""Several stages, one after the other: what `helicon pipeline` and `helicon demo` do.

The work is a list of steps, each in a folder of its name: runs from recipes, and what is made between them. A step that is done is
skipped, and one that was interrupted goes on where it was. So the same command always continues, and a new kind of pipeline is
another list.
"""

import difflib
import gc
import inspect
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, get_args, get_origin, runtime_checkable

import typer

from helicon.cli.fit_kmeans import CLUSTERS, MEL, SYNTHETIC, fit_kmeans
from helicon.cli.generate import check_writable, produce, write_folder
from helicon.cli.progress import progress
from helicon.cli.tokenize import tokenize
from helicon.cli.train import RECIPE_FILE, run, sections
from helicon.config import SECTIONS, ConfigError, Recipe, check, load_recipe, parse_yaml, signature_without

if TYPE_CHECKING:
    from helicon.registry import Maker

BATCH_SIZE = 8  # things made at once
RECORD = "pipeline.json"  # what steps were done with, where their folders do not tell

# Arguments of a stage's data section that say where and how often, not what: a token cache does not depend on them.
NOT_OF_A_CACHE = ("source", "end_prob")
# And such as choose among made-up sounds.
OF_MADE_UP = ("num_samples", "seed", "sounds")
# Settings of a run, and options of a tokenizer, that say how long or how fast, not what is learned or fitted.
NOT_OF_A_RUN = (
    "trainer.num_train_steps",
    "trainer.num_workers",
    "trainer.log_every",
    "trainer.save_results_every",
    "trainer.save_model_every",
    "trainer.keep_last",
    "trainer.tensorboard",
)
NOT_OF_CLUSTERS = ("batch_size", "workers")


@runtime_checkable
class Step(Protocol):
    @property
    def name(self) -> str:
        """Of its folder, and of the overrides that are meant for it."""
        ...

    @property
    def stands_on(self) -> Mapping[str, str]:
        """The names of earlier steps whose folders it reads, by what it calls them."""
        ...

    def title(self, work: "Work") -> str:
        """What it does, in a few words."""
        ...

    def check(self, work: "Work") -> None:
        """Raises ConfigError where it can tell before anything is made that it will not do."""
        ...

    def is_done(self, work: "Work") -> bool: ...

    def run(self, work: "Work") -> None: ...


@dataclass(frozen=True)
class Work:
    """Steps to take, and where."""

    command: str  # that began it, less its arguments
    folder: Path
    steps: Sequence[Step]
    overrides: Sequence[str]
    recipes: Mapping[str, Recipe]  # of the stages among the steps

    @classmethod
    def plan(cls, command: str, folder: Path, steps: Sequence[Step], overrides: Iterable[str]) -> "Work":
        overrides = list(overrides)
        work = cls(command, folder, steps, overrides, read_recipes(steps, overrides, folder))
        for step in steps:
            step.check(work)
        return work

    def home(self, name: str) -> Path:
        return self.folder / name

    def options(self, name: str, known: inspect.Signature, **defaults: Any) -> dict[str, Any]:
        """What a step without a recipe is to do, by its defaults and the overrides: `kmeans.clusters=100`."""
        given = dict(defaults)
        for override in self.overrides:
            key, equals, value = override.removeprefix(f"{name}.").partition("=")
            if not override.startswith(f"{name}."):
                continue
            if not equals:
                raise ConfigError(f"{override!r} is no override: write {name}.KEY=VALUE")
            given[key] = parse_yaml(value, override)
        return check(known, given, name)

    def standing_on(self, name: str) -> list["Stage"]:
        return [step for step in self.steps if isinstance(step, Stage) and name in step.stands_on.values()]

    @property
    def recorded(self) -> dict[str, Any]:
        path = self.folder / RECORD
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as error:
            raise ConfigError(
                f"{path} is damaged: choose another folder with -o (--codec takes over the codec)"
            ) from error

    def record(self, name: str, value: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{RECORD}.partial"
        partial.write_text(json.dumps({**self.recorded, name: value}, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.folder / RECORD)

    def carry_out(self) -> None:
        check_order(self)
        for number, step in enumerate(self.steps, 1):
            if step.is_done(self):
                continue
            check_writable(self.folder)
            typer.echo(f"[{number}/{len(self.steps)}] {step.name}: {step.title(self)}")
            check_runs_below(step, self)
            try:
                step.run(self)
            except (KeyboardInterrupt, SystemExit, typer.Exit):
                typer.echo(f"The same command ({self.command} ...) goes on from here.")
                raise
            gc.collect()  # the memory that a trainer held is the next step's


# ---------------------------------------------------------------------- runs from recipes


@dataclass(frozen=True)
class Stage:
    """A run from a recipe.

    `stands_on` are keys of the recipe which name the folder of an earlier step, `settings` overrides of the pipeline itself.
    """

    name: str
    recipe: str
    stands_on: Mapping[str, str] = field(default_factory=dict)
    settings: Sequence[str] = ()

    def title(self, work: Work) -> str:
        return f"{self.recipe}, {work.recipes[self.name].note('time')}"

    def check(self, work: Work) -> None:
        """(Its recipe is checked when it is read.)"""

    def is_done(self, work: Work) -> bool:
        """Whether a run with these settings has come to its end (or was continued beyond it)."""
        from helicon.engine.checkpoint import checkpoints, folder_name

        home, recipe = work.home(self.name), work.recipes[self.name]
        steps = recipe.trainer["num_train_steps"]
        return any(found.name >= folder_name(steps) for found in checkpoints(home)) and not self.differs(work)

    def run(self, work: Work) -> None:
        run(work.recipes[self.name], results_folder=work.home(self.name), resume=True)

    def is_begun(self, work: Work) -> bool:
        from helicon.engine.checkpoint import checkpoints

        return bool(checkpoints(work.home(self.name)))

    def unfinished(self, work: Work) -> str:
        """How it has fewer steps than are asked for."""
        from helicon.engine.checkpoint import checkpoints

        *_, newest = [0, *(int(found.name.removeprefix("step-")) for found in checkpoints(work.home(self.name)))]
        if not newest:
            return "that has lost its checkpoints: put them back"
        asked = work.recipes[self.name].trainer["num_train_steps"]
        return f"that would be trained from step {newest} to {asked}: give {self.name}.num_train_steps={newest}"

    def differs(self, work: Work) -> list[str]:
        """The settings that a run in the folder was begun with otherwise; how long it lasts is none of them."""
        begun, now = load_recipe(work.home(self.name) / RECIPE_FILE), work.recipes[self.name]
        found = ["trains"] if begun.trains != now.trains else []
        for section in SECTIONS:
            before, after = getattr(begun, section), getattr(now, section)
            keys = dict.fromkeys([*before, *after])
            found += [
                f"{section}.{key}"
                for key in keys
                if not self._is_same(f"{section}.{key}", before.get(key), after.get(key), work)
            ]
        return [key for key in found if key not in NOT_OF_A_RUN]

    def _is_same(self, key: str, before: Any, after: Any, work: Work) -> bool:
        """Whether two values of a setting mean the same; of a step in this folder, which may have been moved since, the name tells."""
        step = self.stands_on.get(key)
        if step is not None and isinstance(before, str) and after == str(work.home(step)):
            return Path(before).name == step
        return is_same(before, after)


@dataclass(frozen=True)
class Given:
    """A network that is there already, in the place of a stage. It is copied, so that the folder of all stages needs no other.

    The option that names it (`--codec PATH`) is called as the step is.
    """

    name: str
    path: Path  # a run, a checkpoint or a saved network
    kind: str  # in a word
    members: Sequence[str]  # that one of this kind has
    stands_on: Mapping[str, str] = field(default_factory=dict)

    @property
    def option(self) -> str:
        return f"--{self.name} {self.path}"

    def title(self, work: Work) -> str:
        return f"copied from {self.path}"

    def check(self, work: Work) -> None:
        from helicon.nn.network import find_class, read_config

        found = find_class(read_config(self.source(work))["class"])
        if not all(hasattr(found, member) for member in self.members):
            raise ConfigError(f"{self.option} holds a {found.__name__}, not a {self.kind}: give the run of one")
        for override in work.overrides:
            if override.startswith(f"{self.name}."):
                raise ConfigError(
                    f"{override} is for training, and {self.option} is used as it is: leave out one of both"
                )

    def is_done(self, work: Work) -> bool:
        home = work.home(self.name)
        return is_copy(home) and (
            self.source(work) == home or self.hashes == work.recorded.get(self.name, {}).get("files")
        )

    def run(self, work: Work) -> None:
        from helicon.nn.network import load_network

        home = work.home(self.name)
        home.parent.mkdir(parents=True, exist_ok=True)
        with replaced(home) as partial:
            load_network(self.original).save(partial)
        work.record(self.name, {"path": str(self.path.expanduser().resolve()), "files": self.hashes})

    def source(self, work: Work) -> Path:
        """Where it is read from: the original, or its copy once that is gone."""
        try:
            return self.original
        except FileNotFoundError as error:
            home = work.home(self.name)
            if not is_copy(home) or not is_same(work.recorded.get(self.name, {}).get("path"), str(self.path)):
                raise FileNotFoundError(f"--{self.name}: {error}") from error
            return home

    @cached_property
    def original(self) -> Path:
        """(Found, and verified, once: that reads all of it.)"""
        from helicon.engine.checkpoint import resolve

        return resolve(self.path)

    @cached_property
    def hashes(self) -> str:
        """Of its files, which tell it from another."""
        from helicon.nn.network import CONFIG_FILE, EMA_FILE, WEIGHTS_FILE, sha256

        files = [self.original / name for name in (CONFIG_FILE, WEIGHTS_FILE, EMA_FILE)]
        return " ".join(sha256(file)[:16] for file in files if file.is_file())


def is_copy(home: Path) -> bool:
    """Whether this is a saved network, not a run."""
    from helicon.nn.network import CONFIG_FILE

    return (home / CONFIG_FILE).is_file()


def read_recipes(steps: Sequence[Step], overrides: Iterable[str], folder: Path) -> dict[str, Recipe]:
    """The recipe of each stage, with the overrides that are meant for it: those that name it, and those that name no step."""
    names = [step.name for step in steps]
    for override in overrides:
        named, dot, rest = override.partition(".")
        meant = difflib.get_close_matches(named, names, n=1, cutoff=0.7)
        if dot and "=" not in named and named not in (*names, *SECTIONS) and meant:
            raise ConfigError(f"no stage is called {named!r}: did you mean {meant[0]}.{rest}?")
    found = {}
    for stage in (step for step in steps if isinstance(step, Stage)):
        meant = [
            override.removeprefix(f"{stage.name}.")
            for override in overrides
            if override.startswith(f"{stage.name}.") or override.partition(".")[0] not in names
        ]
        below = [f"{key}={json.dumps(str(folder / earlier))}" for key, earlier in stage.stands_on.items()]
        try:
            found[stage.name] = load_recipe(stage.recipe, [*stage.settings, *below, *meant], sections=sections)
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name}: {error} (for one stage alone: {stage.name}.KEY=VALUE)") from error
    return found


def is_same(before: Any, after: Any) -> bool:
    """Whether two values are equal, or two spellings of one path."""
    if isinstance(before, str) and isinstance(after, str):
        return before == after or Path(before).expanduser().resolve() == Path(after).expanduser().resolve()
    return bool(before == after)


def check_order(work: Work) -> None:
    """What was begun goes on as it was, and what others were trained on stays as it is, also where it is read through what was made of it.
    (A token cache is brought up to date.)"""
    begun = [step for step in work.steps if isinstance(step, Stage) and step.is_begun(work)]
    for step in (step for step in work.steps if not isinstance(step, Tokens) and not step.is_done(work)):
        others = step.differs(work) if isinstance(step, Stage) and step in begun else []
        on_it = [later for later in begun if step.name in bases(later, work)]
        is_other = _is_of_another_kind(step, work)
        if on_it:
            problem = f"the {on_it[0].name} in {work.folder} was trained on a {step.name} {_unlike(step, others, work)}"
        elif is_other:
            problem = f"{work.folder} has a {step.name} {_unlike(step, others, work)}"
        elif others:
            problem = f"the {step.name} in {work.folder} was begun with another {others[0]}: give that again"
        else:
            continue
        outdated = [str(work.home(one.name)) for one in [*([step] if others or is_other else []), *on_it]]
        raise ConfigError(
            f"{problem}, or a new folder with --out; or delete {' and '.join(outdated)}: what is missing, and all that stands on it, is made anew"
        )


def check_runs_below(step: Step, work: Work) -> None:
    """Raises where the last checkpoint of a run that the step reads is damaged: the one before would be read, whose training is not done and
    which other steps did not stand on."""
    from helicon.engine.checkpoint import DamagedCheckpoint, checkpoints, verify

    for name in dict.fromkeys(step.stands_on.values()):
        for newest in checkpoints(work.home(name))[-1:]:
            try:
                verify(newest)
            except DamagedCheckpoint as error:
                begun = [one for one in work.steps if isinstance(one, Stage) and one.is_begun(work)]
                on_it = [str(work.home(one.name)) for one in begun if name in bases(one, work)]
                raise ConfigError(
                    f"{error}: put it back, or delete {' and '.join([str(newest), *on_it])}: what is missing is made anew"
                ) from error


def _is_of_another_kind(step: Step, work: Work) -> bool:
    """Whether what is there was trained, and is to be copied now, or the other way round."""
    from helicon.engine.checkpoint import checkpoints

    home = work.home(step.name)
    return bool(checkpoints(home)) if isinstance(step, Given) else isinstance(step, Stage) and is_copy(home)


def _unlike(step: Step, others: Sequence[str], work: Work) -> str:
    """How what a stage was trained on is not what is asked for now, and the first remedy."""
    if not work.home(step.name).exists():
        return "that is gone: put it back"
    if isinstance(step, Given) and _is_of_another_kind(step, work):
        return f"that was trained in {work.home(step.name)}, and {step.option} is another: give no --{step.name}"
    if isinstance(step, Given) or _is_of_another_kind(step, work):
        known = work.recorded.get(step.name, {}).get("path", "elsewhere")
        asked = f", and {step.option} is another" if isinstance(step, Given) else ""
        return f"copied from {known}{asked}: give --{step.name} {known} as it was"
    if others:
        return f"with another {others[0]}: give that again"
    if isinstance(step, Stage):
        return step.unfinished(work)
    return f"with {step.changed(work) if isinstance(step, Clusters) else 'other settings'}: give those again"


def bases(step: Step, work: Work) -> set[str]:
    """The names of the steps that it stands on, itself or through what was made of them; less what only its token cache was made of."""
    found = {*step.stands_on.values()}
    for below in work.steps:
        if below.name in found and isinstance(below, Clusters):
            found |= bases(below, work)
    return found


# ---------------------------------------------------------------------- what is made between them


@dataclass(frozen=True)
class Clusters:
    """A semantic tokenizer, fitted to the data (`helicon fit-kmeans`, whose options are its overrides).

    By default it has as many clusters as the recipes that stand on it would give to one of their own.
    """

    name: str
    data: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    stands_on: Mapping[str, str] = field(default_factory=dict)

    def title(self, work: Work) -> str:
        return "{clusters} clusters of {model} features".format(
            **{"clusters": CLUSTERS, "model": MEL, **self._options(work)}
        )

    def check(self, work: Work) -> None:
        self._options(work)

    def is_done(self, work: Work) -> bool:
        return work.home(self.name).is_dir() and self.name in work.recorded and not self._differs(work)

    def run(self, work: Work) -> None:
        home = work.home(self.name)
        if home.exists():
            shutil.rmtree(home)  # one that was interrupted, or is of other settings
        home.parent.mkdir(parents=True, exist_ok=True)
        fit_kmeans(data=self.data, out=home, **self._options(work))
        work.record(self.name, self._settings(work))

    def usual(self, work: Work) -> dict[str, Any]:
        """The options that follow from the other steps."""
        tokenizers = [load_recipe(stage.recipe).model.get("wav2vec") for stage in work.standing_on(self.name)]
        known = [tokenizer for tokenizer in tokenizers if isinstance(tokenizer, Mapping)]
        return {"clusters": known[0]["codebook_size"]} if known and "codebook_size" in known[0] else {}

    def changed(self, work: Work) -> str:
        """What it was made with, and would not be now."""
        before, now = work.recorded.get(self.name, {}), self._settings(work)
        first = "".join(f" ({name} was {before.get(name)}, and is {now.get(name)})" for name in self._differs(work)[:1])
        return f"other settings{first}"

    def _differs(self, work: Work) -> list[str]:
        before, now = work.recorded.get(self.name, {}), self._settings(work)
        return [name for name in dict.fromkeys([*before, *now]) if not is_same(before.get(name), now.get(name))]

    def _options(self, work: Work) -> dict[str, Any]:
        return work.options(self.name, _fitting(), **{**self.usual(work), **self.defaults})

    def _settings(self, work: Work) -> dict[str, Any]:
        """All that decides what it is: as recorded, so that it can be compared."""
        steps = {str(work.home(name)): name for name in self.stands_on.values()}  # the folder of all may be moved
        options = {
            name: steps.get(value, value) if isinstance(value, str) else value
            for name, value in self._options(work).items()
            if name not in NOT_OF_CLUSTERS
        }
        read = {f"checkpoint of {name}": found for name, found in newest_of(work, self.stands_on.values()).items()}
        return {"data": self.data, **options, **read}


def newest_of(work: Work, names: Iterable[str]) -> dict[str, str]:
    """The newest checkpoint of each of these runs, by its step and the hashes of its weights: a run may have been made anew. Of what was
    copied, the hashes."""
    from helicon.engine.checkpoint import checkpoints, read_manifest
    from helicon.nn.network import EMA_FILE, WEIGHTS_FILE

    found = {}
    for name in names:
        if is_copy(work.home(name)):
            found[name] = work.recorded.get(name, {}).get("files", "")
        for newest in checkpoints(work.home(name))[-1:]:
            files = read_manifest(newest)["files"]
            hashes = [files[weights]["sha256"][:16] for weights in (WEIGHTS_FILE, EMA_FILE) if weights in files]
            found[name] = " ".join([newest.name, *hashes])
    return found


def _fitting() -> inspect.Signature:
    return options_of(fit_kmeans, "data", "out")


@dataclass(frozen=True)
class Tokens:
    """The token cache (`helicon tokenize`) that later stages learn from, made as their recipes ask for."""

    name: str
    data: str
    stands_on: Mapping[str, str]  # the codec, and the other networks by their options of the command

    def title(self, work: Work) -> str:
        return ", ".join([f"of {self.data}", *self._arguments(work)])

    def check(self, work: Work) -> None:
        self._options(work)
        self._arguments(work)

    def is_done(self, work: Work) -> bool:
        """It is brought up to date as long as somebody is to learn from it."""
        return all(stage.is_done(work) for stage in work.standing_on(self.name))

    def run(self, work: Work) -> None:
        others: dict[str, Any] = {name: work.home(step) for name, step in self._others.items()}
        tokenize(
            run=work.home(self.stands_on["codec"]),
            **others,
            data=self.data,
            out=work.home(self.name),
            overrides=self._arguments(work),
            **self._options(work),
        )

    def _options(self, work: Work) -> dict[str, Any]:
        return work.options(
            self.name, options_of(tokenize, "run", "semantic", "conditioner", "data", "out", "overrides")
        )

    @property
    def _others(self) -> dict[str, str]:
        """The steps of further networks."""
        return {name: step for name, step in self.stands_on.items() if name != "codec"}

    def _arguments(self, work: Work) -> list[str]:
        """Of the data section, in which the stages must agree."""
        left_out = NOT_OF_A_CACHE if self.data == SYNTHETIC else (*NOT_OF_A_CACHE, *OF_MADE_UP)
        found: dict[str, tuple[str, Any]] = {}
        for stage in work.standing_on(self.name):
            for key, value in work.recipes[stage.name].data.items():
                if key in left_out:
                    continue
                first, known = found.setdefault(key, (stage.name, value))
                if known != value:
                    raise ConfigError(
                        f"the stages learn from one token cache, and {first} has data.{key}={known} where {stage.name} "
                        f"has {value}: make them equal, as in data.{key}={known}"
                    )
        return [f"{key}={json.dumps(value)}" for key, (_, value) in found.items() if value is not None]


def options_of(verb: Callable[..., None], *given: str) -> inspect.Signature:
    """The options of a command, but for those that are given here, with plain types."""
    plain = lambda kind: get_args(kind)[0] if get_origin(kind) is Annotated else kind
    known = signature_without(verb, *given)
    return known.replace(
        parameters=[entry.replace(annotation=plain(entry.annotation)) for entry in known.parameters.values()]
    )


# ---------------------------------------------------------------------- what comes of them


def make(maker: "Maker", samples: int, folder: Path) -> None:
    """So many things of each prompt, in the place of those that were there."""
    things = progress(produce(maker, samples, seed=0, batch_size=BATCH_SIZE), samples * len(maker.prompts))
    with replaced(folder) as partial:
        partial.mkdir()
        write_folder(things, maker, partial, seed=0)


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Where to write what takes the place of a folder, once it is whole."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
