"""Downloads, against a local server: verified, and cut off where they are larger than they should be."""

import hashlib
import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.data.making import bank_row, bank_text, refused, write_zip

from fedveil.data import get, load
from fedveil.data.catalogue import CATALOGUE, Download

CONTENT = bytes(range(256)) * 4000
TAR = "cifar-10-python.tar.gz"
BANK = bank_text(bank_row(number) for number in range(20)).encode()
INSIDE = ("inner.zip", "folder/bank-additional-full.csv")


class Files(BaseHTTPRequestHandler):
    """Serves `server.content`, and breaks off after `server.limit` bytes."""

    def do_GET(self):
        self.server.asked += 1
        if self.server.content is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        return self.wfile.write(self.server.content[: self.server.limit])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as running:
        running.content, running.asked, running.limit = CONTENT, 0, None
        running.url = f"http://127.0.0.1:{running.server_port}/file"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        offer(monkeypatch, running.url)
        yield running
        running.shutdown()
        thread.join()


def offer(monkeypatch, url, name="cifar10", content=CONTENT, inside=(), file=TAR, most=2**26):
    """Put a download into the catalogue."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    info = CATALOGUE[name]._replace(download=Download(url, file, digest, inside, most))
    monkeypatch.setitem(CATALOGUE, name, info)


def offer_bank(monkeypatch, server, served, most=2**26):
    server.content = served
    offer(monkeypatch, server.url, "bank", BANK, INSIDE, "bank-additional-full.csv", most)


def files_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_download_lands_in_its_folder_once_and_replaces_no_other_file(server, tmp_path):
    steps = []
    path = get("cifar10", tmp_path, lambda *step: steps.append(step))
    assert path == tmp_path / "cifar10" / TAR
    assert path.read_bytes() == CONTENT
    assert steps[-1] == (1.0, "1.0 MB")
    assert files_in(tmp_path) == [TAR]
    get("cifar10", tmp_path)
    assert server.asked == 1
    path.write_bytes(b"mine")
    with refused(path, "a different file with this name exists", "move it elsewhere"):
        get("cifar10", tmp_path)
    assert path.read_bytes() == b"mine"
    path.unlink()
    path.mkdir()
    with refused(path, "a different file with this name exists", "move it elsewhere"):
        get("cifar10", tmp_path)


def test_a_download_that_fails_is_not_kept_and_the_error_says_which_file_to_put_where(server, tmp_path, monkeypatch):
    server.limit = 700_000
    with refused(server.url, "closed after 700000 of 1024000 bytes", "run the command again"):
        get("cifar10", tmp_path)
    server.content, server.limit = CONTENT[:-1] + b"?", None
    with refused(server.url, "its checksum is not sha256:", "was discarded", f"put {TAR} into"):
        get("cifar10", tmp_path)
    assert files_in(tmp_path) == []
    server.content = None
    with refused(server.url, "HTTP Error 404: Not Found", f"put {TAR} into"):
        get("cifar10", tmp_path)
    with refused("the download failed: ", "File name too long", f"put {TAR} into"):
        get("cifar10", tmp_path / ("x" * 300))
    offer(monkeypatch, f"http://127.0.0.1:9/{TAR}")
    with refused("http://127.0.0.1:9", "Connection refused", f"put {TAR} into {tmp_path / 'cifar10'}"):
        get("cifar10", tmp_path)


@pytest.mark.parametrize("stated", [True, False])
def test_a_server_that_sends_too_much_is_cut_off(server, tmp_path, monkeypatch, stated):
    offer(monkeypatch, server.url, most=10**5)
    if not stated:
        monkeypatch.setattr(server.RequestHandlerClass, "send_header", lambda *_: None)
    with refused(server.url, "the file is larger than the maximum of 100000 bytes", "put cifar-10"):
        get("cifar10", tmp_path)
    assert files_in(tmp_path) == []


def nested(content, compression=zipfile.ZIP_STORED):
    """A zip in a zip, as UCI publishes the bank."""
    for member in reversed(INSIDE):
        content = write_zip(io.BytesIO(), {member: content}, compression).getvalue()
    return content


def test_the_bank_is_taken_out_of_its_zips_and_loads(server, tmp_path, monkeypatch):
    offer_bank(monkeypatch, server, nested(BANK))
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    assert get("bank") == get("bank") == tmp_path / "bank" / "bank-additional-full.csv"
    assert files_in(tmp_path) == ["bank-additional-full.csv"]
    assert len(load("bank").train.inputs) == 16


@pytest.mark.parametrize(
    ("served", "text"),
    [
        (b"no zip", "the download failed: File is not a zip file"),
        (nested(BANK + b"?"), "is not the expected file"),
        (nested(bytes(10**7), zipfile.ZIP_DEFLATED), "the download failed: it is larger than 1000000 bytes"),
    ],
    ids=["no zip", "another file", "a bomb"],
)
def test_a_wrong_zip_is_not_kept(served, text, server, tmp_path, monkeypatch):
    offer_bank(monkeypatch, server, served, most=10**6)
    with refused(server.url, text, "put bank-additional-full.csv into"):
        get("bank", tmp_path)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("digit", ["get: there is no data set 'digit'", "use 'digits'"]),
        ("images", ["'images' does not need to be downloaded"]),
        ("lesion", ["'lesion' cannot be downloaded automatically", "https://doi.org", "HAM10000_metadata.csv into"]),
    ],
)
def test_what_cannot_be_downloaded_is_refused(name, texts, tmp_path):
    with refused(*texts):
        get(name, tmp_path)
