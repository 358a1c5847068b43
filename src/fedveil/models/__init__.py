"""The paper's networks. The rest of Fedveil does not depend on them and takes any nn.Module."""

from fedveil.models.cnn import cnn
from fedveil.models.densenet import densenet
from fedveil.models.lenet import lenet
from fedveil.models.mlp import mlp
from fedveil.models.resnet import resnet

__all__ = ["cnn", "densenet", "lenet", "mlp", "resnet"]
