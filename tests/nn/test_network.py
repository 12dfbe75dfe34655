"""A folder alone rebuilds a network: its arguments, its stages, its weights; and a folder alone can do nothing else."""

import copy
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import helicon
from helicon.nn import network as network_module
from helicon.nn.network import Network, class_path, find_class, load_network, named, save_state


class Codec(Network):
    """An earlier stage."""

    def __init__(self, dim: int = 2):
        super().__init__()
        self.layer = nn.Linear(dim, dim)
        self.steps: Tensor
        self.register_buffer("steps", torch.tensor(0))


class Decoder(Network):
    """A part that itself stands on a stage."""

    def __init__(self, codec: Codec, width: int = 3):
        super().__init__()
        self.codec = codec
        self.layer = nn.Linear(width, 1)


@named
def wobble(step: int) -> float:
    return step * 0.5


class Whole(Network):
    """Every kind of argument at once."""

    parts: ClassVar[tuple[str, ...]] = ("decoder",)
    unsaved_arguments: ClassVar[tuple[str, ...]] = ("backbone",)

    def __init__(
        self,
        dim: int,
        widths: Any = (2, 3),
        *,
        codec: Codec | None = None,
        decoder: Decoder | None = None,
        schedule: Callable[[int], float] | None = None,
        settings: dict[str, Any] | None = None,
        backbone: nn.Module | None = None,
        **further: Any,
    ):
        super().__init__()
        self.codec, self.decoder, self.backbone, self.schedule = codec, decoder, backbone, schedule
        self.layer = nn.Linear(dim, dim)
        self.tied = nn.Linear(dim, dim, bias=False)
        self.tied.weight = self.layer.weight
        self.rate = (settings or {}).pop("rate", None)  # a constructor that empties what it was given
        self.further = further


class Other(Network):
    def __init__(self, dim: int = 2):
        super().__init__()
        self.layer = nn.Linear(dim, dim)


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def whole(**arguments: Any) -> Whole:
    torch.manual_seed(0)
    return Whole(3, **{"codec": Codec(2), "decoder": Decoder(Codec(4), 5), **arguments})


def edit_config(folder: str, **changes: Any) -> None:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---------------------------------------------------------------------- arguments


def test_arguments_are_recorded_however_they_are_given() -> None:
    built = Whole(4, [5], schedule=wobble, extra=1, another="x")
    given = {"dim": 4, "widths": [5], "schedule": wobble, "extra": 1, "another": "x"}
    defaults = {"codec": None, "decoder": None, "settings": None, "backbone": None}
    assert built.arguments == given | defaults
    assert Whole(dim=4).arguments["dim"] == 4
    assert Codec().arguments == {"dim": 2}, "a default may be another one in a later version"


def test_arguments_are_recorded_as_they_were_given() -> None:
    settings, widths = {"rate": 7, "inner": {"deep": [1]}}, [1, 2]
    built = Whole(3, widths, settings=settings)
    widths.append(3)
    settings["inner"]["deep"].append(2)  # type: ignore[index]
    assert built.rate == 7, "the constructor took it out of the caller's own dictionary"
    assert built.config()["arguments"]["settings"] == {"rate": 7, "inner": {"deep": [1]}}
    assert built.config()["arguments"]["widths"] == [1, 2]


def test_a_wrong_argument_is_refused_as_python_refuses_it() -> None:
    with pytest.raises(TypeError, match="dimm"):
        Codec(dimm=3)  # type: ignore[call-arg]


def test_a_class_below_another_records_its_own_arguments() -> None:
    class Wide(Codec):
        def __init__(self, factor: int):
            super().__init__(dim=2 * factor)

    assert Wide(3).arguments == {"factor": 3}


def test_the_config_survives_json_and_rebuilds_the_same() -> None:
    built = whole(widths=(1, 2), schedule=wobble, settings={"rate": 0.5, "names": ["a", None, True]}, extra=[1.5])
    config = json.loads(json.dumps(built.config()))
    assert config == built.config() | {"arguments": config["arguments"]}
    assert config["class"] == class_path(Whole) and config["helicon"] == helicon.__version__
    built.save_pretrained("saved")
    loaded = Whole.from_pretrained("saved")
    assert loaded.config() == built.config()
    assert loaded.arguments["schedule"] is wobble and loaded.rate == 0.5 and loaded.further == {"extra": [1.5]}
    assert_same_state(loaded, built)
    assert not loaded.training
    assert loaded.source == Path("saved").resolve()


def test_a_network_that_takes_any_keyword_is_not_handed_the_config() -> None:
    whole(extra=1).save_pretrained("saved")
    for loaded in (Whole.from_pretrained("saved"), Network.from_pretrained("saved"), load_network(Path("saved"))):
        assert loaded.further == {"extra": 1}


def test_arguments_can_be_replaced_on_loading() -> None:
    whole(extra=1).save_pretrained("saved")
    assert Whole.from_pretrained("saved", extra=2, widths=[9]).config()["arguments"]["extra"] == 2
    assert_same_state(Whole.from_pretrained("saved"), whole())


@pytest.mark.parametrize("value", [{1: 2}, {"stage": "x"}, {"callable": "wobble"}, {"network": {}}])
def test_a_dictionary_that_would_read_back_as_something_else_is_refused(value: dict[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"Whole\(settings=\.\.\.\) cannot be saved: .* read back as something else"):
        Whole(3, settings=value).config()


# ---------------------------------------------------------------------- callables and lent modules


def test_an_unregistered_callable_is_refused_at_saving() -> None:
    def impostor(step: int) -> float:
        return 0.0

    impostor.__name__ = "wobble"
    for function in (lambda step: 0.0, impostor, len, torch.nn.functional.relu):
        with pytest.raises(ValueError, match=r"Whole\(schedule=\.\.\.\) cannot be saved: .* registered with"):
            Whole(3, schedule=function).save_pretrained("saved")


@pytest.mark.parametrize("value", [torch.zeros(2), Path("x"), nn.Linear(1, 1), {1, 2}, [Codec()]])
def test_an_argument_that_is_not_plain_data_is_refused_at_saving(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Whole\(extra=\.\.\.\) cannot be saved"):
        Whole(3, extra=value).save_pretrained("saved")


def test_a_callable_that_is_not_registered_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Whole(3, schedule=wobble).save_pretrained("saved")
    monkeypatch.delitem(network_module._named_callables, "wobble")
    with pytest.raises(ValueError, match="no function is registered as 'wobble': import the module that defines it"):
        load_network(Path("saved"))


def test_a_lent_module_is_used_and_never_saved() -> None:
    built = Whole(3, backbone=nn.Linear(6, 6))
    assert not any("backbone" in name for name in built.own_state())
    assert "backbone" not in built.config()["arguments"]
    built.save_pretrained("saved")
    assert not any("backbone" in name for name in load_file("saved/model.safetensors"))
    assert Whole.from_pretrained("saved").backbone is None
    lent = nn.Linear(6, 6)
    assert Whole.from_pretrained("saved", backbone=lent).backbone is lent


# ---------------------------------------------------------------------- stages and parts


def test_a_stage_is_saved_once_in_a_folder_of_its_own_and_a_part_with_its_owner() -> None:
    built = whole()
    built.save_pretrained("saved")
    assert set(load_file("saved/model.safetensors")) == {
        "layer.weight",
        "layer.bias",
        "decoder.layer.weight",
        "decoder.layer.bias",
    }
    assert {path.name for path in Path("saved/stages").iterdir()} == {"codec", "decoder.codec"}
    assert set(load_file("saved/stages/decoder.codec/model.safetensors")) == {"layer.weight", "layer.bias", "steps"}
    config = json.loads(Path("saved/config.json").read_text())
    assert config["arguments"]["codec"] == {"stage": "codec"}
    assert config["arguments"]["decoder"]["network"]["arguments"]["codec"] == {"stage": "decoder.codec"}
    assert config["stages"]["codec"]["config"]["arguments"] == {"dim": 2}
    loaded = load_network(Path("saved"))
    assert_same_state(loaded, built)
    assert loaded.stages().keys() == {"codec", "decoder.codec"}


def test_a_stage_of_a_stage_is_found() -> None:
    torch.manual_seed(1)
    outer = Outer(Decoder(Codec(4)))
    outer.save_pretrained("saved")
    assert Path("saved/stages/inner/stages/codec/model.safetensors").exists()
    assert_same_state(load_network(Path("saved")), outer)


class Outer(Network):
    def __init__(self, inner: Decoder):
        super().__init__()
        self.inner = inner
        self.layer = nn.Linear(1, 1)


@pytest.mark.parametrize("name", ["codec", "decoder.codec"])
def test_a_stage_that_has_changed_is_refused_in_one_sentence(name: str) -> None:
    whole().save_pretrained("saved")
    Codec(2 if name == "codec" else 4).save_pretrained(f"saved/stages/{name}")
    with pytest.raises(
        ValueError, match=rf"Whole in saved was trained on another {name} than the one now at .*pass {name}="
    ):
        load_network(Path("saved"))


@pytest.mark.parametrize("change", ["added", "replaced", "removed"])
def test_a_stage_whose_averaged_weights_have_changed_is_refused(change: str) -> None:
    """A later network was trained on the averaged weights: those of the same online weights may not change either."""
    averaged = {"layer.weight": torch.ones(2, 2)}
    built = whole(decoder=None)
    built.save_pretrained("saved")
    stage = Path("saved/stages/codec")
    if change != "added":
        save_state(averaged, stage / "ema.safetensors")
        reference = network_module.stage_reference(stage, "stages/codec")
        edit_config("saved", stages={"codec": reference})
        load_network(Path("saved"))
    if change == "removed":
        (stage / "ema.safetensors").unlink()
    else:
        save_state({"layer.weight": torch.zeros(2, 2)}, stage / "ema.safetensors")
    with pytest.raises(ValueError, match="was trained on another codec"):
        load_network(Path("saved"))


@pytest.mark.parametrize("name", ["codec", "decoder.codec"])
def test_a_stage_that_is_missing_is_named_and_can_be_given_instead(name: str) -> None:
    whole().save_pretrained("saved")
    (Path("saved/stages") / name / "model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"was trained on the {name} at .*, which is not there: .*pass {name}="
    ):
        load_network(Path("saved"))
    instead = Codec(2 if name == "codec" else 4)
    assert load_network(Path("saved"), **{name: instead}).stages()[name] is instead
    assert Whole.from_pretrained("saved", **{name: instead}).stages()[name] is instead


def test_a_reference_to_a_folder_elsewhere_is_followed() -> None:
    codec = Codec(2)
    codec.save_pretrained("elsewhere")
    whole(codec=codec, decoder=None).save_pretrained("saved")
    edit_config("saved", stages={"codec": network_module.stage_reference(Path("elsewhere"), "../elsewhere")})
    loaded = load_network(Path("saved"))
    assert loaded.stages()["codec"].source == Path("elsewhere").resolve()


# ---------------------------------------------------------------------- weights


def test_tied_tensors_are_saved_once_and_stay_tied() -> None:
    built = whole()
    assert "layer.weight" in built.own_state() and "tied.weight" not in built.own_state()
    built.save_pretrained("saved")
    loaded = Whole.from_pretrained("saved")
    assert loaded.tied.weight is loaded.layer.weight
    assert torch.equal(loaded.tied.weight, built.tied.weight)


def test_another_class_is_refused_with_both_names() -> None:
    Codec().save_pretrained("saved")
    with pytest.raises(ValueError, match=r"saved holds a Codec, not a Other: load it with helicon\.load"):
        Other.from_pretrained("saved")
    assert isinstance(Network.from_pretrained("saved"), Codec)


def test_weights_of_another_shape_are_refused_and_change_nothing() -> None:
    Codec(3).save_pretrained("saved")
    with pytest.raises(ValueError, match=r"layer\.weight has shape \(3, 3\) in the file and \(2, 2\) in this Codec"):
        Codec.from_pretrained("saved", dim=2)
    built = Codec(2)
    before = built.own_state()["layer.weight"].clone()
    wrong = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.ones(3), "steps": torch.tensor(1)}
    with pytest.raises(ValueError, match=r"layer\.bias has shape \(3,\)"):
        built.load_own_state(wrong)
    assert torch.equal(built.layer.weight, before)


def test_missing_and_unexpected_weights_are_named() -> None:
    with pytest.raises(ValueError, match=r"not of this Codec: missing layer\.bias, steps, not expected other"):
        Codec().load_own_state({"layer.weight": torch.ones(2, 2), "other": torch.ones(1)})


def test_a_copy_has_arguments_that_are_the_copies() -> None:
    built = whole(schedule=wobble)
    copied = copy.deepcopy(built)
    assert copied.arguments["codec"] is copied.codec is not built.codec
    assert copied.arguments["decoder"].arguments["codec"] is copied.decoder.codec
    assert copied.arguments["schedule"] is wobble and copied.kind is Whole
    assert copied.own_state().keys() == built.own_state().keys(), "the copied stages are known as stages"
    assert copied.config() == built.config()
    with torch.no_grad():
        copied.layer.weight.zero_()
    assert built.layer.weight.any() and copied.tied.weight is copied.layer.weight


def with_average() -> Codec:
    torch.manual_seed(0)
    built = Codec(2)
    built.save_pretrained("saved")
    save_file({"layer.weight": torch.full((2, 2), 7.0)}, "saved/ema.safetensors")
    return built


def test_the_averaged_weights_are_used_where_there_are_some_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    built = with_average()
    with caplog.at_level(logging.INFO):
        loaded = Codec.from_pretrained("saved")
    assert torch.equal(loaded.layer.weight, torch.full((2, 2), 7.0))
    assert torch.equal(loaded.layer.bias, built.layer.bias), "what is not averaged comes from the online weights"
    assert "using the averaged (EMA) weights" in caplog.text


def test_the_online_weights_are_used_on_request() -> None:
    built = with_average()
    loaded = Codec.from_pretrained("saved", use_ema=False)
    assert_same_state(loaded, built)
    assert loaded.source is None, "a later network that stands on these weights cannot refer to the folder"


def test_saving_over_a_folder_leaves_no_average_of_the_network_before() -> None:
    with_average()
    Codec(2).save_pretrained("saved")
    assert not Path("saved/ema.safetensors").exists()


# ---------------------------------------------------------------------- what a file may name


def forged(class_name: str) -> Path:
    Codec().save_pretrained("forged")
    edit_config("forged", **{"class": class_name, "arguments": {"command": "touch executed"}})
    return Path("forged")


@pytest.mark.parametrize(
    "class_name",
    ["os:system", "builtins:exec", "subprocess:Popen", "torch.nn:Linear", "helicon.nn.network:sha256", "nowhere:Net"],
)
def test_a_class_that_is_no_network_is_never_called(class_name: str) -> None:
    with pytest.raises(ValueError, match=f"{class_name} is not a network known here: import the module"):
        load_network(forged(class_name))
    assert not Path("executed").exists()


def test_a_forged_part_is_never_called() -> None:
    whole().save_pretrained("forged")
    part = {"network": {"class": "os:system", "arguments": {"command": "touch executed"}}}
    config = json.loads(Path("forged/config.json").read_text())
    edit_config("forged", arguments=config["arguments"] | {"decoder": part})
    with pytest.raises(ValueError, match="os:system is not a network known here"):
        load_network(Path("forged"))
    assert not Path("executed").exists()


def test_a_module_that_is_not_imported_is_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lurking_module.py").write_text("import pathlib\npathlib.Path('executed').touch()\nNet = object\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="lurking_module:Net is not a network known here"):
        load_network(forged("lurking_module:Net"))
    assert "lurking_module" not in sys.modules and not Path("executed").exists()


def test_the_command_line_is_not_started_by_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["helicon", "--help"])
    with pytest.raises(ValueError, match=r"helicon\.__main__:main is not a network"):
        find_class("helicon.__main__:main")


def test_a_class_of_a_later_version_is_said_to_be_missing() -> None:
    with pytest.raises(
        ValueError, match=rf"this version of Helicon \({helicon.__version__}\) has no helicon\.models\.opera:Aria"
    ):
        find_class("helicon.models.opera:Aria")


def test_a_package_that_a_module_needs_is_named_rather_than_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy.py").write_text("import not_installed_here\n")
    monkeypatch.setattr(helicon, "__path__", [*helicon.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        find_class("helicon.needy:Net")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"class": "a:B"}', "\x00"])
def test_a_config_of_another_kind_is_refused(content: str) -> None:
    Codec().save_pretrained("saved")
    Path("saved/config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is not a configuration written by Helicon"):
        Codec.from_pretrained("saved")


def test_a_folder_without_a_config_says_what_to_give() -> None:
    Path("empty").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"empty holds no config\.json: give a checkpoint folder or one made by"
    ):
        Codec.from_pretrained("empty")


# ---------------------------------------------------------------------- the hub


def test_a_hub_id_is_downloaded_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = whole(extra=1)
    built.save_pretrained(tmp_path / "downloaded")
    asked: dict[str, Any] = {}

    def snapshot_download(**keywords: Any) -> str:
        asked.update(keywords)
        return str(tmp_path / "downloaded")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loaded = Whole.from_pretrained("someone/something", revision="v2", token="secret")
    assert (asked["repo_id"], asked["revision"], asked["token"]) == ("someone/something", "v2", "secret")
    assert_same_state(loaded, built)


def test_pushing_uploads_the_whole_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: dict[str, Any] = {}

    def create_repo(self: Any, repo_id: str, **_: Any) -> Any:
        return huggingface_hub.RepoUrl(f"https://huggingface.co/someone/{repo_id}")

    def upload_folder(self: Any, *, repo_id: str, folder_path: Any, **_: Any) -> str:
        folder = Path(folder_path)
        uploaded["repo_id"] = repo_id
        uploaded["files"] = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        uploaded["network"] = load_network(folder)
        return "done"

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    built = whole()
    built.push_to_hub("something")
    assert uploaded["repo_id"] == "someone/something"
    expected = {"config.json", "model.safetensors", "README.md"}
    expected |= {f"stages/{name}/{file}" for name in built.stages() for file in ("config.json", "model.safetensors")}
    assert uploaded["files"] == expected
    assert_same_state(uploaded["network"], built)


def test_files_of_other_packages_are_refused_in_one_sentence(tmp_path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    for path in (tmp_path / "missing.pt", tmp_path / "model.bin"):
        with pytest.raises(ValueError, match=r"is a file, and a network is read from the folder it was saved in"):
            Network.from_pretrained(path)
