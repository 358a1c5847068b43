"""Reading the pickles of the CIFAR archives without running them.

A pickle is a program. This reader knows two words of it, "an array" and "its type", and gives inert stand-ins for
them; any other word is refused. No code of numpy or of the file runs while a pickle is read.
"""

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import BadArgument


class _Type:
    """Stands for numpy.dtype."""

    def __init__(self, *arguments: Any) -> None:
        self.code = arguments[0] if arguments else None

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands for numpy.ndarray: holds what a pickle says of shape, type and bytes."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self) -> NDArray[np.uint8]:
        """The array, if it is one of bytes in the usual order."""
        _, shape, kind, fortran, content = self.state
        if kind.code not in (b"u1", "u1") or fortran or not isinstance(content, bytes):
            raise ValueError("an array is not of bytes")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _reconstruct(*_: Any) -> _Array:
    """Stands for numpy's function that makes an empty array."""
    return _Array()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Stands for codecs.encode, which Python 3 writes around bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("an unusual encoding")
    return text.encode("latin1")


_WORDS = {
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): _encode,
    ("codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    """An unpickler that knows these words only."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a word; any other is refused."""
        try:
            return _WORDS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs") from None


def read_pickle(where: str, content: bytes) -> dict[str, Any]:
    """The dictionary in a pickle of the CIFAR archives; byte arrays become numpy arrays, names become text.

    Args:
        where: how messages name the file.
        content: of the file.

    Raises:
        BadArgument: it is damaged, or asks for anything but arrays.
    """
    try:
        found = _Reader(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__}, not a dictionary")
        return {_text(key): value.pixels() if isinstance(value, _Array) else value for key, value in found.items()}
    except Exception as error:  # a damaged pickle may fail in any way
        what = f"not a CIFAR file: {error or type(error).__name__}"
        raise BadArgument(where, what, "fetch the archive again") from error


def _text(value: Any) -> str:
    """Names are bytes in files that Python 2 wrote."""
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
