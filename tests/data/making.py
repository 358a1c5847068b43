"""Small files of every kind that the loaders read."""

import io
import pickle
import re
import struct
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from fedveil.data import bank
from fedveil.errors import BadArgument

BANK_HEADER = [*bank.NUMERIC_COLUMNS, *bank.CATEGORICAL_COLUMNS, "y"]


def refused(*texts):
    """A refusal with all `texts`, in order."""
    return pytest.raises(BadArgument, match="(?s)" + ".*".join(re.escape(str(text)) for text in texts))


def picture(colour, side=8, form="PNG"):
    """Bytes of an image of one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(buffer, form)
    return buffer.getvalue()


def write_folder(home, files):
    """Files by relative name; returns `home`."""
    for name, content in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(content)
    return home


def write_zip(path, files, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def class_folders(classes=("cat", "dog"), train=3, test=2, side=8):
    """Names and bytes of train|test/<class>/<n>.png, each image of another colour."""
    counts = {"train": train, "test": test}
    return {
        f"{purpose}/{label}/{number}.png": picture((10 * index, 20 * number, 200 if purpose == "train" else 0), side)
        for purpose, count in counts.items()
        for index, label in enumerate(classes)
        for number in range(count)
    }


def bank_row(number, **changes):
    """One record of the bank; every category is used in turn."""
    cells = {column: str(number % 7 + index) for index, column in enumerate(bank.NUMERIC_COLUMNS)}
    cells |= {column: known[number % len(known)] for column, known in bank.CATEGORICAL_COLUMNS.items()}
    cells |= {"y": bank.CLASSES[number % 5 == 0]} | changes
    return ";".join(cells[column] if column in bank.NUMERIC_COLUMNS else f'"{cells[column]}"' for column in BANK_HEADER)


def bank_text(rows):
    return "\n".join([";".join(f'"{column}"' for column in BANK_HEADER), *rows]) + "\n"


def cifar_batch(labels, key="labels", seed=0):
    """A batch as Python 3 would write it."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return pickle.dumps({"data": pixels, key: list(labels)}, protocol=2)


def python2_batch(pixels, labels):
    """A batch in the words of Python 2, as the published archives have it."""

    def text(content):
        return b"U" + bytes([len(content)]) + content

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN"
    dtype += b"J" + struct.pack("<i", -1) + b"J" + struct.pack("<i", -1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    shape = b"".join(b"J" + struct.pack("<i", size) for size in pixels.shape) + b"\x86"
    content = b"T" + struct.pack("<i", pixels.size) + pixels.tobytes()
    state = b"(K\x01" + shape + dtype + b"\x89" + content + b"tb"
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + state + text(b"labels") + listed + b"u."


def cifar10_batches(per_batch=20):
    """All six files of CIFAR-10, small."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    return {name: cifar_batch([row % 10 for row in range(per_batch)], seed=seed) for seed, name in enumerate(names)}


def write_tar(path, files, folder="cifar-10-batches-py"):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def lesion_files(lesions=20, images_each=2, listed_only=3):
    """Images and metadata; the last rows have no image."""
    classes = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    rows = ["lesion_id,image_id,dx,dx_type,age,sex,localization"]
    files = {}
    for lesion in range(lesions + listed_only):
        for image in range(images_each):
            name = f"ISIC_{lesion:04}{image}"
            sex = ("male", "female")[lesion % 2]
            rows.append(f"HAM_{lesion:04},{name},{classes[lesion % 7]},histo,50.0,{sex},back")
            if lesion < lesions:
                files[f"images/{name}.jpg"] = picture((lesion, image * 50, 9), 64, "JPEG")
    return files | {"HAM10000_metadata.csv": "\n".join(rows).encode()}
