"""Features to discrete codes and back: learned codebooks, lookup-free, finite scalar, and stacks of them."""

from helicon.quantize.base import Quantized, Quantizer
from helicon.quantize.finite_scalar import FiniteScalarQuantizer
from helicon.quantize.lookup_free import LookupFreeQuantizer
from helicon.quantize.residual import (
    GroupedResidual,
    GroupedResidualFSQ,
    GroupedResidualLFQ,
    GroupedResidualVQ,
    ResidualFSQ,
    ResidualLFQ,
    ResidualQuantizer,
    ResidualVQ,
)
from helicon.quantize.vector import VectorQuantizer

__all__ = [
    "FiniteScalarQuantizer",
    "GroupedResidual",
    "GroupedResidualFSQ",
    "GroupedResidualLFQ",
    "GroupedResidualVQ",
    "LookupFreeQuantizer",
    "Quantized",
    "Quantizer",
    "ResidualFSQ",
    "ResidualLFQ",
    "ResidualQuantizer",
    "ResidualVQ",
    "VectorQuantizer",
]
