import hashlib

import pytest
import torch

from helicon.data.loader import Loader
from helicon.data.synthetic import COLOURS, PLACES, SHAPES, SIZES, Recognised, SyntheticShapes, recognise


def test_the_same_picture_on_every_machine():
    pixels = torch.stack([SyntheticShapes(40, 33, seed=3)[i]["images"] for i in range(40)])
    content = (pixels * 255).round().to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == "65fe55dc905cda75"


def test_samples_are_pictures_with_captions():
    data = SyntheticShapes(30, 17)
    for index in range(30):
        sample, words = data[index], data.attributes(index)
        assert sample["images"].shape == (3, 17, 17) and sample["images"].dtype == torch.float32
        assert sample["images"].min() >= 0 and sample["images"].max() <= 1
        assert torch.equal((sample["images"] * 255).round() / 255, sample["images"])  # 8 bits, like a file
        article = "an" if words.background == "orange" else "a"
        caption = (
            f"a {words.size} {words.colour} {words.shape} on {article} {words.background} background {words.place}"
        )
        assert sample["texts"] == caption
    assert not torch.equal(data[0]["images"], SyntheticShapes(30, 17, seed=1)[0]["images"])
    assert data.attributes(4) == SyntheticShapes(99, 64).attributes(4)  # nor length nor size change what is drawn


def test_every_word_appears_about_equally_often():
    data = SyntheticShapes(4000, 8)
    seen = [data.attributes(index) for index in range(4000)]
    for name, options in {
        "shape": SHAPES,
        "colour": COLOURS,
        "size": ("small", "large"),
        "place": PLACES,
        "background": COLOURS,
    }.items():
        counts = [sum(getattr(words, name) == option for words in seen) for option in options]
        assert sum(counts) == 4000
        assert all(0.75 < count * len(options) / 4000 < 1.25 for count in counts), name
    assert all(words.colour != words.background for words in seen)
    assert len(SHAPES) >= 6 and len(COLOURS) >= 8


def is_colour(image: torch.Tensor, name: str) -> torch.Tensor:
    """Where, of all named colours, this one is the nearest."""
    named = torch.tensor(list(COLOURS.values()))[:, :, None, None]
    return (image * 255 - named).square().sum(dim=1).argmin(dim=0) == list(COLOURS).index(name)


def test_the_picture_shows_what_the_caption_says():
    data = SyntheticShapes(200, 64)
    for index in range(200):
        words, image = data.attributes(index), data[index]["images"]
        assert is_colour(image, words.background)[[0, 0, -1, -1], [0, -1, 0, -1]].sum() >= 3  # the corners
        drawn = is_colour(image, words.colour)
        area = drawn.float().mean().item() / words.radius**2
        expected = {"circle": 3.14, "square": 2.89, "triangle": 1.30, "star": 1.12, "ring": 2.36, "cross": 2.20}
        assert area == pytest.approx(expected[words.shape], rel=0.25, abs=0.15), words.caption
        y, x = (drawn.nonzero().float().mean(dim=0) + 0.5) / 64
        assert (x - PLACES[words.place][0]).abs() < 0.08 and (y - PLACES[words.place][1]).abs() < 0.08, words.caption


def test_held_out_pairs_never_appear_and_can_be_asked_for():
    held_out = [("circle", "red"), ("star", "blue")]
    train, test = SyntheticShapes(3000, 8, held_out=held_out), SyntheticShapes(100, 8, only=held_out)
    seen = {(words.shape, words.colour) for words in map(train.attributes, range(3000))}
    assert len(seen) == 46 and not seen & set(held_out)
    assert {(words.shape, words.colour) for words in map(test.attributes, range(100))} == set(held_out)


def test_kinds_of_shapes_can_be_chosen():
    data = SyntheticShapes(500, 8, kinds=["ring", "cross"], held_out=[("ring", "red")])
    seen = {(words.shape, words.colour) for words in map(data.attributes, range(500))}
    assert len(seen) == 15 and {shape for shape, _ in seen} == {"ring", "cross"}


def test_sizes_and_places_can_be_chosen():
    data = SyntheticShapes(200, 32, sizes=["huge"], places=["in the centre"])
    for index in range(200):
        words, image = data.attributes(index), data[index]["images"]
        assert (words.size, words.place) == ("huge", "in the centre")
        assert SIZES["huge"][0] <= words.radius <= SIZES["huge"][1]
        edge = torch.cat([image[:, 0], image[:, -1], image[:, :, 0], image[:, :, -1]], dim=1)[:, :, None]
        assert not is_colour(edge, words.colour).any(), words.caption  # all of it is inside


def test_colours_are_flat_if_wanted():
    shaded, flat = (SyntheticShapes(20, 32, sizes=["large"], shaded=shaded) for shaded in (True, False))
    for index in range(20):
        words, pixels = flat.attributes(index), (flat[index]["images"] * 255).round()
        assert words == shaded.attributes(index) and not torch.equal(shaded[index]["images"], flat[index]["images"])
        colours, counts = pixels.flatten(1).unique(dim=1, return_counts=True)
        seen = {tuple(colours[:, place].long().tolist()) for place in counts.topk(2).indices.tolist()}
        assert seen == {COLOURS[words.colour], COLOURS[words.background]}, words.caption


@pytest.mark.slow
@pytest.mark.parametrize("blur", [0, 3])
def test_pictures_are_recognised_by_rules_also_blurred(blur: int) -> None:
    data = SyntheticShapes(60, 32, seed=9, sizes=["large"])
    right = 0
    for index in range(60):
        words, image = data.attributes(index), data[index]["images"]
        image = (
            torch.nn.functional.avg_pool2d(image, blur, stride=1, padding=1, count_include_pad=False) if blur else image
        )
        seen = recognise(image)
        right += (seen.shape, seen.colour, seen.background) == (words.shape, words.colour, words.background)
    assert right >= (60 if blur == 0 else 54)


def test_nothing_is_recognised_where_there_is_nothing() -> None:
    plain = (torch.tensor(COLOURS["green"]) / 255)[:, None, None].expand(3, 17, 17)
    assert recognise(plain) == Recognised(None, None, "green")


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match=r"sizes=\['tiny'\]: give a list of at least one of small, large, huge"):
        SyntheticShapes(3, 8, sizes=["tiny"])
    with pytest.raises(ValueError, match=r"places=\[\]: give a list of at least one of at the top left"):
        SyntheticShapes(3, 8, places=[])
    with pytest.raises(ValueError, match="does not fit beside the centre"):
        SyntheticShapes(3, 8, sizes=["huge"])
    with pytest.raises(ValueError, match=r"\('circle', 'pink'\) is no pair of a shape \(circle, .*red"):
        SyntheticShapes(3, 8, held_out=[("circle", "pink")])
    with pytest.raises(ValueError, match=r"kinds=\['blob'\]: give a list of at least one of circle, square"):
        SyntheticShapes(3, 8, kinds=["blob"])
    with pytest.raises(ValueError, match=r"\('star', 'red'\) is no pair of a shape \(ring\) and a colour"):
        SyntheticShapes(3, 8, kinds=["ring"], held_out=[("star", "red")])
    with pytest.raises(ValueError, match="leave at least one"):
        SyntheticShapes(3, 8, held_out=[("ring", "red")], only=[("ring", "red")])
    with pytest.raises(ValueError, match="num_samples=0"):
        SyntheticShapes(0, 8)
    with pytest.raises(IndexError):
        SyntheticShapes(3, 8)[3]


def test_loads_in_batches():
    batch = next(Loader(SyntheticShapes(5, 9), batch_size=3).steps())[0]
    assert batch["images"].shape == (3, 3, 9, 9) and len(batch["texts"]) == 3
