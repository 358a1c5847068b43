"""Downloads, against a local server."""

import hashlib
import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.data.making import bank_row, bank_text, refused, write_folder

from fedveil.data import get, load
from fedveil.data.catalogue import ABOUT, Download

CONTENT = bytes(range(256)) * 4000


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


def offer(monkeypatch, url, name="cifar10", content=CONTENT, inside=(), file="cifar-10-python.tar.gz"):
    """Put a download into the catalogue."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    about = ABOUT[name]._replace(download=Download(url, file, digest, inside))
    monkeypatch.setitem(ABOUT, name, about)


def files_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_download_lands_in_its_folder_and_tells_progress(server, tmp_path):
    told = []
    path = get("cifar10", tmp_path, lambda done, total: told.append((done, total)))
    assert path == tmp_path / "cifar10" / "cifar-10-python.tar.gz"
    assert path.read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert files_in(tmp_path) == ["cifar-10-python.tar.gz"]


def test_what_is_there_is_not_fetched_again(server, tmp_path):
    get("cifar10", tmp_path)
    get("cifar10", tmp_path)
    assert len(server.asked) == 1


def test_another_file_of_that_name_is_not_touched(server, tmp_path):
    path = write_folder(tmp_path, {"cifar10/cifar-10-python.tar.gz": b"mine"}) / "cifar10/cifar-10-python.tar.gz"
    with refused(path, "there is another file of this name", "move it away"):
        get("cifar10", tmp_path)
    assert path.read_bytes() == b"mine"


def test_a_broken_download_is_kept_and_resumed(server, tmp_path):
    server.limit = 700_000
    with refused(server.url, "stopped at 700000 of 1024000 bytes", "run again"):
        get("cifar10", tmp_path)
    assert files_in(tmp_path) == ["cifar-10-python.tar.gz.part"]
    told = []
    assert get("cifar10", tmp_path, lambda *step: told.append(step)).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=700000-"]
    assert told[0][0] > 700_000


def test_a_server_that_cannot_continue_sends_all_again(server, tmp_path):
    server.ranges = False
    write_folder(tmp_path, {"cifar10/cifar-10-python.tar.gz.part": b"wrong start"})
    assert get("cifar10", tmp_path).read_bytes() == CONTENT


def test_a_part_that_was_complete_is_taken(server, tmp_path):
    write_folder(tmp_path, {"cifar10/cifar-10-python.tar.gz.part": CONTENT})
    assert get("cifar10", tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("part", [None, b"wrong start", CONTENT + b"too long"])
def test_a_file_with_a_wrong_checksum_is_not_kept(part, server, tmp_path):
    server.files["/file"] = CONTENT if part else CONTENT[:-1] + b"?"
    if part:
        write_folder(tmp_path, {"cifar10/cifar-10-python.tar.gz.part": part})
    with refused(server.url, "its checksum is not sha256:", "was not kept", "put cifar-10-python.tar.gz into"):
        get("cifar10", tmp_path)
    assert files_in(tmp_path) == []


def test_offline_it_says_which_file_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    offer(monkeypatch, "http://127.0.0.1:9/cifar-10-python.tar.gz")
    with refused("http://127.0.0.1:9", "cannot be reached", f"put cifar-10-python.tar.gz into {tmp_path / 'cifar10'}"):
        get("cifar10", tmp_path)


def test_the_answer_of_a_server_that_lacks_the_file_is_told(server, tmp_path):
    server.files.clear()
    with refused(server.url, "the server answered 404 Not Found", "put cifar-10-python.tar.gz into"):
        get("cifar10", tmp_path)


def nested(content):
    """A zip in a zip, as UCI publishes the bank."""
    packed = content
    for member in reversed(("inner.zip", "folder/bank-additional-full.csv")):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(member, packed)
        packed = buffer.getvalue()
    return packed


BANK = bank_text(bank_row(number) for number in range(20)).encode()
INSIDE = ("inner.zip", "folder/bank-additional-full.csv")


def test_the_bank_is_taken_out_of_its_zips_and_loads(server, tmp_path, monkeypatch):
    server.files["/file"] = nested(BANK)
    offer(monkeypatch, server.url, "bank", BANK, INSIDE, "bank-additional-full.csv")
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    assert get("bank") == get("bank") == tmp_path / "bank" / "bank-additional-full.csv"
    assert files_in(tmp_path) == ["bank-additional-full.csv"]
    assert len(load("bank").train.inputs) == 16


@pytest.mark.parametrize(
    ("served", "texts"),
    [
        (b"no zip", ["the download has no readable inner.zip", "put bank-additional-full.csv into"]),
        (nested(BANK + b"?"), ["is not the expected file, and was not kept", "put bank-additional-full.csv into"]),
    ],
)
def test_a_wrong_zip_is_not_kept(served, texts, server, tmp_path, monkeypatch):
    server.files["/file"] = served
    offer(monkeypatch, server.url, "bank", BANK, INSIDE, "bank-additional-full.csv")
    with refused(server.url, *texts):
        get("bank", tmp_path)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("digit", ["get: there is no data set 'digit'", "'digits' is the nearest"]),
        ("digits", ["'digits' needs no download"]),
        ("images", ["'images' needs no download"]),
        ("lesion", ["'lesion' cannot be downloaded by a program", "https://doi.org", "HAM10000_metadata.csv into"]),
    ],
)
def test_what_cannot_be_downloaded_is_refused(name, texts, tmp_path):
    with refused(*texts):
        get(name, tmp_path)
