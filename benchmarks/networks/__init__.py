"""Small networks of every common kind, written as users write them: what Fedveil must cover and leave exact."""

from benchmarks.networks.architecture import Architecture
from benchmarks.networks.decoders import DECODERS
from benchmarks.networks.encoders import ENCODERS
from benchmarks.networks.mixers import MIXERS
from benchmarks.networks.mobile import MOBILE
from benchmarks.networks.pixelwise import PIXELWISE
from benchmarks.networks.recurrent import RECURRENT
from benchmarks.networks.residual import RESIDUAL
from benchmarks.networks.sets import SETS
from benchmarks.networks.swin import SWINS
from benchmarks.networks.tables import TABLES
from benchmarks.networks.text import TEXT
from benchmarks.networks.vit import VISION_TRANSFORMERS

ARCHITECTURES: tuple[Architecture, ...] = (
    *ENCODERS,
    *DECODERS,
    *VISION_TRANSFORMERS,
    *SWINS,
    *MIXERS,
    *RECURRENT,
    *TEXT,
    *RESIDUAL,
    *MOBILE,
    *PIXELWISE,
    *SETS,
    *TABLES,
)

__all__ = ["ARCHITECTURES", "Architecture"]
