import numpy as np
import pytest
import torch
import trimesh

from helicon.data.mesh import Mesh
from helicon.models.meshgpt import picture
from helicon.models.meshgpt.picture import mesh_picture, mesh_sheet

WHITE = (255, 255, 255)


def of(mesh: trimesh.Trimesh) -> Mesh:
    return Mesh(torch.tensor(np.array(mesh.vertices)).float(), torch.tensor(np.array(mesh.faces)))


def box(*extents: float, at: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Mesh:
    return of(trimesh.creation.box(extents=extents or (1, 1, 1)).apply_translation(at))


def pixels(mesh: Mesh, size: int = 64) -> np.ndarray:
    return np.asarray(mesh_picture(mesh, size)).astype(int)


def is_drawn(image: np.ndarray) -> np.ndarray:
    return (image != WHITE).any(axis=-1)


def is_back(image: np.ndarray) -> np.ndarray:
    """In the colour of what looks away: more red than blue."""
    return image[..., 0] > image[..., 2] + 10


def together(*meshes: Mesh) -> Mesh:
    starts = np.cumsum([0, *(len(mesh.vertices) for mesh in meshes[:-1])]).tolist()
    faces = [mesh.faces + start for mesh, start in zip(meshes, starts, strict=True)]
    return Mesh(torch.cat([mesh.vertices for mesh in meshes]), torch.cat(faces))


def turned(mesh: Mesh) -> Mesh:
    return Mesh(mesh.vertices, mesh.faces.flip(1))


@pytest.mark.parametrize("size", [8, 33, 256])
def test_a_mesh_fills_the_picture_wherever_it_is(size: int):
    image = pixels(box(), size)
    rows, columns = np.nonzero(is_drawn(image))
    assert image.shape == (size, size, 3) and tuple(image[0, 0]) == WHITE
    assert 0.8 * size < max(np.ptp(rows), np.ptp(columns)) + 1 <= size
    assert abs(rows.min() + rows.max() - size + 1) <= 2 and abs(columns.min() + columns.max() - size + 1) <= 2
    far = box(1000, 1000, 1000, at=(5000, -2000, 300))
    assert np.abs(pixels(far, size) - image).mean() < 1


def test_y_is_up_and_the_right_side_is_seen():
    """A spire on a slab: it is thin above and wide below; and of a cube three sides are seen, the top the brightest."""
    rows = is_drawn(pixels(together(box(0.1, 1, 0.1, at=(0, 0.5, 0)), box(1, 0.1, 1)))).sum(axis=1)
    assert 0 < rows[:20].max() < 8 and rows[40:].max() > 40
    image = pixels(box(), 128)
    shades = {
        name: image[place].sum() for name, place in {"top": (22, 64), "left": (80, 30), "right": (80, 105)}.items()
    }
    assert shades["top"] > shades["left"] > shades["right"] and not is_back(image).any()


def test_what_is_nearer_hides_what_is_behind():
    """Whatever the order of faces: the back wall, turned to be seen in the other colour, is behind the box."""
    small, wall = box(0.5, 0.5, 0.5, at=(0, 0, 1)), turned(box(2, 2, 0.1))
    image = pixels(together(small, wall), 96)
    swapped = pixels(together(wall, small), 96)
    assert np.array_equal(image, swapped)
    assert is_back(image).sum() > 1000 and (is_drawn(image) & ~is_back(image)).sum() > 200
    behind = pixels(together(box(0.5, 0.5, 0.5, at=(0, 0, -1)), wall), 96)
    hidden = (is_drawn(behind) & ~is_back(behind)).sum()
    assert hidden < (is_drawn(image) & ~is_back(image)).sum() / 2


def test_pixels_are_those_of_the_nearest_triangle():
    """Against asking each pixel for all triangles, in barycentric coordinates."""
    generator = np.random.default_rng(0)
    corners = generator.uniform(2, 30, (12, 3, 3))
    place, face = picture._nearest(corners, 32)
    covered = dict(zip(place.tolist(), face.tolist(), strict=True))
    for pixel in range(32 * 32):
        x, y = pixel % 32 + 0.5, pixel // 32 + 0.5
        depths = {}
        for number, triangle in enumerate(corners):
            system = np.vstack([triangle[:, :2].T, np.ones(3)])
            weights = np.linalg.solve(system, [x, y, 1])
            if (weights >= 0).all():
                depths[number] = weights @ triangle[:, 2]
        assert covered.get(pixel) == (max(depths, key=depths.__getitem__) if depths else None)


def test_the_diagonals_of_quads_are_no_edges():
    cube = box()
    quads = torch.tensor([[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]])
    brighter = (pixels(Mesh(cube.vertices, quads), 200) - pixels(cube, 200)).sum(axis=-1)
    assert brighter.min() >= 0 and 300 < (brighter > 60).sum() < 1200  # along three diagonals of 100 to 200 pixels
    assert is_drawn(pixels(Mesh(cube.vertices, quads))).sum() == is_drawn(pixels(cube)).sum()


def test_edges_of_small_faces_do_not_blacken_the_picture():
    image = pixels(of(trimesh.creation.icosphere(4)), 64)  # 5120 faces of about a pixel each
    assert image[is_drawn(image)].mean() > 110


def test_odd_meshes_have_pictures_too():
    nothing = Mesh(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.long))
    assert not is_drawn(pixels(nothing)).any()
    flat = Mesh(torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]]), torch.tensor([[0, 1, 2]]))
    assert is_drawn(pixels(flat)).sum() > 500
    point = Mesh(torch.zeros(3, 3), torch.tensor([[0, 1, 2]]))
    assert pixels(point).shape == (64, 64, 3)
    with pytest.raises(ValueError, match="size=7"):
        mesh_picture(flat, 7)


def test_a_sheet_has_rows_of_pictures_with_words():
    sheet = mesh_sheet([[box(), box(1, 2, 1)], [box(2, 1, 1), box(1, 1, 3)]], ["a box", "a taller box"], size=130)
    image = np.asarray(sheet).astype(int)
    assert sheet.width == 2 * 130 + 6 and sheet.height > 2 * 130
    assert np.array_equal(image[:130, :130], pixels(box(), 130))
    assert np.array_equal(image[:130, 136:], pixels(box(1, 2, 1), 130))
    assert is_drawn(image[131:150, :130]).sum() > 20
    with pytest.raises(ValueError, match=r"1 captions for rows of \[2\] pictures"):
        mesh_sheet([[box(), box()]], ["a"])
