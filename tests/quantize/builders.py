"""One quantizer of each kind and with each option that changes its path, all of feature size 6."""

from collections.abc import Callable

from torch import nn

from helicon.quantize import (
    FiniteScalarQuantizer,
    GroupedResidualFSQ,
    GroupedResidualLFQ,
    GroupedResidualVQ,
    LookupFreeQuantizer,
    ResidualFSQ,
    ResidualLFQ,
    ResidualVQ,
    VectorQuantizer,
)

BUILD: dict[str, Callable[[], nn.Module]] = {
    "vector": lambda: VectorQuantizer(6, 11),
    "vector projected cosine": lambda: VectorQuantizer(6, 11, codebook_dim=5, use_cosine_sim=True),
    "vector k-means revival rotation": lambda: VectorQuantizer(
        6, 5, kmeans_init=True, kmeans_iters=2, threshold_ema_dead_code=2, rotation_trick=True
    ),
    "vector gradient": lambda: VectorQuantizer(
        6, 11, ema_update=False, kmeans_init=True, kmeans_iters=2, threshold_ema_dead_code=1
    ),
    "lookup-free": lambda: LookupFreeQuantizer(6, commitment_loss_weight=0.3),
    "lookup-free projected": lambda: LookupFreeQuantizer(6, 2**5, soft_clamp_input_value=10.0, inv_temperature=2.0),
    "lookup-free codebooks": lambda: LookupFreeQuantizer(
        6, 2**3, num_codebooks=2, spherical=True, experimental_softplus_entropy_loss=True
    ),
    "finite scalar": lambda: FiniteScalarQuantizer(6, (5, 4, 3)),
    "finite scalar codebooks": lambda: FiniteScalarQuantizer(
        6, (4, 2, 3), num_codebooks=2, preserve_symmetry=True, bound_hard_clamp=True
    ),
    "residual vector": lambda: ResidualVQ(
        6, 3, 7, quantize_dropout=True, rotation_trick=True, kmeans_init=True, kmeans_iters=2, threshold_ema_dead_code=1
    ),
    "residual vector shared": lambda: ResidualVQ(
        6, 3, 7, codebook_dim=4, shared_codebook=True, kmeans_init=True, kmeans_iters=2, threshold_ema_dead_code=1
    ),
    "residual lookup-free": lambda: ResidualLFQ(6, 3, 2**5, soft_clamp_input_value=10.0, quantize_dropout=True),
    "residual finite scalar": lambda: ResidualFSQ(6, 3, (5, 4), quantize_dropout=True),
    "grouped vector": lambda: GroupedResidualVQ(6, groups=2, num_quantizers=2, codebook_size=7, quantize_dropout=True),
    "grouped lookup-free": lambda: GroupedResidualLFQ(6, groups=2, num_quantizers=2, codebook_size=8),
    "grouped finite scalar": lambda: GroupedResidualFSQ(6, groups=3, num_quantizers=2, levels=(3, 4)),
}
RANDOM: dict[str, Callable[[], nn.Module]] = {
    "vector sampled": lambda: VectorQuantizer(6, 11, stochastic_sample_codes=True, sample_codebook_temp=0.5),
    "lookup-free sampled": lambda: LookupFreeQuantizer(6, frac_per_sample_entropy=0.5),
}
