import numpy as np
import pytest
import torch
from PIL import Image

from helicon.data.fields import LABEL, TEXT, Field, Routed, is_tensor, route
from helicon.data.image import IMAGE

IMAGES = {"images": IMAGE, "texts": Field(TEXT.fits, TEXT.looks_like, is_required=False), "labels": LABEL}
PICTURE = torch.zeros(3, 4, 5)


def test_fields_that_look_alike_may_be_told_by_their_order() -> None:
    fields = {name: Field(is_tensor(True, 1), "a wave", is_required=False) for name in ("first", "second", "other")}
    values = torch.zeros(3), torch.zeros(4)
    ways = {name: fields[name] for name in ("second", "first")}
    assert [*route(values, ways, in_order=("first", "second"))] == ["first", "second"]
    with pytest.raises(ValueError, match="more than one way"):
        route(values, fields, in_order=("first", "second"))


def test_a_dict_passes_through():
    sample = {"images": PICTURE, "labels": 3}
    assert route(sample, IMAGES) == sample


def test_a_dict_is_checked():
    with pytest.raises(ValueError, match="'image', which is not known here: did you mean 'images'"):
        route({"image": PICTURE, "labels": 3}, IMAGES)
    with pytest.raises(ValueError, match=r"'zzz'.*the fields are images"):
        route({"images": PICTURE, "zzz": 3}, IMAGES)
    with pytest.raises(ValueError, match="lacks labels; it has images"):
        route({"images": PICTURE}, IMAGES)


def test_declared_names_are_zipped():
    assert route((3, PICTURE), IMAGES, ("labels", "images")) == {"labels": 3, "images": PICTURE}
    assert route((PICTURE, "x", 3, 4), IMAGES, ("images", "_", "_", "labels")) == {"images": PICTURE, "labels": 4}
    assert list(route(PICTURE, {"images": IMAGE}, ("images",))) == ["images"]
    with pytest.raises(ValueError, match=r"names 2 entries, and a sample has 1: float32 \[3, 4, 5\]"):
        route(PICTURE, IMAGES, ("images", "labels"))
    with pytest.raises(ValueError, match="'picture', which is not known"):
        route((PICTURE, 3), IMAGES, ("picture", "labels"))


@pytest.mark.parametrize("picture", [PICTURE, PICTURE[:1], PICTURE.byte(), Image.new("P", (3, 2))])
@pytest.mark.parametrize("text", ["a cat", ["a cat", "a feline"], ("a cat", "a feline")])
@pytest.mark.parametrize("label", [3, np.int64(3), torch.tensor(3)])
def test_types_and_shapes_tell_the_fields(picture: object, text: object, label: object):
    for sample in ((picture, text, label), (label, picture, text), [text, label, picture]):
        assert route(sample, IMAGES) == {"images": picture, "texts": text, "labels": label}
    assert route((label, picture), IMAGES) == {"images": picture, "labels": label}


def test_a_bare_sample_is_one_entry():
    assert route(PICTURE, {"images": IMAGE}) == {"images": PICTURE}
    assert route(["a", "b"], {"texts": TEXT}) == {"texts": ["a", "b"]}


def test_the_only_way_that_fits_is_found_where_one_entry_could_be_two_fields():
    fields = {
        "any": Field(lambda value: True, "anything"),
        "wave": Field(lambda value: isinstance(value, torch.Tensor), "a tensor"),
    }
    assert route((PICTURE, "x"), fields) == {"wave": PICTURE, "any": "x"}
    with pytest.raises(ValueError, match="in more than one way"):
        route((PICTURE, PICTURE), fields)


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ((PICTURE, PICTURE, 1), r"fit no fields: found float32 \[3, 4, 5\], float32 \[3, 4, 5\], int"),
        ((torch.zeros(7, 4, 5), 1), r"fit no fields: found float32 \[7, 4, 5\], int"),
        ((PICTURE,), "fit no fields"),
        ((PICTURE, True), "found float32 .*, bool"),
        ((), "found nothing"),
        ((np.zeros(3), None), r"found float64 \[3\], NoneType"),
    ],
)
def test_what_does_not_fit_is_listed_with_the_remedy(sample: tuple, problem: str):
    with pytest.raises(ValueError, match=problem + r".*texts \(a string or a list of strings; optional\).*ds_fields"):
        route(sample, IMAGES)


def test_two_fields_alike_are_ambiguous():
    with pytest.raises(ValueError, match=r"more than one way: found str, str.*ds_fields"):
        route(("a", "b"), {"prompt": TEXT, "caption": TEXT})


def test_lengths_are_of_what_is_there_in_its_order():
    waves = {
        name: Field(lambda value: isinstance(value, torch.Tensor) and value.ndim == 2, "waves", False) for name in "ab"
    }
    ids = {"ids": Field(lambda value: isinstance(value, torch.Tensor) and value.ndim == 3, "ids", False)}
    lengths = Field(lambda value: isinstance(value, torch.Tensor) and value.ndim == 1, "lengths", False)
    fields = {**waves, **ids, **{f"{name}_lengths": lengths for name in ("a", "b", "ids")}}
    fields["a"] = Field(waves["a"].fits, "waves")  # required
    wave, codes, of_wave, of_codes = torch.zeros(2, 5), torch.zeros(2, 3, 1), torch.ones(2), torch.zeros(2)
    assert route((wave, of_wave), fields).keys() == {"a", "a_lengths"}
    named = route((codes, wave, of_codes, of_wave), fields)
    assert named["a_lengths"] is of_wave and named["ids_lengths"] is of_codes
    with pytest.raises(ValueError, match="fit no fields"):
        route((wave, of_wave, of_codes), fields)


def test_a_dataset_is_routed():
    data = Routed([(PICTURE, i) for i in range(3)], {"images": IMAGE, "labels": LABEL})
    assert len(data) == 3 and data[2]["labels"] == 2
    assert data.fetch(1, torch.Generator())["labels"] == 1
