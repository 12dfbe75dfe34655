import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helicon.data.mesh import derive_face_edges_from_faces, quantize_coordinates
from helicon.data.mesh_data import collate_meshes
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.models.meshgpt.autoencoder import LossBreakdown, MeshAutoencoder, Reconstruction, blurred_cross_entropy
from helicon.models.meshgpt.graph import neighbour_table
from helicon.models.meshgpt.transformer import MeshTransformer
from helicon.nn.network import load_network

QUANTIZERS: dict[str, dict[str, Any]] = {
    "lookup_free": {"codebook_size": 64},
    "vector": {"codebook_size": 24, "use_residual_lfq": False},
    "finite_scalar": {"fsq_levels": [4, 3, 3]},
}
ATTENTION = {
    "attn_encoder_depth": 1,
    "attn_decoder_depth": 1,
    "local_attn_window_size": 3,
    "local_attn_kwargs": {"dim_head": 4, "heads": 2},
}
SIZES: dict[str, Any] = {
    "dim_coor_embed": 9,
    "dim_area_embed": 3,
    "dim_normal_embed": 5,
    "dim_angle_embed": 3,
    "encoder_dims_through_depth": (8, 10, 10),
    "decoder_dims_through_depth": (12, 12, 14),
    "init_decoder_conv_kernel": 5,
    "dim_codebook": 16,
}


def tiny(**changes: Any) -> MeshAutoencoder:
    torch.manual_seed(0)
    arguments = SIZES | changes
    if "fsq_levels" not in arguments:
        arguments.setdefault("codebook_size", 64)
    return MeshAutoencoder(**arguments)


def stirred(autoencoder: MeshAutoencoder) -> MeshAutoencoder:
    """With weights everywhere: what starts at zero would hide what depends on it."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in autoencoder.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return autoencoder


def meshes(count: int = 3, quads: bool = False, kinds: tuple[str, ...] = ("box", "table")) -> dict[str, Tensor]:
    data = SyntheticMeshes(count, seed=3, quads=quads, edges=False, kinds=kinds)
    samples = [{name: value for name, value in data[index].items() if name != "texts"} for index in range(count)]
    return collate_meshes(samples)


# ---------------------------------------------------------------------------------------------- building


@pytest.mark.parametrize("quads", [False, True])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_everything_is_trained(kind: str, quads: bool):
    autoencoder, batch = stirred(tiny(quads=quads, **QUANTIZERS[kind], **ATTENTION)), meshes(quads=quads)
    loss = autoencoder(**batch)
    loss.backward()
    assert loss.ndim == 0 and loss.isfinite()
    idle = [name for name, p in autoencoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # A wave of which no coordinate has the bin, or a bit that is always set, has none.
    assert [name for name in idle if "project_in" not in name] == []


def test_the_defaults_are_valid_and_have_the_sizes_users_know():
    autoencoder = MeshAutoencoder()
    assert (autoencoder.codebook_size, autoencoder.num_quantizers, autoencoder.tokens_per_face) == (16384, 2, 6)
    assert autoencoder.pad_id == -1 and autoencoder.device == torch.device("cpu")
    assert MeshAutoencoder(quads=True).tokens_per_face == 8
    count = sum(parameter.numel() for parameter in autoencoder.parameters())
    assert 8e6 < count < 10e6


@pytest.mark.parametrize("num_quantizers", [1, 3])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_any_number_of_quantizers(kind: str, num_quantizers: int):
    autoencoder = tiny(num_quantizers=num_quantizers, **QUANTIZERS[kind])
    batch = meshes()
    assert autoencoder.tokenize(**batch).shape == (3, batch["faces"].shape[1] * 3, num_quantizers)


def test_the_keywords_of_the_reference_are_taken():
    autoencoder = tiny(
        rq_kwargs={"quantize_dropout": True, "quantize_dropout_cutoff_index": 1, "quantize_dropout_multiple_of": 1},
        rlfq_kwargs={
            "frac_per_sample_entropy": 1.0,
            "soft_clamp_input_value": 10.0,
            "experimental_softplus_entropy_loss": True,
        },
        sageconv_kwargs={"normalize": True, "project": True},
        rvq_kwargs={"kmeans_init": True, "threshold_ema_dead_code": 2},
        rvq_stochastic_sample_codes=True,
        flash_attn=False,
        use_linear_attn=True,
        linear_attn_kwargs={"dim_head": 8, "heads": 16},
        checkpoint_quantizer=False,
        coor_continuous_range=(-2.0, 2.0),
    )
    assert (autoencoder.quantizer.soft_clamp == 10).all()
    loss, breakdown = autoencoder(**meshes(), return_loss_breakdown=True)
    assert loss.isfinite() and breakdown.commitment > 0
    assert autoencoder(**meshes(), only_return_recon_faces=True).nan_to_num().abs().max() <= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attn_kwargs": {"heads": 2}}, "there is no linear attention, leave it out"),
        ({"checkpoint_quantizer": True}, "checkpoint_quantizer is not supported"),
        ({"pad_id": 0}, "pad_id=0 must be negative"),
        ({"init_decoder_conv_kernel": 4}, "init_decoder_conv_kernel=4 must be odd"),
        ({"bin_smooth_blur_sigma": -1.0}, "bin_smooth_blur_sigma=-1.0 must not be negative"),
        ({"coor_continuous_range": (1.0, -1.0)}, "the smaller first"),
        ({"fsq_levels": [4, 4], "codebook_size": 8}, "make 16 codes, not 8"),
        ({"codebook_size": 100}, "codebook_size=100 must be a power of two"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_saved_and_loaded_it_is_the_same(tmp_path: Path):
    autoencoder, batch = stirred(tiny(**ATTENTION)).eval(), meshes()
    autoencoder.save_pretrained(tmp_path / "saved")
    for loaded in (load_network(tmp_path / "saved"), MeshAutoencoder.init_and_load(tmp_path / "saved")):
        torch.testing.assert_close(loaded(**batch), autoencoder(**batch), rtol=0, atol=0)
    with pytest.raises(ValueError, match="holds a MeshAutoencoder, not a MeshTransformer"):
        MeshTransformer.init_and_load(tmp_path / "saved")


# ---------------------------------------------------------------------------------------------- codes


def test_at_the_start_codes_tell_all_places_apart():
    """128 bins of three coordinates have 21 bits; two codes of 14 bits have room for them."""
    autoencoder = tiny(codebook_size=16384, dim_codebook=32)
    bins = torch.randint(128, (1, 3000, 3), generator=torch.Generator().manual_seed(0))
    codes = autoencoder.tokenize((bins + 0.5) / 64 - 1, torch.arange(3000).view(1, 1000, 3))
    assert len(codes[0].unique(dim=0)) == len(bins[0].unique(dim=0))


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_vertex_has_the_same_codes_in_all_its_faces(kind: str):
    autoencoder, batch = stirred(tiny(**QUANTIZERS[kind])), meshes(1)
    faces = batch["faces"][0]
    codes = autoencoder.tokenize(**batch)[0]
    assert codes.shape == (faces.numel(), 2) and codes.min() >= 0 and codes.max() < autoencoder.codebook_size
    first: dict[int, list[int]] = {}
    for vertex, own in zip(faces.flatten().tolist(), codes.tolist(), strict=True):
        assert first.setdefault(vertex, own) == own


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_vertices_without_faces_and_padding_have_no_part_in_the_quantizer(kind: str):
    """D-M9: in the reference they enter the losses and the codebooks."""
    options = {"rvq_kwargs": {"threshold_ema_dead_code": 2}} | QUANTIZERS[kind]
    batch, outcomes = meshes(1), []
    for extra in (0, 40):
        torch.manual_seed(0)
        autoencoder = stirred(tiny(**options))
        vertices = torch.cat((batch["vertices"], torch.full((1, extra, 3), 0.3)), dim=1)
        faces = F.pad(batch["faces"], (0, 0, 0, extra), value=-1)
        found = autoencoder(vertices, faces, return_reconstruction=True)
        outcomes.append((found.loss, found.parts, dict(autoencoder.quantizer.state_dict())))
    torch.testing.assert_close(outcomes[0], outcomes[1])


def test_the_codebook_entropy_is_not_that_of_single_rows():
    """D-dep1: with a mask, the reference's present dependencies leave the diversity term out."""
    parts = tiny()(**meshes(), return_reconstruction=True).parts
    assert parts["codebook_entropy_0"] > parts["per_sample_entropy_0"] + 1


def test_quantize_dropout_is_off_and_can_be_had():
    batch = meshes()
    assert ((tiny()(**batch, return_codes=True) == -1).all(dim=2) == (batch["faces"] < 0).flatten(1)).all()
    torch.manual_seed(0)
    dropping = tiny(rq_kwargs={"quantize_dropout": True})
    lengths = {int((dropping(**batch, return_codes=True)[0, 0] >= 0).sum()) for _ in range(20)}
    assert lengths == {1, 2}


def test_codes_are_sampled_at_the_temperature_asked_for():
    autoencoder = tiny(codebook_size=24, use_residual_lfq=False, rvq_stochastic_sample_codes=True)
    batch = meshes()
    nearest = autoencoder.tokenize(**batch)
    quantizer = autoencoder.quantizer.layers[0]
    quantizer.initialised.fill_(True)  # k-means would move the codes
    quantizer.decay, quantizer.threshold_ema_dead_code = 1.0, 0
    cold = autoencoder(**batch, return_codes=True, rvq_sample_codebook_temp=1e-6)
    hot = autoencoder(**batch, return_codes=True, rvq_sample_codebook_temp=1e6)
    assert (cold == nearest).float().mean() > 0.99 > 0.5 > (hot == nearest)[nearest >= 0].float().mean()
    autoencoder(**batch)
    assert quantizer.sample_codebook_temp == 1.0


# ---------------------------------------------------------------------------------------------- invariance


@pytest.mark.parametrize("quads", [False, True])
def test_a_mesh_does_not_depend_on_what_is_beside_it(quads: bool):
    autoencoder, batch = stirred(tiny(quads=quads, **ATTENTION)).eval(), meshes(quads=quads)
    together = autoencoder(**batch, return_reconstruction=True)
    total, num_faces = 0.0, 0
    for mesh, (vertices, faces) in enumerate(zip(batch["vertices"], batch["faces"], strict=True)):
        faces = faces[faces[:, 0] >= 0]
        alone = autoencoder(vertices[None, : int(faces.max()) + 1], faces[None], return_reconstruction=True)
        torch.testing.assert_close(together.logits[mesh, : len(faces)], alone.logits[0], atol=1e-4, rtol=1e-4)
        assert torch.equal(together.codes[mesh, : faces.numel()], alone.codes[0])
        assert (together.codes[mesh, faces.numel() :] == -1).all()
        total, num_faces = total + alone.breakdown.reconstruction * len(faces), num_faces + len(faces)
    torch.testing.assert_close(together.breakdown.reconstruction, total / num_faces)


@pytest.mark.parametrize("quads", [False, True])
def test_given_and_found_neighbours_are_the_same(quads: bool):
    autoencoder, batch = stirred(tiny(quads=quads)).eval(), meshes(quads=quads)
    found = autoencoder.encode(**batch)
    table = neighbour_table(batch["faces"], batch["vertices"].shape[1])
    edges = derive_face_edges_from_faces(batch["faces"])
    is_face = batch["faces"][..., 0] >= 0
    for given in ({"neighbours": table}, {"face_edges": edges}):
        torch.testing.assert_close(autoencoder.encode(**batch, **given)[is_face], found[is_face])
    alone = autoencoder.encode(**batch, neighbours=torch.full_like(table, -1))
    assert not torch.allclose(alone[is_face], found[is_face], atol=1e-2)


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_mesh_of_padding_alone_costs_nothing(kind: str):
    autoencoder = stirred(tiny(**QUANTIZERS[kind], **ATTENTION))
    loss, breakdown = autoencoder(torch.zeros(2, 1, 3), torch.full((2, 4, 3), -1), return_loss_breakdown=True)
    loss.backward()
    assert breakdown.reconstruction == 0 and loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in autoencoder.parameters())
    assert autoencoder.tokenize(torch.zeros(1, 3), torch.full((4, 3), -1)).shape == (0, 2)


def test_one_face_is_a_mesh():
    autoencoder = tiny(**ATTENTION)
    vertices, faces = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0, 0.5, 0]]), torch.tensor([[0, 1, 2]])
    assert autoencoder.tokenize(vertices, faces).shape == (3, 2)
    assert autoencoder(vertices[None], faces[None]).isfinite()


# ---------------------------------------------------------------------------------------------- forward, tokenize, decode


def test_forward_returns_what_is_asked_for():
    autoencoder, batch = stirred(tiny()).eval(), meshes()
    loss = autoencoder(**batch)
    again, breakdown = autoencoder(**batch, return_loss_breakdown=True)
    recon_faces, last, (error, commitment) = autoencoder(**batch, return_recon_faces=True, return_loss_breakdown=True)
    assert isinstance(breakdown, LossBreakdown)
    torch.testing.assert_close((loss, loss, error, commitment), (again, last, *breakdown))
    torch.testing.assert_close(loss, error + 0.1 * commitment)
    torch.testing.assert_close(autoencoder(**batch, return_recon_faces=True), (recon_faces, loss), equal_nan=True)
    only = autoencoder(**batch, only_return_recon_faces=True)
    torch.testing.assert_close(only, recon_faces, equal_nan=True)
    assert torch.equal(only.isnan().any(dim=3).any(dim=2), batch["faces"][..., 0] < 0)
    everything = autoencoder(**batch, return_reconstruction=True)
    assert isinstance(everything, Reconstruction) and everything.logits.shape == (*batch["faces"].shape, 3, 128)
    corners = batch["vertices"][torch.arange(3)[:, None, None], batch["faces"].clamp(min=0)]
    assert torch.equal(everything.targets[everything.is_face], quantize_coordinates(corners)[everything.is_face])
    assert torch.equal(everything.codes, autoencoder(**batch, return_codes=True))


@pytest.mark.parametrize("quads", [False, True])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_codes_alone_give_the_reconstructed_faces(kind: str, quads: bool):
    autoencoder, batch = stirred(tiny(quads=quads, **QUANTIZERS[kind], **ATTENTION)).eval(), meshes(quads=quads)
    expected = autoencoder(**batch, only_return_recon_faces=True)
    codes = autoencoder.tokenize(**batch)
    for given in (codes, codes.flatten(1)):
        coordinates, bins, face_mask = autoencoder.decode_from_codes_to_faces(given, return_discrete_codes=True)
        torch.testing.assert_close(coordinates, expected, equal_nan=True)
        assert torch.equal(face_mask, batch["faces"][..., 0] >= 0)
        assert torch.equal(bins[face_mask], quantize_coordinates(coordinates[face_mask]))
        assert (bins[~face_mask] == -1).all()
    fewer = face_mask & (torch.arange(face_mask.shape[1]) < 5)
    coordinates, mask = autoencoder.decode_from_codes_to_faces(codes, fewer)
    assert torch.equal(mask, fewer) and torch.equal(coordinates.isnan().any(dim=3).any(dim=2), ~fewer)


def test_no_codes_are_no_faces():
    coordinates, face_mask = tiny().decode_from_codes_to_faces(torch.zeros(2, 0, dtype=torch.long))
    assert coordinates.shape == (2, 0, 3, 3) and face_mask.shape == (2, 0)


def test_the_steps_can_be_taken_one_by_one():
    autoencoder, batch = stirred(tiny()).eval(), meshes()
    faces, is_face = batch["faces"], batch["faces"][..., 0] >= 0
    embedded = autoencoder.encode(**batch)
    quantized, codes, loss = autoencoder.quantize(faces=faces, face_embed=embedded)
    assert embedded.shape == quantized.shape == (*faces.shape[:2], 48) and loss.ndim == 0
    assert torch.equal(codes, autoencoder.tokenize(**batch))
    assert autoencoder.decode(quantized, face_mask=is_face).shape == (*faces.shape[:2], 14)
    whole = is_face.all(dim=1)
    assert torch.equal(autoencoder.decode(quantized)[whole], autoencoder.decode(quantized, is_face)[whole])


@pytest.mark.parametrize("is_training", [True, False])
def test_tokenize_leaves_the_mode_as_it_was(is_training: bool):
    """D-M8: in the reference training goes on in evaluation mode."""
    autoencoder, batch = tiny(resnet_dropout=0.5, codebook_size=24, use_residual_lfq=False), meshes()
    autoencoder.train(is_training)
    before = {name: value.clone() for name, value in autoencoder.state_dict().items()}
    codes = autoencoder.tokenize(**batch)
    assert autoencoder.training is autoencoder.decoder.training is is_training
    assert torch.equal(codes, autoencoder.tokenize(**batch)) and not codes.requires_grad
    autoencoder.decode_from_codes_to_faces(codes)
    assert autoencoder.training is autoencoder.decoder.training is is_training
    torch.testing.assert_close(dict(autoencoder.state_dict()), before, rtol=0, atol=0)


def test_one_mesh_is_tokenized_without_padding():
    autoencoder, batch = stirred(tiny()), meshes()
    edges = derive_face_edges_from_faces(batch["faces"])
    together = autoencoder.tokenize(**batch, face_edges=edges)
    for mesh in range(3):
        alone = autoencoder.tokenize(batch["vertices"][mesh], batch["faces"][mesh], edges[mesh])
        assert torch.equal(alone, together[mesh][together[mesh, :, 0] >= 0])
        assert len(alone) == 3 * (batch["faces"][mesh, :, 0] >= 0).sum()


def test_another_padding_id_is_that_of_the_codes():
    autoencoder, batch = tiny(pad_id=-7), meshes()
    codes = autoencoder.tokenize(**batch)
    assert torch.equal((codes == -7).all(dim=2), (batch["faces"] < 0).flatten(1)) and codes[codes != -7].min() >= 0
    assert torch.equal(autoencoder.decode_from_codes_to_faces(codes)[1], batch["faces"][..., 0] >= 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"faces": torch.zeros(1, 4, 4, dtype=torch.long)}, "faces of 3 corners, not 4: build it with quads=True"),
        ({"faces": torch.zeros(2, 4, 3, dtype=torch.long)}, "must be of equally many meshes"),
        ({"faces": torch.zeros(1, 0, 3, dtype=torch.long)}, "and not empty"),
        ({"faces": torch.full((1, 4, 3), 9)}, "a face refers to vertex 9, and there are 5"),
        ({"face_edges": torch.full((1, 4, 2), 6)}, "face_edges refer to face 6, and there are 4"),
        ({"vertices": torch.full((1, 5, 3), torch.nan)}, "not all finite"),
    ],
)
def test_meshes_that_are_none_are_refused(changes: dict[str, Tensor], message: str):
    batch = {"vertices": torch.rand(1, 5, 3), "faces": torch.zeros(1, 4, 3, dtype=torch.long)}
    reads = [tiny().tokenize, tiny()] if len(changes.get("faces", batch["faces"])) == 1 else [tiny().tokenize]
    for read in reads:
        with pytest.raises(ValueError, match=message):
            read(**(batch | changes))


def test_neighbours_come_from_one_source():
    batch = meshes()
    edges, table = derive_face_edges_from_faces(batch["faces"]), neighbour_table(batch["faces"], 99)
    with pytest.raises(ValueError, match="give face_edges or neighbours, not both"):
        tiny()(**batch, face_edges=edges, neighbours=table)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(1, 7, dtype=torch.long), "not those of whole faces"),
        (torch.full((1, 6), 64), "code 64 is none of the 64"),
    ],
)
def test_codes_that_are_none_are_refused(codes: Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        tiny().decode_from_codes_to_faces(codes)


# ---------------------------------------------------------------------------------------------- loss and precision


@pytest.mark.parametrize("sigma", [0.4, 1.3])
def test_the_blurred_loss_is_the_plain_one_with_blurred_targets(sigma: float):
    """D-M10: the target of an edge bin keeps its whole mass."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(4, 30, 11, generator=generator), torch.randint(11, (4, 30), generator=generator)
    targets[0, :4] = torch.tensor([0, 10, 1, 9])
    reach = {0.4: 1, 1.3: 3}[sigma]
    distance = (torch.arange(11) - targets[..., None]).abs()
    blurred = torch.where(distance <= reach, (-distance.square() / (2 * sigma**2)).exp(), 0)
    blurred = blurred / blurred.sum(dim=-1, keepdim=True)
    expected = -(blurred * logits.log_softmax(dim=-1)).sum(dim=-1)
    torch.testing.assert_close(blurred_cross_entropy(logits, targets, sigma), expected)
    if sigma == 0.4:
        torch.testing.assert_close(blurred[0, 2, :3], torch.tensor([0.0404, 0.9192, 0.0404]), atol=1e-4, rtol=0)


def test_without_a_blur_it_is_cross_entropy():
    """D-M10: the reference divides zero by zero."""
    logits, targets = torch.randn(5, 7, requires_grad=True), torch.tensor([0, 6, 3, 2, 6])
    loss = blurred_cross_entropy(logits, targets, 0.0)
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets, reduction="none"))
    loss.sum().backward()
    assert tiny(bin_smooth_blur_sigma=0.0)(**meshes()).isfinite()


def test_the_loss_is_in_full_precision():
    """D-M11."""
    logits, targets = 20 * torch.randn(50, 128), torch.arange(50)
    loss = blurred_cross_entropy(logits.bfloat16(), targets, 0.4)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, blurred_cross_entropy(logits.bfloat16().float(), targets, 0.4), rtol=0, atol=0)


@pytest.mark.parametrize("route", ["found", "pairs"])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_mixed_precision_trains_on_a_cpu(kind: str, route: str):
    """D-M12: in the reference the sum over corners is an error."""
    batch = meshes()
    if route == "pairs":
        batch["face_edges"] = derive_face_edges_from_faces(batch["faces"])
    autoencoder = tiny(**QUANTIZERS[kind], **ATTENTION)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = autoencoder(**batch)
    mixed.backward()
    assert mixed.dtype == torch.float32 and autoencoder.project_in.weight.grad.isfinite().all()
    torch.manual_seed(0)
    torch.testing.assert_close(mixed, tiny(**QUANTIZERS[kind], **ATTENTION)(**batch), atol=0.1, rtol=0.02)


COMPILED = """
import sys, warnings
import torch
from helicon.models.meshgpt.transformer import MeshTransformer
from helicon.models.meshgpt.autoencoder import MeshAutoencoder

warnings.simplefilter("error")
warnings.simplefilter("ignore", DeprecationWarning)  # the compiler's own, when it is imported
torch.set_num_threads(1)
sizes = dict(dim_coor_embed=8, dim_codebook=16, encoder_dims_through_depth=(8, 8), decoder_dims_through_depth=(8, 12))
sizes |= dict(attn_decoder_depth=1, local_attn_kwargs=dict(dim_head=4, heads=2), local_attn_window_size=3)
vector = dict(codebook_size=24, use_residual_lfq=False, rvq_kwargs={}, rvq_stochastic_sample_codes=True)
pairs = torch.randint(7, (2, 9, 2), generator=torch.Generator().manual_seed(0))
for kind, routes in ((dict(codebook_size=64), (None, pairs)), (vector, (None,))):
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        autoencoder = MeshAutoencoder(**sizes, **kind)
        network = torch.compile(autoencoder, fullgraph=True, backend="aot_eager") if compiles else autoencoder
        for edges in routes:
            torch.manual_seed(1)
            vertices, faces = torch.rand(2, 11, 3), torch.randint(11, (2, 7, 3))
            faces[1, 4:] = -1
            loss = network(vertices, faces, edges)
            autoencoder.zero_grad()
            loss.backward()
            found.append([loss.detach(), *(parameter.grad for parameter in autoencoder.parameters())])
    torch.testing.assert_close(found[: len(routes)], found[len(routes) :])
sys.stdout.write("same")
"""


@pytest.mark.slow
def test_training_compiles_as_one_graph():
    """No shape depends on data and the host waits for nothing: either would break the graph."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.stdout == "same", done.stderr
