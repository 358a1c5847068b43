"""Data sets by name, and their division among clients. A leaf: nothing here knows of models or veils."""

from fedveil.data import bank, cifar, csv_file, embedded, images, lesion  # noqa: F401  (each enters its loaders)
from fedveil.data.catalogue import DatasetInfo, available, data_folder, load
from fedveil.data.download import get
from fedveil.data.labels import keep_labels, other_labels, parse_labels
from fedveil.data.own import from_datasets, from_parts, from_tensors
from fedveil.data.records import Data, Inputs, Part, one_tensor
from fedveil.data.splits import split

__all__ = [
    "Data",
    "DatasetInfo",
    "Inputs",
    "Part",
    "available",
    "data_folder",
    "from_datasets",
    "from_parts",
    "from_tensors",
    "get",
    "keep_labels",
    "load",
    "one_tensor",
    "other_labels",
    "parse_labels",
    "split",
]
