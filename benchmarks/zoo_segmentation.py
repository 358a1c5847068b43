"""The architectures of segmentation_models_pytorch, and more encoders for U-Net."""

from benchmarks.zoo_measure import Case, declare_torchvision, images
from benchmarks.zoo_measure import measure as measure_case

ENCODERS = {"DPT": "tu-vit_tiny_patch16_224", "Segformer": "mit_b0"}
ARCHITECTURES = (
    "DPT", "DeepLabV3", "DeepLabV3Plus", "FPN", "Linknet", "MAnet", "PAN", "PSPNet", "Segformer", "UPerNet", "Unet",
    "UnetPlusPlus",
)  # fmt: skip
UNETS = ("mobilenet_v2", "efficientnet-b0", "densenet121", "mobileone_s0", "mit_b0", "vgg11_bn", "xception", "dpn68")


def names() -> list[str]:
    """Return the names of the models."""
    return [*ARCHITECTURES, *[f"Unet {encoder}" for encoder in UNETS]]


def build(name: str) -> Case:
    """Build a model with random weights, and a batch."""
    declare_torchvision()
    import segmentation_models_pytorch as segmentation

    kind, _, encoder = name.partition(" ")
    encoder = encoder or ENCODERS.get(kind, "resnet18")
    given = {"dynamic_img_size": True} if kind == "DPT" else {}
    model = getattr(segmentation, kind)(encoder, encoder_weights=None, classes=2, **given)
    return model, images(128 if kind == "PAN" else 64)


def measure(name: str) -> dict[str, object]:
    """Compare a model's recovered gradients with those of autograd."""
    return measure_case(lambda: build(name))
