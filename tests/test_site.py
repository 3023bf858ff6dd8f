"""The documentation site builds without a warning, its links lead somewhere, and its formulas are drawn."""

import re
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


def without_code(text: str) -> str:
    """A page of Markdown without blocks and spans of code."""
    return re.sub(r"^( *)```.*?^\1```$|`[^`]+`", "", text, flags=re.S | re.M)


def text_of(page: str) -> str:
    """What a built page says outside of code, formulas and scripts."""
    hidden = r"<(script|style|pre|code|math|title)\b.*?</\1>"
    return re.sub(r"<[^>]*>", "", re.sub(hidden, "", page, flags=re.S))


def test_every_formula_is_mathml(site: Path) -> None:
    sources = {site / "project" / "design.html": ROOT / "DESIGN.md"}
    for source in (ROOT / "docs").rglob("*.md"):
        name = source.relative_to(ROOT / "docs").with_suffix(".html")
        if name.parts[0] != "project":
            sources[site / name] = source
    found = 0
    for page, source in sources.items():
        written = re.findall(r"\$\$.+?\$\$|\$[^$]+\$", without_code(source.read_text()), re.S)
        assert page.read_text().count("<math ") == len(written), source.name
        found += len(written)
    assert found > 300
    for page in site.rglob("*.html"):
        assert "$" not in text_of(page.read_text()), f"{page.name} shows the source of a formula"
        assert "mathjax" not in page.read_text().lower()


@pytest.mark.parametrize(
    "page",
    [
        "algorithms",
        "concepts/fairness",
        "glossary",
        "metrics",
        "reproduction",
        "paper/readings",
        "paper/theory",
    ],
)
def test_formulas_are_not_plain_text(page: str, site: Path) -> None:
    found = re.findall(
        r"\S*(?:\w·\w|[\^‖√Σ∇⟨←²₁⁰]|\b\w_\w\b)\S*", text_of((site / f"{page}.html").read_text())
    )
    assert not found


BAD = [r"\fraction{a}{b}", r"\frac{a}", "a_", "a}", r"\left( a", r"\lVert a"]


def test_a_formula_that_cannot_be_drawn_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("myst_parser", reason="make docs installs it")
    settings = ["import sys", f"sys.path.insert(0, {str(ROOT / 'docs')!r})"]
    settings += ["extensions = ['myst_parser', 'formulas']", "myst_enable_extensions = ['dollarmath']"]
    settings += ["html_math_renderer = 'mathml'", "html_theme = 'basic'"]
    (tmp_path / "conf.py").write_text("\n".join(settings))
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(tmp_path), str(tmp_path / "out")]
    for formulas, found in (([r"\frac{a}{b}", r"\lVert a\rVert_1"], 0), (BAD, len(BAD))):
        page = "# A page\n\n" + "\n\n".join(f"Here ${formula}$ is." for formula in formulas)
        (tmp_path / "index.md").write_text(page)
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode != 0) == (found > 0)
        assert re.findall(r"index\.md:(\d+): WARNING: formula", done.stderr) == [
            str(3 + 2 * i) for i in range(found)
        ], done.stderr


def test_a_formula_is_set_as_in_latex() -> None:
    pytest.importorskip("sphinx", reason="make docs installs it")
    from formulas import mathml

    def elements(formula: str, displayed: bool = False) -> str:
        return re.sub(r">\s+<", "><", mathml(formula, displayed))

    assert "<mi>S</mi><msup><mi>I</mi><mi>α</mi></msup></math>" in elements(r"S I^\alpha")
    assert 'display="block"' in elements("a", displayed=True)
    norm = elements(r"\lVert a\rVert/2")
    assert '<mo form="prefix" stretchy="false">‖</mo><mi>a</mi><mo form="postfix"' in norm
    assert '<mo lspace="0" rspace="0" stretchy="false">/</mo><mn>2</mn>' in norm
    assert '<mi>η</mi><mo lspace="0" rspace="0">′</mo>' in elements(r"\eta'")
    assert "mspace" in elements(r"\log K")
    assert "mspace" not in elements(r"\log(K)")


def test_the_first_screen_shows_how_to_install_and_python_beside_the_picture(site: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    from browsers import launched

    with launched() as browser:
        for width, beside in ((1280, True), (390, False)):
            page = browser.new_page(viewport={"width": width, "height": 800})
            page.goto((site / "index.html").as_uri())
            install, code, picture = (
                page.locator(f".opening {place}").bounding_box()
                for place in (".highlight-bash pre", ".highlight-python pre", "img")
            )
            assert install["y"] + install["height"] < code["y"]
            assert code["y"] + code["height"] < 800
            assert picture["width"] > 300
            assert (picture["x"] > code["x"] + code["width"]) == beside
            assert (picture["y"] + picture["height"] < 800) == beside
            assert picture["x"] + picture["width"] <= width
            if beside:  # no line of code is cut
                assert page.locator(".highlight-python pre").evaluate("e => e.scrollWidth <= e.clientWidth")
