"""MeshAutoencoder: meshes to discrete codes, a few for each vertex, and back (MeshGPT, Siddiqui et al. 2023).

Faces are embedded and exchange what they know with their neighbours (graph.py). Each vertex is the mean of the
corners that meet there; it is quantized once and shared by its faces. A decoder that reads the faces in
order says which bin each coordinate is in.

Letters: b batch, v vertices, f faces, n corners of a face, q quantizers, d, c and e features, m bins, k neighbours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.models.meshgpt.features import FaceEmbedding, num_octaves
from helicon.models.meshgpt.graph import (
    Corners,
    EdgeNeighbours,
    GraphBlock,
    LocalAttention,
    MaskedConv,
    Neighbours,
    ResidualBlock,
    TableNeighbours,
    neighbour_table,
)
from helicon.nn.bins import undiscretize
from helicon.nn.capture import evaluating
from helicon.nn.network import Network
from helicon.nn.norms import RMSNorm
from helicon.quantize.base import Quantized
from helicon.quantize.residual import ResidualFSQ, ResidualLFQ, ResidualQuantizer, ResidualVQ
from helicon.quantize.vector import VectorQuantizer

CODEBOOK_SIZE = 16384
ENCODER_DIMS = (64, 128, 256, 256, 576)
DECODER_DIMS = (*[128] * 4, *[192] * 4, *[256] * 6, *[384] * 3)
SIGNS_END = 2.0  # beyond the outermost level that signs of the scales 1, 1/2, 1/4 ... add up to, by half a step
WAVE_SIZE = 1.55  # after the soft clamp, such a wave is at each of four levels for equally long
LINEAR_ATTENTION = {"dim_head": 8, "heads": 16}  # what the reference package has by default
VQ_DEFAULTS: Mapping[str, Any] = {"kmeans_init": True, "threshold_ema_dead_code": 2}


class Encoder(nn.Module):
    """Embedded faces to features that know of the faces around."""

    def __init__(self, dim: int, widths: Sequence[int], conv_options: Mapping[str, bool], attention: nn.Module | None):
        super().__init__()
        steps = zip((dim, *widths[:-1]), widths, strict=True)
        self.blocks = nn.ModuleList(GraphBlock(before, after, **conv_options) for before, after in steps)
        self.attention = attention
        self.final_norm = RMSNorm(widths[-1])

    def forward(
        self, x: Float[Tensor, "b f d"], neighbours: Neighbours, is_face: Bool[Tensor, "b f"]
    ) -> Float[Tensor, "b f c"]:
        for block in self.blocks:
            x = block(x, neighbours)
        return self.final_norm(x if self.attention is None else self.attention(x, is_face))


class Decoder(nn.Module):
    """The faces' quantized corners to features of which the coordinates can be told."""

    def __init__(
        self, dim: int, widths: Sequence[int], first_kernel_size: int, dropout: float, attention: nn.Module | None
    ):
        super().__init__()
        self.attention = attention
        self.first = MaskedConv(dim, widths[0], first_kernel_size)
        self.first_norm = RMSNorm(widths[0])
        self.blocks = nn.ModuleList(ResidualBlock(before, after, dropout) for before, after in pairwise(widths))
        self.final_norm = RMSNorm(widths[-1])

    def forward(self, x: Float[Tensor, "b f d"], is_face: Bool[Tensor, "b f"]) -> Float[Tensor, "b f c"]:
        if self.attention is not None:
            x = self.attention(x, is_face)
        x = F.silu(self.first_norm(self.first(x, is_face)))
        for block in self.blocks:
            x = block(x, is_face)
        return self.final_norm(x)


def blurred_cross_entropy(
    logits: Float[Tensor, "*s m"], targets: Int[Tensor, "*s"], sigma: float
) -> Float[Tensor, "*s"]:
    """Cross-entropy, in float32, with a target of which a little lies on the bins beside: a gaussian of `sigma` bins.

    Beyond the first and the last bin there is none, so there the others get all of it. With `sigma` 0 it is the plain one.
    """
    logits, num_bins = logits.float(), logits.shape[-1]
    reach = math.ceil(5 * sigma) // 2
    offsets = torch.arange(-reach, reach + 1, device=logits.device)
    places = targets[..., None] + offsets
    is_bin = (places >= 0) & (places < num_bins)
    exponents = -offsets.square() / (2 * max(sigma, 1e-6) ** 2)
    weights = torch.where(is_bin, exponents, -torch.inf).softmax(dim=-1)
    near = logits.gather(-1, places.clamp(0, num_bins - 1))
    return logits.logsumexp(dim=-1) - (weights * near).sum(dim=-1)


class LossBreakdown(NamedTuple):
    """The parts of the loss, before `commit_loss_weight`."""

    reconstruction: Tensor
    commitment: Tensor  # all losses of the quantizer


@dataclass(frozen=True)
class Reconstruction:
    """What the autoencoder makes of a batch of meshes, and what it costs."""

    logits: Tensor  # [b, f, n, 3, m]
    targets: Tensor  # int64 [b, f, n, 3], the bins the coordinates are in
    is_face: Tensor  # bool [b, f], False for padding
    codes: Tensor  # int64 [b, f * n, q]
    loss: Tensor  # 0-d
    breakdown: LossBreakdown
    parts: dict[str, Tensor]  # of the quantizer, to log


class MeshAutoencoder(Network):
    def __init__(
        self,
        num_discrete_coors: int = 128,
        coor_continuous_range: Sequence[float] = (-1.0, 1.0),
        dim_coor_embed: int = 64,
        num_discrete_area: int = 128,
        dim_area_embed: int = 16,
        num_discrete_normals: int = 128,
        dim_normal_embed: int = 64,
        num_discrete_angle: int = 128,
        dim_angle_embed: int = 16,
        encoder_dims_through_depth: Sequence[int] = ENCODER_DIMS,
        init_decoder_conv_kernel: int = 7,
        decoder_dims_through_depth: Sequence[int] = DECODER_DIMS,
        dim_codebook: int = 192,
        num_quantizers: int = 2,
        codebook_size: int = CODEBOOK_SIZE,
        use_residual_lfq: bool = True,
        rq_kwargs: Mapping[str, Any] = {},
        rvq_kwargs: Mapping[str, Any] = VQ_DEFAULTS,
        rlfq_kwargs: Mapping[str, Any] = {},
        rvq_stochastic_sample_codes: bool = False,
        sageconv_kwargs: Mapping[str, bool] = {},
        commit_loss_weight: float = 0.1,
        bin_smooth_blur_sigma: float = 0.4,
        attn_encoder_depth: int = 0,
        attn_decoder_depth: int = 0,
        local_attn_kwargs: Mapping[str, int] = {"dim_head": 32, "heads": 8},
        local_attn_window_size: int = 64,
        linear_attn_kwargs: Mapping[str, Any] | None = None,
        use_linear_attn: bool = False,
        pad_id: int = -1,
        flash_attn: bool = True,
        attn_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        resnet_dropout: float = 0.0,
        checkpoint_quantizer: bool = False,
        quads: bool = False,
        fsq_levels: Sequence[int] | None = None,
    ):
        """
        Args:
            num_discrete_coors, coor_continuous_range: the bins of the coordinates.
            num_discrete_area, num_discrete_normals, num_discrete_angle, dim_*_embed: the bins of the faces' other features
                (features.py), and the sizes of the embeddings.
            encoder_dims_through_depth: widths of the graph convolutions.
            init_decoder_conv_kernel, decoder_dims_through_depth: taps of the decoder's first convolution over faces, an odd
                number; its width, and those of the residual blocks that follow.
            dim_codebook: features of a vertex.
            num_quantizers, codebook_size: codes of a vertex, and of how many each is one.
            use_residual_lfq: codes from signs (helicon.quantize.ResidualLFQ) instead of learned codebooks (ResidualVQ).
            fsq_levels: codes from rounding to these levels (ResidualFSQ) in place of either; they make the codebook_size.
            rq_kwargs: for whichever quantizer, such as quantize_dropout.
            rvq_kwargs, rvq_stochastic_sample_codes: for ResidualVQ, whose levels share a codebook; whether codes are sampled.
            rlfq_kwargs: for ResidualLFQ. What enters it is kept below `soft_clamp_input_value`, 2 by default, by a tanh.
            sageconv_kwargs: `normalize` and `project` of the graph convolutions.
            commit_loss_weight: of the quantizer's losses.
            bin_smooth_blur_sigma: how far, in bins, the target of a coordinate is spread; 0 for not at all.
            attn_encoder_depth, attn_decoder_depth: layers of local attention over the faces in order, after the graph
                convolutions and before the decoder's. They have `local_attn_kwargs` (dim_head, heads),
                `local_attn_window_size`, `attn_dropout` and `ff_dropout`.
            use_linear_attn, linear_attn_kwargs, checkpoint_quantizer: there is no linear attention, and nothing to recompute. The
                reference package's own defaults mean what leaving them out means; others are refused.
            pad_id: of codes (and faces: anything negative is padding).
            flash_attn: without effect: attention is `scaled_dot_product_attention`, which chooses its kernel itself.
            quads: faces have four corners instead of three.
        """
        super().__init__()
        _refuse(linear_attn_kwargs, checkpoint_quantizer)
        _check_sizes(pad_id, init_decoder_conv_kernel, bin_smooth_blur_sigma, coor_continuous_range)
        self.num_vertices_per_face = 4 if quads else 3
        self.num_quantizers = num_quantizers
        self.num_discrete_coors = num_discrete_coors
        self.coor_continuous_range = (coor_continuous_range[0], coor_continuous_range[1])
        self.commit_loss_weight = commit_loss_weight
        self.bin_smooth_blur_sigma = bin_smooth_blur_sigma
        self.pad_id = pad_id
        self.sample_codebook_temp = rvq_kwargs.get("sample_codebook_temp", 1.0)

        def attention(dim: int, depth: int) -> LocalAttention | None:
            if not depth:
                return None
            return LocalAttention(
                dim,
                depth,
                local_attn_window_size,
                dropout=ff_dropout,
                attn_dropout=attn_dropout,
                **local_attn_kwargs,
            )

        corners_dim = self.num_vertices_per_face * dim_codebook
        widths, decoder_widths = list(encoder_dims_through_depth), list(decoder_dims_through_depth)
        self.embedding = FaceEmbedding(
            num_corners=self.num_vertices_per_face,
            continuous_range=self.coor_continuous_range,
            coordinates=(num_discrete_coors, dim_coor_embed),
            angles=(num_discrete_angle, dim_angle_embed),
            area=(num_discrete_area, dim_area_embed),
            normals=(num_discrete_normals, dim_normal_embed),
        )
        self.project_in = nn.Linear(self.embedding.dim, dim_codebook)
        self.encoder = Encoder(dim_codebook, widths, sageconv_kwargs, attention(widths[-1], attn_encoder_depth))
        # A vertex starts as its coordinates alone, which are the same at all its corners; what faces know is added in time.
        self.to_corners = nn.Linear(widths[-1], corners_dim, bias=False)
        nn.init.zeros_(self.to_corners.weight)
        self.coordinates_to_corners = nn.Linear(3 * dim_coor_embed, dim_codebook, bias=False)
        self.quantizer = _quantizer(
            dim_codebook,
            num_quantizers,
            codebook_size,
            fsq_levels,
            {**rlfq_kwargs, **rq_kwargs} if use_residual_lfq else None,
            {"stochastic_sample_codes": rvq_stochastic_sample_codes, **rvq_kwargs, **rq_kwargs},
            rq_kwargs,
        )
        self.codebook_size: int = self.quantizer.codebook_size
        self.decoder = Decoder(
            corners_dim,
            decoder_widths,
            init_decoder_conv_kernel,
            resnet_dropout,
            attention(corners_dim, attn_decoder_depth),
        )
        # Both make something like the embedding of a bin: what is learned of one bin goes for those beside it, too.
        self.to_coordinates = nn.Linear(decoder_widths[-1], self.num_vertices_per_face * 3 * dim_coor_embed)
        nn.init.zeros_(self.to_coordinates.weight)
        # Much of a vertex can be told from its own codes, in the same way at every corner.
        self.corner_to_coordinates = nn.Sequential(
            nn.Linear(dim_codebook, 4 * dim_codebook), nn.SiLU(), nn.Linear(4 * dim_codebook, 3 * dim_coor_embed)
        )
        if use_residual_lfq and fsq_levels is None:
            self._start_from_waves()

    @torch.no_grad()
    def _start_from_waves(self) -> None:
        """Lets the codes of a vertex be bits of its coordinates at first.

        A number that becomes q signs, each of half the scale of the one before, has 2^q levels: a wave that it follows
        tells as many bits as q waves of halving periods would by their signs (features.wave_table). From a random start
        signs take several times as long to tell the bins apart.
        """
        projection, table = self.quantizer.project_in, self.embedding.coordinate_embed
        num_waves = min(num_octaves(table.num_embeddings), table.embedding_dim)
        waves = torch.zeros(self.quantizer.code_dim, 3, table.embedding_dim)
        for place in range(len(waves)):  # the coordinates take turns
            waves[place, place % 3, place // 3 * self.num_quantizers % num_waves] = WAVE_SIZE
        start = waves.flatten(1)
        if isinstance(projection, nn.Linear):
            start = torch.linalg.pinv(projection.weight) @ start
            nn.init.zeros_(projection.bias)
        self.coordinates_to_corners.weight.copy_(start)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def tokens_per_face(self) -> int:
        return self.num_vertices_per_face * self.num_quantizers

    def encode(
        self,
        vertices: Float[Tensor, "b v 3"],
        faces: Int[Tensor, "b f n"],
        face_edges: Int[Tensor, "b e 2"] | None = None,
        neighbours: Int[Tensor, "b f k"] | None = None,
        return_face_coordinates: bool = False,
    ) -> Any:
        """Features of the faces' corners `[b, f, n * dim_codebook]`; with them, the bins of the coordinates `[b, f, n, 3]`."""
        self._check(vertices, faces, face_edges, neighbours)
        features = self.embedding(_coordinates(vertices, faces))
        graph = _graph(faces, vertices.shape[1], face_edges, neighbours)
        encoded = self.encoder(self.project_in(features.faces), graph, (faces >= 0).all(dim=2))
        corners = self.to_corners(encoded).unflatten(-1, (self.num_vertices_per_face, -1))
        corners = (corners + self.coordinates_to_corners(features.corners)).flatten(2)
        return (corners, features.coordinates) if return_face_coordinates else corners

    def quantize(
        self,
        faces: Int[Tensor, "b f n"],
        face_embed: Float[Tensor, "b f d"],
        num_vertices: int | None = None,
        rvq_sample_codebook_temp: float | None = None,
    ) -> tuple[Float[Tensor, "b f d"], Int[Tensor, "b p q"], Float[Tensor, ""]]:
        """Quantized features of the corners, their codes `[b, f * n, q]`, and the quantizer's loss.

        num_vertices: that a mesh has at most; without it the host looks for the highest one.
        """
        num_vertices = max(int(faces.max()) + 1, 1) if num_vertices is None else num_vertices
        corners = Corners(faces, num_vertices)
        quantized = self._quantize(corners, face_embed, rvq_sample_codebook_temp)
        return *self._at_corners(corners, quantized), quantized.loss

    def decode(
        self, quantized: Float[Tensor, "b f d"], face_mask: Bool[Tensor, "b f"] | None = None
    ) -> Float[Tensor, "b f c"]:
        """Quantized corners to features of the faces, each of which has seen those around it in the order of faces."""
        if face_mask is None:
            face_mask = torch.ones_like(quantized[..., 0], dtype=torch.bool)
        return self.decoder(quantized, face_mask)

    @torch.no_grad()
    def decode_from_codes_to_faces(
        self,
        codes: Int[Tensor, "b ..."],
        face_mask: Bool[Tensor, "b f"] | None = None,
        return_discrete_codes: bool = False,
    ) -> tuple[Tensor, ...]:
        """Codes `[b, f * n * q]` or `[b, f * n, q]` to the coordinates of faces `[b, f, n, 3]` and which of them are faces.

        Without `face_mask` those are faces that have all their codes; the others' coordinates are NaN. With
        `return_discrete_codes` the bins come between the two, -1 for no face. Runs in evaluation mode, and puts it back.
        """
        by_face = self._by_face(codes)
        if face_mask is None:
            face_mask = (by_face >= 0).flatten(2).all(dim=2)
        bins = by_face.new_zeros(*by_face.shape[:3], 3)
        if bins.numel():
            with evaluating(self):
                values = self.quantizer.decode(torch.where(face_mask[..., None, None], by_face, -1))
                bins = self._logits(values.flatten(2), face_mask).argmax(dim=-1)
        coordinates, bins = self._faces_from_bins(bins, face_mask)
        return (coordinates, bins, face_mask) if return_discrete_codes else (coordinates, face_mask)

    @torch.no_grad()
    def tokenize(
        self, vertices: Float[Tensor, "*c v 3"], faces: Int[Tensor, "*b f n"], face_edges: Tensor | None = None
    ) -> Int[Tensor, "*b p q"]:
        """The codes of the faces' corners, one after another. Those of one mesh alone, given unbatched, have no padding.

        In evaluation mode, which is put back.
        """
        if faces.ndim == 2:
            batch_edges = None if face_edges is None else face_edges[None]
            codes = self.tokenize(vertices[None], faces[None], batch_edges)[0]
            return codes[(codes != self.pad_id).all(dim=1)]
        self._check(vertices, faces, face_edges, None)
        _check_values(vertices, faces, face_edges)
        with evaluating(self):
            return self(vertices, faces, face_edges, return_codes=True)

    def forward(
        self,
        vertices: Float[Tensor, "b v 3"],
        faces: Int[Tensor, "b f n"],
        face_edges: Int[Tensor, "b e 2"] | None = None,
        neighbours: Int[Tensor, "b f k"] | None = None,
        *,
        return_codes: bool = False,
        return_loss_breakdown: bool = False,
        return_recon_faces: bool = False,
        only_return_recon_faces: bool = False,
        return_reconstruction: bool = False,
        rvq_sample_codebook_temp: float | None = None,
    ) -> Any:
        """The loss; or, as asked for: the codes `[b, f * n, q]` alone, a `Reconstruction` alone, the reconstructed faces
        `[b, f, n, 3]` (NaN where there is none) alone or before the loss, and a `LossBreakdown` after it.

        Faces are padded with -1. Their neighbours are given as a table (graph.neighbour_table) or as pairs, or found here.
        rvq_sample_codebook_temp: of codes that are sampled, this time.
        """
        embedded, targets = self.encode(vertices, faces, face_edges, neighbours, return_face_coordinates=True)
        corners = Corners(faces, vertices.shape[1])
        quantized = self._quantize(corners, embedded, rvq_sample_codebook_temp)
        values, codes = self._at_corners(corners, quantized)
        if return_codes:
            return codes
        logits = self._logits(values, corners.is_face)
        if only_return_recon_faces:
            return self._faces_from_bins(logits.argmax(dim=-1), corners.is_face)[0]
        errors = blurred_cross_entropy(logits, targets, self.bin_smooth_blur_sigma).mean(dim=(2, 3))
        error = (errors * corners.is_face).sum() / corners.is_face.sum().clamp(min=1)
        loss, breakdown = error + self.commit_loss_weight * quantized.loss, LossBreakdown(error, quantized.loss)
        if return_reconstruction:
            return Reconstruction(logits, targets, corners.is_face, codes, loss, breakdown, quantized.parts)
        outcome: tuple[Any, ...] = (loss, breakdown) if return_loss_breakdown else (loss,)
        if return_recon_faces:
            outcome = (self._faces_from_bins(logits.argmax(dim=-1), corners.is_face)[0], *outcome)
        return outcome if len(outcome) > 1 else loss

    def _quantize(self, corners: Corners, embedded: Tensor, temperature: float | None) -> Quantized:
        """The vertices `[b, v, d]`; those that no face has take no part."""
        for layer in self.quantizer.layers:
            if isinstance(layer, VectorQuantizer):
                layer.sample_codebook_temp = self.sample_codebook_temp if temperature is None else temperature
        means = corners.means(embedded.unflatten(-1, (self.num_vertices_per_face, -1)))
        return self.quantizer(means, corners.is_used)

    def _at_corners(self, corners: Corners, quantized: Quantized) -> tuple[Tensor, Tensor]:
        values = rearrange(corners.gather(quantized.values), "b f n d -> b f (n d)")
        return values, rearrange(corners.gather(quantized.codes, self.pad_id), "b f n q -> b (f n) q")

    def _logits(self, values: Float[Tensor, "b f d"], is_face: Bool[Tensor, "b f"]) -> Float[Tensor, "b f n 3 m"]:
        by_corner = self.corner_to_coordinates(values.unflatten(-1, (self.num_vertices_per_face, -1)))
        by_face = self.to_coordinates(self.decode(values, is_face)).view_as(by_corner)
        return (by_corner + by_face).unflatten(-1, (3, -1)) @ self.embedding.coordinate_embed.weight.T

    def _faces_from_bins(
        self, bins: Int[Tensor, "b f n 3"], is_face: Bool[Tensor, "b f"]
    ) -> tuple[Float[Tensor, "b f n 3"], Int[Tensor, "b f n 3"]]:
        coordinates = undiscretize(bins, self.num_discrete_coors, self.coor_continuous_range)
        is_padding = ~is_face[..., None, None]
        return coordinates.masked_fill(is_padding, torch.nan), bins.masked_fill(is_padding, -1)

    def _by_face(self, codes: Tensor) -> Int[Tensor, "b f n q"]:
        """Codes as they are given, face by face; -1 for padding."""
        flat = codes.flatten(1)
        if flat.shape[1] % self.tokens_per_face:
            raise ValueError(
                f"codes of shape {tuple(codes.shape)} are not those of whole faces, which have {self.num_vertices_per_face} "
                f"corners of {self.num_quantizers} codes each"
            )
        if flat.numel() and int(flat.max()) >= self.codebook_size:
            raise ValueError(
                f"code {int(flat.max())} is none of the {self.codebook_size} of this autoencoder: cut off ends of sequences"
            )
        by_face = rearrange(flat, "b (f n q) -> b f n q", n=self.num_vertices_per_face, q=self.num_quantizers)
        return torch.where(by_face == self.pad_id, -1, by_face)

    def _check(self, vertices: Tensor, faces: Tensor, face_edges: Tensor | None, neighbours: Tensor | None) -> None:
        """Of shapes, and on a CPU of values: looking at them elsewhere would make the host wait for the device."""
        num_corners = self.num_vertices_per_face
        if faces.shape[-1] != num_corners:
            raise ValueError(
                f"this autoencoder is for faces of {num_corners} corners, not {faces.shape[-1]}: "
                f"build it with quads={faces.shape[-1] == 4}"
            )
        if not (len(vertices) == len(faces) and vertices.shape[1] and faces.shape[1]):
            raise ValueError(
                f"vertices {tuple(vertices.shape)} and faces {tuple(faces.shape)} must be of equally many meshes, and not empty"
            )
        if face_edges is not None and neighbours is not None:
            raise ValueError("give face_edges or neighbours, not both")
        if faces.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_values(vertices, faces, face_edges)


def _coordinates(vertices: Float[Tensor, "b v 3"], faces: Int[Tensor, "b f n"]) -> Float[Tensor, "b f n 3"]:
    """Of each corner; of padding, those of some vertex."""
    first = vertices.shape[1] * torch.arange(len(faces), device=faces.device)[:, None, None]
    rows = (faces.clamp(min=0) + first).long().flatten()
    return vertices.flatten(0, 1).index_select(0, rows).unflatten(0, faces.shape)


def _graph(faces: Tensor, num_vertices: int, face_edges: Tensor | None, neighbours: Tensor | None) -> Neighbours:
    if face_edges is not None:
        return EdgeNeighbours(face_edges)
    return TableNeighbours(neighbour_table(faces, num_vertices) if neighbours is None else neighbours)


def _quantizer(
    dim: int,
    num_quantizers: int,
    codebook_size: int,
    fsq_levels: Sequence[int] | None,
    lfq_kwargs: Mapping[str, Any] | None,
    vq_kwargs: Mapping[str, Any],
    fsq_kwargs: Mapping[str, Any],
) -> ResidualQuantizer:
    """The first of the three kinds that is asked for."""
    if fsq_levels is not None:
        size = math.prod(fsq_levels)
        if codebook_size not in (CODEBOOK_SIZE, size):
            raise ValueError(
                f"fsq_levels={list(fsq_levels)} make {size} codes, not {codebook_size}: leave codebook_size out"
            )
        return ResidualFSQ(dim, num_quantizers, list(fsq_levels), **fsq_kwargs)
    if lfq_kwargs is not None:
        options = {"soft_clamp_input_value": SIGNS_END, **lfq_kwargs}
        return ResidualLFQ(dim, num_quantizers, codebook_size, **options)
    return ResidualVQ(
        dim, num_quantizers, codebook_size, **{"shared_codebook": True, "rotation_trick": True, **vq_kwargs}
    )


def _refuse(linear_attn_kwargs: Mapping[str, Any] | None, checkpoint_quantizer: bool) -> None:
    if linear_attn_kwargs not in (None, LINEAR_ATTENTION):
        raise ValueError(
            f"linear_attn_kwargs={linear_attn_kwargs}: there is no linear attention, leave it out, and give attn_encoder_depth and "
            "attn_decoder_depth for local attention"
        )
    if checkpoint_quantizer:
        raise ValueError(
            "checkpoint_quantizer is not supported: leave it out, the quantizers keep little for the backward pass"
        )


def _check_sizes(pad_id: int, kernel_size: int, sigma: float, continuous_range: Sequence[float]) -> None:
    if pad_id >= 0:
        raise ValueError(f"pad_id={pad_id} must be negative: from 0 on there are vertices and codes")
    if kernel_size % 2 == 0:
        raise ValueError(f"init_decoder_conv_kernel={kernel_size} must be odd")
    if sigma < 0:
        raise ValueError(f"bin_smooth_blur_sigma={sigma} must not be negative")
    if len(continuous_range) != 2 or not continuous_range[0] < continuous_range[1]:
        raise ValueError(f"coor_continuous_range={continuous_range} must be two numbers, the smaller first")


def _check_values(vertices: Tensor, faces: Tensor, face_edges: Tensor | None) -> None:
    if int(faces.max()) >= vertices.shape[1]:
        raise ValueError(f"a face refers to vertex {int(faces.max())}, and there are {vertices.shape[1]}")
    if face_edges is not None and face_edges.numel() and int(face_edges.max()) >= faces.shape[1]:
        raise ValueError(f"face_edges refer to face {int(face_edges.max())}, and there are {faces.shape[1]}")
    if not vertices.isfinite().all():
        raise ValueError("the vertices are not all finite numbers")
