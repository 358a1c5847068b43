"""Data sets by name, and their division among clients; independent of models and defences."""

from fedveil.data import bank, cifar, csv_file, embedded, images, lesion  # noqa: F401  (each registers its loaders)
from fedveil.data.catalogue import DatasetInfo, available, data_folder, load
from fedveil.data.dataset import Data, Part, from_records, one_tensor
from fedveil.data.download import get
from fedveil.data.labels import keep_labels, other_labels, parse_labels
from fedveil.data.splits import split

__all__ = [
    "Data",
    "DatasetInfo",
    "Part",
    "available",
    "data_folder",
    "from_records",
    "get",
    "keep_labels",
    "load",
    "one_tensor",
    "other_labels",
    "parse_labels",
    "split",
]
