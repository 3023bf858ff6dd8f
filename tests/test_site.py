"""The documentation site builds without a warning, and every link in it leads somewhere."""

import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import fairwind

ROOT = Path(__file__).parents[1]


class Page(HTMLParser):
    """The links of a page, the files it loads, and the places in it that can be linked to."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given["id"]} if "id" in given else set()
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("img", "script") and "src" in given:
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="make docs installs it")
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    out = tmp_path_factory.mktemp("site")
    words = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        f"{out}-doctrees",
        "docs",
        str(out),
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file.read_text()) for file in site.rglob("*.html")}


def broken(found: dict[Path, Page]) -> Iterator[str]:
    """What links and files of pages do not lead anywhere, or lead off this machine while a page loads."""
    for file, page in found.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    yield f"{file.name} loads {link}: pages must work offline"
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.exists():
                yield f"{file.name} links to {link}"
            elif parts.fragment and target in found and unquote(parts.fragment) not in found[target].anchors:
                yield f"{file.name} links to a place that is not there: {link}"


def test_every_link_leads_somewhere_and_pages_work_offline(site: Path) -> None:
    found = pages(site)
    assert len(found) > 25
    assert sum(len(page.links) for page in found.values()) > 1000
    assert not list(broken(found))


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text(
        '<h1 id="here">A</h1><a href="#there">1</a><a href="b.html">2</a><img src="https://x.org/y.png">'
    )
    assert len(list(broken(pages(tmp_path)))) == 3
    page.write_text(
        '<h1 id="here">A</h1><a href="#here">1</a><a href="a.html#here">2</a><a href="https://x.org">3</a>'
    )
    assert not list(broken(pages(tmp_path)))


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "python.html").read_text()
    missing = [name for name in fairwind.__all__ if name not in text]
    assert not missing
    for name in fairwind.algorithms.REGISTRY:
        assert f'id="fairwind.algorithms.{name}"' in text or f">{name}</span>" in text, name


def test_the_site_can_be_searched(site: Path) -> None:
    assert '"adafedadam":' in (site / "searchindex.js").read_text()  # words are stemmed
    assert (site / "search.html").exists()
