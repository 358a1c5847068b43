"""Torchvision's models of images and videos with at most 30 million parameters; not those that detect objects."""

from benchmarks.zoo_measure import CLASSES, Case, declare_torchvision, images
from benchmarks.zoo_measure import measure as measure_case

PARAMETERS = 30e6
SIZES = {"inception_v3": 299, "vit_b_16": 224, "maxvit_t": 224, "s3d": 196}


def names() -> list[str]:
    """Return the names of the models."""
    declare_torchvision()
    from torchvision import models

    kinds = (models, models.segmentation, models.video)
    found = [name for kind in kinds for name in models.list_models(module=kind)]
    return sorted(name for name in found if _count(name) <= PARAMETERS)


def _count(name: str) -> float:
    """Return the number of parameters of the published weights."""
    from torchvision import models

    return float(next(iter(models.get_model_weights(name))).meta["num_params"])


def build(name: str) -> Case:
    """Build a model with random weights, and a batch."""
    declare_torchvision()
    from torchvision import models

    video = name in models.list_models(module=models.video)
    segmentation = name in models.list_models(module=models.segmentation)
    given = {"weights_backbone": None} if segmentation else {}
    model = models.get_model(name, weights=None, num_classes=CLASSES, **given)
    if not video:
        return model, images(SIZES.get(name, 64))
    return model, images(SIZES.get(name, 64)).unsqueeze(2).repeat(1, 1, 16, 1, 1)


def measure(name: str) -> dict[str, object]:
    """Compare a model's recovered gradients with those of autograd."""
    return measure_case(lambda: build(name))
