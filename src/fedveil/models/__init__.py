"""The paper's networks. The rest of Fedveil does not depend on them and takes any nn.Module."""

from fedveil.models.dense import densenet
from fedveil.models.residual import resnet
from fedveil.models.sequential import cnn, lenet, mlp

__all__ = ["cnn", "densenet", "lenet", "mlp", "resnet"]
