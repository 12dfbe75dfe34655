"""From a recipe and `key=value` overrides to checked keyword arguments.

A recipe is YAML that opens with comment lines (what it is, then `Command:`, `Time:` and `Result:`) and holds

    trains: vqgan                           # a name of the registry
    model: {dim: 32}                        # keywords of the model's constructor
    data: {source: synthetic}               # keywords of the family's data factory
    trainer: {num_train_steps: 1000}        # keywords of the trainer

The constructors' own signatures are the schema: nothing is declared twice. Every mistake is a `ConfigError` of one
sentence.

YAML is read by the 1.2 core rules, because the 1.1 rules PyYAML follows surprise people: here `1e-4` is a number, `no`,
`on` and `off` are words, `1:30` is no count of seconds and `2024-01-01` no date.
"""

import difflib
import functools
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, is_typeddict

import yaml

logger = logging.getLogger(__name__)

Constructor = Callable[..., Any] | inspect.Signature

SECTIONS = ("model", "data", "trainer")

# Installed from a wheel the recipes lie inside the package; in a checkout they lie at the top of the repository.
RECIPE_FOLDERS = (Path(__file__).parent / "recipes", Path(__file__).parents[2] / "recipes")


class ConfigError(ValueError):
    """A mistake in a recipe or an override, told in one sentence."""


@dataclass(frozen=True)
class Recipe:
    """A recipe with its overrides applied: plain data, ready to be written beside the run it started."""

    name: str
    trains: str
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    description: tuple[str, ...] = ()  # the comment lines at the head
    path: Path | None = field(default=None, compare=False)  # the file it was read from

    @property
    def summary(self) -> str:
        return self.description[0] if self.description else ""

    def note(self, label: str) -> str:
        """What the head comment says after `label:` (command, time, result), or an empty string."""
        pattern = re.compile(rf"(?:expected )?{re.escape(label)}:\s*(.*)", re.IGNORECASE)
        return next((match[1] for match in map(pattern.match, self.description) if match), "")

    def dump(self, path: Path) -> None:
        """Writes YAML that `load_recipe` reads back as an equal recipe."""
        body = {"name": self.name, "trains": self.trains}
        body |= {section: getattr(self, section) for section in SECTIONS}
        try:
            text = yaml.dump(body, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
        except yaml.YAMLError as error:
            raise ConfigError(f"recipe {self.name} cannot be written: {error.args[0]} {error.args[-1]!r}") from error
        head = "".join(f"# {line}".rstrip() + "\n" for line in self.description)
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(head + text, encoding="utf-8")
            partial.replace(path)  # a run that is killed meanwhile keeps the recipe it had
        except OSError:  # the disk is full, say
            partial.unlink(missing_ok=True)
            raise


def load_recipe(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    sections: Callable[[str], Mapping[str, Constructor]] | None = None,
    search: Sequence[Path] | None = None,
) -> Recipe:
    """Reads a recipe by path, or by name (`muse/vqgan-debug`) from the folders of `search` (the shipped ones).

    Then the overrides are applied. `sections` maps what the recipe trains to the constructors of its sections; with it,
    every key and value is checked and an override may leave out its section (`batch_size=4`) where only one section
    knows the key.
    """
    path, name = _find(source, RECIPE_FOLDERS if search is None else search)
    text = _read(path)
    body = {"name": name} | _body(text, path)
    constructors = dict(sections(body["trains"])) if sections else {}
    for override in overrides:
        apply_override(override, body, constructors)
    for section, constructor in constructors.items():
        check(constructor, body[section], section)
    return Recipe(**body, description=_head_comment(text), path=path)


def recipe_names(search: Sequence[Path] | None = None) -> list[str]:
    """The names of all recipes in the folders of `search` (the shipped ones)."""
    search = RECIPE_FOLDERS if search is None else search
    found = {
        path.relative_to(folder).with_suffix("").as_posix() for folder in search for path in folder.rglob("*.yaml")
    }
    return sorted(found)


def check(constructor: Constructor, keywords: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keyword arguments, checked against a constructor's signature: unknown and missing names, and types.

    Values are converted only where nothing is lost: an int for a float, 1e5 for an int, a list for a tuple, a string
    for a path. A `**keywords` parameter names nothing and so accepts nothing: a constructor that takes more than its
    parameters says so with a `__signature__`. `where` (the section) stands in the messages.
    """
    parameters = _parameters(constructor)
    for key in keywords:
        if key not in parameters:
            raise ConfigError(f"{where} has no argument {key!r}: {nearest(key, parameters)}")
    missing = [name for name, entry in parameters.items() if entry.default is entry.empty and name not in keywords]
    if missing:
        raise ConfigError(f"{where} needs {' and '.join(missing)}: add `{where}.{missing[0]}=<value>`")
    return {key: _convert(value, parameters[key], f"{where}.{key}") for key, value in keywords.items()}


def signature_without(constructor: Constructor, *names: str) -> inspect.Signature:
    """A constructor's signature less the arguments a program passes itself (the model of a trainer, say)."""
    parameters = _parameters(constructor)
    keyword_only = [entry.replace(kind=entry.KEYWORD_ONLY) for name, entry in parameters.items() if name not in names]
    return inspect.Signature(keyword_only)


def setting_of(parameter: inspect.Parameter) -> str:
    """A parameter as a line of a listing, in the words and values of a recipe: `lr: float = 0.001`."""
    kind = "" if parameter.annotation is parameter.empty else f": {_type_name(parameter.annotation)}"
    default = json.dumps(parameter.default, default=str, ensure_ascii=False)
    return f"{parameter.name}{kind}" + ("" if parameter.default is parameter.empty else f" = {default}")


def argument_texts(constructor: Callable[..., Any]) -> dict[str, str]:
    """What the docstrings of a class (and of those it derives from) say of the constructor's arguments."""
    found: dict[str, str] = {}
    for kind in reversed(inspect.getmro(constructor)):  # type: ignore[arg-type]
        _, _, section = (inspect.getdoc(kind.__init__) or "").partition("Args:\n")  # type: ignore[misc]
        for names, words in re.findall(r"^ {4}([\w, ]+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(words.split()))
    return found


def _find(source: str | Path, search: Sequence[Path]) -> tuple[Path, str]:
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        inside = next((folder for folder in search if path.resolve().is_relative_to(folder.resolve())), None)
        name = path.resolve().relative_to(inside.resolve()) if inside else Path(path.name)
        return path, name.with_suffix("").as_posix()
    for folder in search:
        if (folder / f"{source}.yaml").is_file():
            return folder / f"{source}.yaml", str(source)
    near = difflib.get_close_matches(str(source), recipe_names(search), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "`helicon recipes` lists them."
    raise ConfigError(f"there is no recipe {str(source)!r}: {hint} (The path of a YAML file will do, too.)")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _body(text: str, path: Path) -> dict[str, Any]:
    """The recipe's mapping, with every section there."""
    body = parse_yaml(text, str(path))
    if not isinstance(body, dict):
        raise ConfigError(f"{path} holds {_plain_name(body)}, not a recipe: it needs trains, model, data and trainer")
    known = ("name", "trains", *SECTIONS)
    for key in body:
        if key not in known:
            raise ConfigError(f"{path} has an unknown section {key!r}: {nearest(key, known)}")
    for key in ("name", "trains"):
        if not isinstance(body.get(key, "" if key == "name" else None), str):
            raise ConfigError(f"{path} needs `{key}: <a name>`")
    for section in SECTIONS:
        arguments = body.get(section)
        if not isinstance(arguments, (dict, NoneType)):
            raise ConfigError(f"{path}: {section} is {_plain_name(arguments)}, not keyword arguments")
        body[section] = arguments or {}
    return body


def _head_comment(text: str) -> tuple[str, ...]:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" ").rstrip())
    return tuple(lines)


def apply_override(override: str, body: dict[str, Any], constructors: Mapping[str, Constructor]) -> None:
    """Sets one `key=value` in the recipe; the value is YAML."""
    key, equals, text = override.partition("=")
    *folders, last = parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{override!r} is no override: write key=value, as in trainer.batch_size=4")
    value = parse_yaml(text, override)
    if parts[0] not in SECTIONS:
        folders = [_section_of(parts[0], key, constructors), *folders]
    elif len(parts) == 1:
        raise ConfigError(f"{override!r} replaces a whole section: write {key}.<argument>=<value>")
    target = body
    for depth, folder in enumerate(folders):
        if target.get(folder) is None:
            target[folder] = {}
        target = target[folder]
        if not isinstance(target, dict):
            raise ConfigError(
                f"{override!r} reaches into {'.'.join(folders[: depth + 1])}, which is {target!r} and has no parts"
            )
    target[last] = value


def _section_of(name: str, key: str, constructors: Mapping[str, Constructor]) -> str:
    """The one section whose constructor knows an argument."""
    known = {section: list(_parameters(constructor)) for section, constructor in constructors.items()}
    candidates = [section for section, names in known.items() if name in names]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ConfigError(f"{key} could be {' or '.join(f'{section}.{key}' for section in candidates)}: write which")
    if not known:
        raise ConfigError(f"{key} names no section: write {' or '.join(f'{section}.{key}' for section in SECTIONS)}")
    qualified = {name: f"{section}.{name}" for section, names in known.items() for name in names}
    raise ConfigError(f"{', '.join(known)} have no argument {name!r}: {nearest(name, qualified, qualified)}")


def _parameters(constructor: Constructor) -> dict[str, inspect.Parameter]:
    """The parameters that can be given by name, with string annotations evaluated where they can be."""
    if isinstance(constructor, inspect.Signature):
        parameters, namespace = list(constructor.parameters.values()), {}
    elif isinstance(constructor, type) and getattr(constructor, "__signature__", None) is None:
        # Not inspect.signature(the class): a base class with a __new__(*args, **kwargs) would hide the parameters.
        parameters = list(inspect.signature(constructor.__init__).parameters.values())[1:]  # type: ignore[misc]
        namespace = vars(sys.modules[constructor.__module__])
    else:
        parameters = list(inspect.signature(constructor).parameters.values())
        namespace = getattr(inspect.unwrap(constructor), "__globals__", {})
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {entry.name: _evaluated(entry, namespace) for entry in parameters if entry.kind in by_name}


def _evaluated(parameter: inspect.Parameter, namespace: Mapping[str, Any]) -> inspect.Parameter:
    if not isinstance(parameter.annotation, str):
        return parameter
    try:
        return parameter.replace(annotation=eval(parameter.annotation, dict(namespace)))
    except (NameError, AttributeError, TypeError, SyntaxError) as error:  # a name imported for type checkers only, say
        logger.debug("the annotation of %s is not checked: %s", parameter.name, error)
        return parameter.replace(annotation=parameter.empty)


def _convert(value: Any, parameter: inspect.Parameter, where: str) -> Any:
    """The value as the parameter's annotation wants it.

    Recipes are plain data, so pydantic's strict rules for JSON fit: no number from a string, no int from a bool.
    """
    if parameter.annotation is parameter.empty or (value is None and parameter.default is None):
        return value
    try:
        from pydantic import ValidationError
    except ModuleNotFoundError:
        _warn_unchecked()
        return value
    adapter = _adapter(parameter.annotation)
    if adapter is None:
        return value
    candidates = [value, int(value)] if isinstance(value, float) and value.is_integer() else [value]
    for candidate in candidates:
        try:
            if isinstance(value, (bool, int, float, str, list, dict, NoneType)):
                return adapter.validate_json(json.dumps(candidate), strict=True)
            return adapter.validate_python(candidate)
        except ValidationError:
            continue
    shown = "null" if value is None else repr(value)
    raise ConfigError(f"{where} wants {_type_name(parameter.annotation)}, not {shown}")


def _adapter(annotation: Any) -> Any:
    """Pydantic's validator of an annotation, or None where it cannot make one."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        has_own_config = is_dataclass(annotation) or is_typeddict(annotation)
        adapter = TypeAdapter(annotation, config=None if has_own_config else {"arbitrary_types_allowed": True})
        adapter.rebuild(raise_errors=True)  # a name that is not defined (yet) shows now, not at the first value
        return adapter
    except (PydanticUserError, NameError, TypeError) as error:
        logger.debug("values of %s are not checked: %s", annotation, error)
        return None


@functools.cache
def _warn_unchecked() -> None:
    logger.warning("pydantic is not installed: the types in recipes and overrides are not checked")


def _type_name(annotation: Any) -> str:
    """An annotation in the words of a recipe."""
    if annotation is bool:
        return "true or false"
    if annotation in (None, NoneType):
        return "null"
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_type_name, get_args(annotation)))
    if get_origin(annotation) is None and isinstance(annotation, type):
        return annotation.__name__
    return re.sub(r"\b(?:\w+\.)+", "", str(annotation))


def _plain_name(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "a mapping"
    return "nothing" if value is None else repr(value)


def nearest(key: str, known: Iterable[str], shown: Mapping[str, str] | None = None) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or some of them."""
    names = list(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    show = lambda name: shown[name] if shown else name
    if near:
        return f"did you mean {show(near[0])}?"
    some = ", ".join(map(show, names[:10])) or "nothing"
    return f"it knows {some}" + (", ..." if len(names) > 10 else "")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 core scalars; refuses duplicate keys, keys that are not strings, and aliases."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (the name PyYAML reads)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            # A value shared by two keys would be overridden in both places at once.
            _refuse("an alias (*name) stands here: write the value out", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag != "tag:yaml.org,2002:str":
                key = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "here"
                _refuse(f"the key {key} is not a name", key_node.start_mark)
            if key_node.value in seen:
                _refuse(f"the key {key_node.value!r} stands twice", key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that either rule set, 1.1 or 1.2, would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_number = r"(?:(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
_scalars = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (rf"[-+]?{_number}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.0123456789")),
}
for _tag, (_pattern, _first) in _scalars.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _refuse(problem: str, mark: yaml.Mark) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def parse_yaml(text: str, where: str) -> Any:
    """YAML text as plain data; `where` (a file or an override) stands in the messages."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark and error.problem_mark.line else ""
        raise ConfigError(f"{where}{line}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not YAML: {str(error).splitlines()[0]}") from error
