import collections

import pytest
import torch

from helicon.data.loader import Loader
from helicon.data.mesh import MeshTransform, face_edges
from helicon.data.mesh_data import collate_meshes, mesh_data
from helicon.data.synthetic_meshes import FOOTPRINTS, HEIGHTS, KINDS, MeshAttributes, SyntheticMeshes, describe_mesh


def every_word(**options: object) -> list[dict]:
    """One mesh of each caption."""
    data = SyntheticMeshes(300, **options)
    places = {data.attributes(index).caption: index for index in range(300)}
    assert len(places) == 2 * sum(map(len, FOOTPRINTS.values()))
    return [data[index] for index in places.values()]


def test_a_mesh_is_a_function_of_seed_and_index():
    data, again, other = SyntheticMeshes(9, 3), SyntheticMeshes(50, 3), SyntheticMeshes(9, 4)
    for index in range(9):
        assert data[index]["texts"] == again[index]["texts"] == data.attributes(index).caption
        for name in ("vertices", "faces", "face_edges"):
            assert torch.equal(data[index][name], again[index][name])
    assert any(data[index]["texts"] != other[index]["texts"] for index in range(9))
    drawn = SyntheticMeshes(200, only=[("cylinder", "tall")])
    assert len({tuple(drawn[index]["vertices"].flatten().tolist()) for index in range(20)}) > 10


def test_golden_mesh():
    sample = SyntheticMeshes(5, 1, kinds=["box"], heights=["low"], quads=True)[0]
    assert sample["texts"] in ("a low square box", "a low wide box")
    assert sample["faces"].tolist() == [
        [0, 1, 5, 4],
        [0, 2, 3, 1],
        [0, 4, 6, 2],
        [1, 3, 7, 5],
        [2, 6, 7, 3],
        [4, 5, 7, 6],
    ]
    assert sample["vertices"].abs()[:, 0].unique().tolist() == [1 - 1 / 128]


@pytest.mark.parametrize("resolution", [64, 128, 1000])
@pytest.mark.parametrize("quads", [False, True])
def test_meshes_are_closed_small_and_inside_the_cube(resolution: int, quads: bool):
    for sample in every_word(num_discrete_coors=resolution, quads=quads):
        vertices, faces = sample["vertices"], sample["faces"]
        assert faces.shape[1] == 3 + quads and vertices.dtype == torch.float32 and vertices.abs().max() <= 1
        assert (6 <= len(faces) <= 100) if quads else (12 <= len(faces) <= 200)
        directed = collections.Counter(
            (a, b) for face in faces.tolist() for a, b in zip(face, [*face[1:], face[0]], strict=True)
        )
        # Closed and facing one way: each edge is there once, and once the other way round.
        assert all(count == 1 and directed[b, a] == 1 for (a, b), count in directed.items()), sample["texts"]
        corners = vertices[faces]
        fans = [corners[:, [0, i, i + 1]] for i in range(1, 2 + quads)]
        assert sum(torch.linalg.det(fan.double()).sum() for fan in fans) > 0, "inside out"
        assert torch.equal(sample["face_edges"], face_edges(faces))
        assert len(sample["face_edges"]) == len(faces) * (1 + 3 + quads)  # itself, and one over each side


def test_what_the_caption_says_is_found_again_in_every_mesh():
    data = SyntheticMeshes(200, 7)
    for index in range(200):
        sample = data[index]
        assert describe_mesh(sample["vertices"], sample["faces"]) == data.attributes(index), sample["texts"]


@pytest.mark.parametrize("quads", [False, True])
def test_finer_circles_make_more_faces_of_the_same_words(quads: bool):
    plain, fine = (SyntheticMeshes(60, 7, quads=quads, num_sides=sides) for sides in ((8,), (24,)))
    mixed = SyntheticMeshes(60, 7, quads=quads, kinds=["lamp"], num_sides=[8, 16])
    most = 0
    for index in range(60):
        sample = fine[index]
        assert describe_mesh(sample["vertices"], sample["faces"]) == fine.attributes(index) == plain.attributes(index)
        assert len(sample["faces"]) >= len(plain[index]["faces"])
        most = max(most, len(sample["faces"]))
    assert 180 / (1 + quads) < most <= 200 / (1 + quads)
    assert {len(mixed[index]["faces"]) for index in range(60)} == ({34, 66} if quads else {68, 132})


def test_damaged_and_padded_meshes_are_still_described():
    generator = torch.Generator().manual_seed(0)
    for sample in every_word(quads=True):
        keep = torch.rand(len(sample["faces"]), generator=generator) > 0.2
        noise = 0.02 * torch.randn(sample["vertices"].shape, generator=generator)
        batch = collate_meshes([{"faces": sample["faces"][keep]}, {"faces": torch.zeros(60, 4, dtype=torch.long)}])
        found = describe_mesh(3 * sample["vertices"] + 5 + noise, batch["faces"][0])
        assert found is not None and found.caption == sample["texts"]


def test_what_is_none_of_them_is_not_taken_for_one():
    generator = torch.Generator().manual_seed(1)
    soup, faces = torch.rand(60, 3, generator=generator), torch.randint(0, 60, (80, 3), generator=generator)
    assert describe_mesh(soup * torch.tensor([1, 3, 1]), faces) == MeshAttributes(None, "tall", "")
    assert describe_mesh(soup, faces).caption in ("a low thing", "a tall thing")
    assert describe_mesh(soup, faces[:0]) is None and describe_mesh(soup[:0], faces[:0]) is None
    assert describe_mesh(soup, torch.tensor([[3, 3, 3]])) is None
    assert describe_mesh(soup * torch.nan, faces) is None


def test_every_word_appears_about_equally_often():
    data = SyntheticMeshes(3000)
    seen = [data.attributes(index) for index in range(3000)]
    for name, options in {"kind": KINDS, "height": HEIGHTS}.items():
        counts = [sum(getattr(words, name) == option for words in seen) for option in options]
        assert sum(counts) == 3000 and all(0.8 < count * len(options) / 3000 < 1.2 for count in counts), name


def test_held_out_pairs_never_appear_and_can_be_asked_for():
    held_out = [("round table", "tall"), ("chair", "low")]
    train, test = SyntheticMeshes(500, held_out=held_out), SyntheticMeshes(50, only=held_out)
    seen, unseen = ({data.attributes(index).caption for index in range(len(data))} for data in (train, test))
    assert unseen == {"a tall round table", "a low chair"}
    assert len(seen) == 26 - 2 and not seen & unseen and "a tall square table" in seen


def test_what_cannot_be_made_is_refused():
    for pair in (("table", "huge"), ("round box", "low"), ("chair", "low")):
        with pytest.raises(ValueError, match=r"is no pair of a kind \(table, box\) and a height"):
            SyntheticMeshes(3, held_out=[pair], kinds=["table", "box"])
    for options in ({"kinds": ["sofa"]}, {"kinds": []}, {"heights": ["huge"]}, {"kinds": "box"}):
        with pytest.raises(ValueError, match=r"give a list of at least one of (box|low)"):
            SyntheticMeshes(3, **options)
    with pytest.raises(ValueError, match="leave at least one"):
        SyntheticMeshes(3, held_out=[("box", "low")], only=[("box", "low")])
    with pytest.raises(ValueError, match="num_samples=0"):
        SyntheticMeshes(0)
    with pytest.raises(ValueError, match="num_discrete_coors=32: these meshes need 64"):
        SyntheticMeshes(3, num_discrete_coors=32)
    for sides in ([], [4], [10], [28]):
        with pytest.raises(ValueError, match="give a list of multiples of 4 from 8 to 24"):
            SyntheticMeshes(3, num_sides=sides)
    with pytest.raises(IndexError):
        SyntheticMeshes(3)[3]


def test_loads_in_batches_and_is_itself_a_source_of_meshes():
    data = SyntheticMeshes(5)
    batch = next(Loader(data, batch_size=3, collate=collate_meshes).steps())[0]
    assert batch["vertices"].shape[::2] == (3, 3) and batch["faces"].shape[::2] == (3, 3) and len(batch["texts"]) == 3
    assert "face_edges" not in SyntheticMeshes(5, edges=False)[0]
    again = mesh_data(data, MeshTransform(), augment=False)
    for index in range(5):
        assert (
            torch.equal(again[index]["faces"], data[index]["faces"]) and again[index]["texts"] == data[index]["texts"]
        )
