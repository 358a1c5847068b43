"""The paper's networks. Nothing else in Fedveil knows them: any nn.Module will do in their place."""

from fedveil.models.cnn import cnn
from fedveil.models.densenet import densenet
from fedveil.models.lenet import lenet
from fedveil.models.mlp import mlp
from fedveil.models.resnet import resnet

__all__ = ["cnn", "densenet", "lenet", "mlp", "resnet"]
