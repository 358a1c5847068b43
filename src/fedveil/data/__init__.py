"""Load data sets by name and divide them among clients.

Names are imported on first use, so that reading the catalogue does not import torch.
"""

from typing import TYPE_CHECKING

from fedveil.lookup import lazy_getattr

if TYPE_CHECKING:
    from fedveil.data.catalogue import DatasetInfo, data_folder, list_datasets, load
    from fedveil.data.dataset import Data, DataPart, from_records, one_tensor
    from fedveil.data.download import get
    from fedveil.data.splits import keep_labels, other_labels, parse_labels, split
    from fedveil.records.encoding import Encoding
else:
    _MODULES = dict.fromkeys(("DatasetInfo", "data_folder", "list_datasets", "load"), "catalogue")
    _MODULES |= dict.fromkeys(("Data", "DataPart", "Encoding", "from_records", "one_tensor"), "dataset")
    _MODULES |= dict.fromkeys(("keep_labels", "other_labels", "parse_labels", "split"), "splits")
    __getattr__ = lazy_getattr(__name__, _MODULES | {"get": "download"})

__all__ = [
    "Data",
    "DataPart",
    "DatasetInfo",
    "Encoding",
    "data_folder",
    "from_records",
    "get",
    "keep_labels",
    "list_datasets",
    "load",
    "one_tensor",
    "other_labels",
    "parse_labels",
    "split",
]
