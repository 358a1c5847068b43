"""Downloads, against a local server: resumed, verified, and cut off where they are larger than they should be."""

import hashlib
import io
import os
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.data.making import bank_row, bank_text, refused, write_folder

from fedveil.data import get, load
from fedveil.data.catalogue import CATALOGUE, Download

CONTENT = bytes(range(256)) * 4000
TAR = "cifar-10-python.tar.gz"
PART = f"cifar10/{TAR}.part"
BANK = bank_text(bank_row(number) for number in range(20)).encode()
INSIDE = ("inner.zip", "folder/bank-additional-full.csv")


class Files(BaseHTTPRequestHandler):
    """Serves `server.files`; can continue if `server.ranges`, and breaks off after `server.limit` bytes."""

    def do_GET(self):
        self.server.asked.append(self.headers.get("Range"))
        content = self.server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        start = 0
        if self.server.ranges and self.headers.get("Range"):
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        return self.wfile.write(content[start : start + self.server.limit])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as running:
        running.files, running.asked, running.ranges, running.limit = {"/file": CONTENT}, [], True, 1 << 30
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
    server.files["/file"] = served
    offer(monkeypatch, server.url, "bank", BANK, INSIDE, "bank-additional-full.csv", most)


def files_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_download_lands_in_its_folder_once_and_reports_progress(server, tmp_path):
    steps = []
    path = get("cifar10", tmp_path, lambda *step: steps.append(step))
    assert path == tmp_path / "cifar10" / TAR
    assert path.read_bytes() == CONTENT
    assert steps[-1] == (1.0, "1.0 MB")
    assert files_in(tmp_path) == [TAR]
    get("cifar10", tmp_path)
    assert len(server.asked) == 1


def test_another_file_of_that_name_is_not_touched(server, tmp_path):
    path = write_folder(tmp_path, {f"cifar10/{TAR}": b"mine"}) / "cifar10" / TAR
    with refused(path, "there is another file of this name", "move it away"):
        get("cifar10", tmp_path)
    assert path.read_bytes() == b"mine"
    path.unlink()
    path.mkdir()
    with refused(path, "there is another file of this name", "move it away"):
        get("cifar10", tmp_path)
    path.rmdir()
    os.mkfifo(tmp_path / PART)
    with refused(server.url, "it is not a regular file"):
        get("cifar10", tmp_path)


def test_a_broken_download_is_kept_and_resumed(server, tmp_path):
    server.limit = 700_000
    with refused(server.url, "stopped at 700000 of 1024000 bytes", "run again"):
        get("cifar10", tmp_path)
    assert files_in(tmp_path) == [f"{TAR}.part"]
    steps = []
    assert get("cifar10", tmp_path, lambda *step: steps.append(step)).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=700000-"]
    assert steps[0][0] > 0.68


@pytest.mark.parametrize(("part", "ranges"), [(b"wrong start", False), (CONTENT, True)])
def test_a_server_that_cannot_continue_sends_all_again_and_a_complete_part_is_taken(part, ranges, server, tmp_path):
    server.ranges = ranges
    write_folder(tmp_path, {PART: part})
    assert get("cifar10", tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("part", [None, b"wrong start", CONTENT + b"too long"])
def test_a_file_with_a_wrong_checksum_is_not_kept(part, server, tmp_path):
    server.files["/file"] = CONTENT if part else CONTENT[:-1] + b"?"
    if part:
        write_folder(tmp_path, {PART: part})
    with refused(server.url, "its checksum is not sha256:", "was not kept", f"put {TAR} into"):
        get("cifar10", tmp_path)
    assert files_in(tmp_path) == []


def test_a_failure_says_which_file_to_put_where(server, tmp_path, monkeypatch):
    server.files.clear()
    with refused(server.url, "the server answered 404 Not Found", f"put {TAR} into"):
        get("cifar10", tmp_path)
    offer(monkeypatch, f"http://127.0.0.1:9/{TAR}")
    with refused("http://127.0.0.1:9", "cannot be reached", f"put {TAR} into {tmp_path / 'cifar10'}"):
        get("cifar10", tmp_path)
    (tmp_path / "file").write_text("")
    with refused("the download failed", "Not a directory", f"put {TAR} into {tmp_path / 'file'}"):
        get("cifar10", tmp_path / "file")
    with refused("the download failed", "File name too long", "put bank-additional-full.csv into"):
        get("bank", tmp_path / ("x" * 300))


@pytest.mark.parametrize("stated", [True, False])
def test_a_server_that_sends_too_much_is_cut_off(server, tmp_path, monkeypatch, stated):
    offer(monkeypatch, server.url, most=10**5)
    if not stated:
        monkeypatch.setattr(server.RequestHandlerClass, "send_header", lambda *_: None)
    with refused(server.url, "it sends more than the 100000 bytes that are expected at most", "Fix: put cifar-10"):
        get("cifar10", tmp_path)
    assert files_in(tmp_path) == []


def nested(content, compression=zipfile.ZIP_STORED):
    """A zip in a zip, as UCI publishes the bank."""
    for member in reversed(INSIDE):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression) as archive:
            archive.writestr(member, content)
        content = buffer.getvalue()
    return content


def test_the_bank_is_taken_out_of_its_zips_and_loads(server, tmp_path, monkeypatch):
    offer_bank(monkeypatch, server, nested(BANK))
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    assert get("bank") == get("bank") == tmp_path / "bank" / "bank-additional-full.csv"
    assert files_in(tmp_path) == ["bank-additional-full.csv"]
    assert len(load("bank").train.inputs) == 16


@pytest.mark.parametrize(
    ("served", "texts"),
    [
        (b"no zip", ["the download has no readable inner.zip", "put bank-additional-full.csv into"]),
        (nested(BANK + b"?"), ["is not the expected file, and was not kept", "put bank-additional-full.csv into"]),
        (nested(bytes(10**7), zipfile.ZIP_DEFLATED), ["the download has no readable folder/bank-addit", "Fix: put"]),
    ],
    ids=["no zip", "another file", "a bomb"],
)
def test_a_wrong_zip_is_not_kept(served, texts, server, tmp_path, monkeypatch):
    offer_bank(monkeypatch, server, served, most=10**6)
    with refused(server.url, *texts):
        get("bank", tmp_path)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("digit", ["get: there is no data set 'digit'", "use 'digits'"]),
        ("images", ["'images' needs no download"]),
        ("lesion", ["'lesion' cannot be downloaded by a program", "https://doi.org", "HAM10000_metadata.csv into"]),
    ],
)
def test_what_cannot_be_downloaded_is_refused(name, texts, tmp_path):
    with refused(*texts):
        get(name, tmp_path)
