"""Example networks. The rest of Fedveil does not depend on them and works with any nn.Module."""

from typing import TYPE_CHECKING

from fedveil.lookup import lazy_getattr

if TYPE_CHECKING:
    from fedveil.models.convert import with_group_norm
    from fedveil.models.residual import resnet
    from fedveil.models.sequential import cnn, lenet, mlp
else:
    _MODULES = dict.fromkeys(("cnn", "lenet", "mlp"), "sequential")
    __getattr__ = lazy_getattr(__name__, _MODULES | {"resnet": "residual", "with_group_norm": "convert"})

__all__ = ["cnn", "lenet", "mlp", "resnet", "with_group_norm"]
