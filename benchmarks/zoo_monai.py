"""Networks of MONAI with small settings, on images of two or three dims."""

from typing import Any

import torch

from benchmarks.zoo_measure import CLASSES, SAMPLES, Case, declare_torchvision, images
from benchmarks.zoo_measure import measure as measure_case

Settings = dict[str, object]
PLANE: Settings = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
UNET: Settings = {**PLANE, "channels": (8, 16, 32), "strides": (2, 2)}
CLASSIFIER: Settings = {"in_shape": (1, 32, 32), "classes": CLASSES, "channels": (8, 16), "strides": (2, 2)}
NETWORKS: dict[str, tuple[int, int, int, Settings]] = {  # size, channels, dims, settings
    "AHNet": (64, 1, 2, {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "psp_block_num": 0}),
    "AttentionUnet": (32, 1, 2, UNET),
    "AutoEncoder": (32, 1, 2, {**PLANE, "channels": (8, 16), "strides": (2, 2)}),
    "BasicUNet": (32, 1, 2, {**PLANE, "features": (8, 8, 16, 16, 32, 8)}),
    "BasicUNetPlusPlus": (32, 1, 2, {**PLANE, "features": (8, 8, 16, 16, 32, 8)}),
    "Classifier": (32, 1, 2, CLASSIFIER),
    "DAF3D": (32, 1, 3, {"in_channels": 1, "out_channels": 2}),
    "DenseNet121": (64, 1, 2, {**PLANE, "out_channels": CLASSES}),
    "DynUNet": (
        32, 1, 2,
        {**PLANE, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2],
         "filters": [8, 16, 32]},
    ),
    "EfficientNetBN": (
        64, 1, 2,
        {"model_name": "efficientnet-b0", "pretrained": False, "spatial_dims": 2, "in_channels": 1,
         "num_classes": CLASSES},
    ),
    "FlexibleUNet": (64, 1, 2, {"in_channels": 1, "out_channels": 2, "backbone": "efficientnet-b0"}),
    "FullyConnectedNet": (32, 1, 0, {"in_channels": 32, "out_channels": CLASSES, "hidden_channels": (16, 16)}),
    "HighResNet": (16, 1, 2, PLANE),
    "HoVerNet": (256, 3, 2, {"out_classes": 0}),
    "MedNeXt": (32, 1, 2, {**PLANE, "init_filters": 8, "blocks_down": (1, 1, 1, 1), "blocks_up": (1, 1, 1, 1)}),
    "Quicknat": (64, 1, 2, {"num_classes": 2, "num_filters": 8}),
    "RegUNet": (32, 1, 2, {**PLANE, "num_channel_initial": 8, "depth": 2}),
    "Regressor": (32, 1, 2, {"in_shape": (1, 32, 32), "out_shape": (3,), "channels": (8, 16), "strides": (2, 2)}),
    "ResNet": (
        32, 1, 3,
        {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [8, 16, 32, 64], "n_input_channels": 1,
         "num_classes": CLASSES},
    ),
    "SEResNet50": (64, 1, 2, {"spatial_dims": 2, "in_channels": 1, "num_classes": CLASSES}),
    "SegResNet": (32, 1, 2, {**PLANE, "init_filters": 8}),
    "SegResNetDS": (32, 1, 2, {**PLANE, "init_filters": 8}),
    "SwinUNETR": (64, 1, 2, {**PLANE, "feature_size": 12}),
    "TorchVisionFCModel": (
        64, 3, 2, {"model_name": "resnet18", "num_classes": CLASSES, "pool": None, "pretrained": False},
    ),
    "UNETR": (
        32, 1, 2,
        {"in_channels": 1, "out_channels": 2, "img_size": 32, "spatial_dims": 2, "hidden_size": 24, "mlp_dim": 32,
         "num_heads": 4, "feature_size": 8},
    ),
    "UNet": (32, 1, 2, {**UNET, "num_res_units": 2}),
    "VNet": (32, 1, 3, {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}),
    "ViT": (
        32, 1, 2,
        {"in_channels": 1, "img_size": 32, "patch_size": 8, "spatial_dims": 2, "hidden_size": 24, "mlp_dim": 32,
         "num_layers": 2, "num_heads": 4, "classification": True, "num_classes": CLASSES},
    ),
    "ViTAutoEnc": (
        32, 1, 2,
        {"in_channels": 1, "img_size": 32, "patch_size": 16, "spatial_dims": 2, "hidden_size": 24, "mlp_dim": 32,
         "num_layers": 2, "num_heads": 4},
    ),
    "VarFullyConnectedNet": (
        32, 1, 0,
        {"in_channels": 32, "out_channels": CLASSES, "latent_size": 4, "encode_channels": (16,),
         "decode_channels": (16,)},
    ),
    "VoxelMorphUNet": (
        32, 2, 2,
        {"spatial_dims": 2, "in_channels": 2, "unet_out_channels": 8, "channels": (8, 8, 16, 16),
         "final_conv_channels": (8,)},
    ),
}  # fmt: skip


def names() -> list[str]:
    """Return the names of the networks."""
    return list(NETWORKS)


def build(name: str) -> Case:
    """Build a network, and a batch of images, or of vectors for those without spatial dims."""
    declare_torchvision()
    from monai.networks import nets

    size, channels, dims, settings = NETWORKS[name]
    kind: Any = getattr(nets, name)  # type: ignore[explicit-any]
    inputs = images(size, channels, dims) if dims else torch.randn(SAMPLES, size).double()
    return kind(**settings), inputs


def measure(name: str) -> dict[str, object]:
    """Compare a network's recovered gradients with those of autograd."""
    return measure_case(lambda: build(name))
