"""The package as it is published: what it holds, what it needs, and that it works where nothing else is."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import fairwind
from fairwind.errors import NEEDED

ROOT = Path(__file__).parents[1]


def run(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE"))} | environment
    command = [*map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=300, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; what it needs is taken from the environment of the tests."""
    place = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    needed = {str(Path(str(m.__file__)).parents[1]) for m in map(__import__, ("torch", "rich", "tyro"))}
    (site,) = place.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text("\n".join(needed))
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "--no-deps"]
    done = run(*pip, "--no-index", "--disable-pip-version-check", wheel, cwd=place)
    assert done.returncode == 0, done.stderr
    return place


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as content:
        (name,) = (n for n in content.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(content.read(name).decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"fairwind-{fairwind.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = {name.removeprefix("src/") for name in tracked.stdout.split()}
    assert {"fairwind/py.typed", "fairwind/report/page.html", "fairwind/engine/backends/driver.cpp"} <= wanted
    assert {name for name in names if ".dist-info/" not in name} >= wanted
    assert {name.partition("/")[0] for name in names} == {
        "fairwind",
        f"fairwind-{fairwind.__version__}.dist-info",
    }


def test_the_source_distribution_is_small(built: Path) -> None:
    (file,) = built.glob("*.tar.gz")
    assert file.stat().st_size < 1 << 20
    with tarfile.open(file) as content:
        names = {name.partition("/")[2].partition("/")[0] for name in content.getnames()} - {""}
    beside = {
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "PKG-INFO",
        "pyproject.toml",
        ".gitignore",
    }
    assert names == {"src", *beside}


def test_it_needs_little_and_names_its_extras(wheel: Path) -> None:
    known = metadata(wheel)
    needs = [need for need in known.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(re.split(r"[<>=]", need)[0] for need in needs) == ["numpy", "safetensors", "torch"]
    extras = {"cli", "data", "docs", "flower", "nvflare", "onnx", "privacy", "track", "tune", "dev"}
    assert set(known.get_all("Provides-Extra", [])) == extras
    assert known["License-Expression"] == "Apache-2.0"


def test_the_readme_has_no_link_that_leads_nowhere_on_another_page(wheel: Path) -> None:
    known = metadata(wheel)
    text = known.get_payload()
    assert isinstance(text, str)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    (home,) = (
        url.partition(", ")[2] for url in known.get_all("Project-URL", []) if url.startswith("Homepage")
    )
    for link in links:
        assert link.startswith(("https://", "#")), link
        if link.startswith(home):
            _, _, path = link.removeprefix(home).removeprefix("/").split("/", 2)
            assert (ROOT / path.partition("#")[0]).exists(), link
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert pictures
    assert all(picture.startswith(f"{home}/raw/") for picture in pictures)


def test_the_address_is_one(wheel: Path) -> None:
    """It is set on publication, by one replacement: CONTRIBUTING.md."""
    text = (ROOT / "pyproject.toml").read_text()
    homes = set(re.findall(r"https://[^/]+/[\w.-]+(?=/raw/|/blob/|/tree/|/issues|\")", text))
    assert homes == {tomllib.loads(text)["project"]["urls"]["Homepage"]}


def test_the_version_is_one() -> None:
    version = fairwind.__version__
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.slow
def test_installed_in_a_clean_environment_it_runs(installed: Path, tmp_path: Path) -> None:
    program = installed / "bin" / "fairwind"
    assert run(program, "--version", cwd=tmp_path).stdout == f"fairwind {fairwind.__version__}\n"
    listed = run(program, "list", cwd=tmp_path)
    assert "adafedadam" in listed.stdout, listed.stderr
    small = "synthetic:clients=6,features=4,classes=3"
    options = ["--rounds", 2, "--eval-every", 1, "--compile", "off", "--algorithms", "fedavg", "adafedadam"]
    done = run(program, "compare", small, *options, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "AdaFedAdam" in (tmp_path / "run" / "report.html").read_text()


WITHOUT = """
import sys
for name in {needed!r}:
    sys.modules[name] = None  # as if it were not installed
import fairwind as fw
assert fw.__file__.startswith({place!r}), fw.__file__
task = fw.setup("synthetic:clients=6,features=4,classes=3")
compared = fw.compare(task, ["fedavg", "adafedadam"], rounds=2, compile="off", out="kept")
print(compared, compared._repr_html_())
try:
    compared.report()
except fw.InputError as error:
    print(error)
"""


def test_without_extras_python_trains_and_says_what_is_missing(installed: Path, tmp_path: Path) -> None:
    python = installed / "bin" / "python"
    code = WITHOUT.format(needed=NEEDED, place=str(installed))
    done = run(python, "-W", "error", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<Result of adafedadam, seed 0: avg" in done.stdout
    assert "a report page needs" in done.stdout.splitlines()[-1]
    assert "'fairwind[cli]'" in done.stdout.splitlines()[-1]
    assert "round 2 of 2" in done.stderr


def test_without_extras_the_command_is_one_line_that_names_the_extra(installed: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.modules |= dict.fromkeys({NEEDED}); from fairwind.__main__ import main; main()"
    done = run(installed / "bin" / "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "fairwind: error: the command line needs tyro: install it with pip install 'fairwind[cli]'\n"
    )


def test_the_extras_of_the_metadata_are_those_that_messages_name() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text()
        named = set(re.findall(r"fairwind\[(\w+)\]", text)) | set(
            re.findall(r'needs_extra\(.*"(\w+)"\)', text)
        )
        assert named <= extras, file


def test_the_workflow_calls_targets_that_are_there_on_every_python_we_name() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = set(re.findall(r"run: make ([\w-]+)", workflow))
    assert {"lint", "test", "test-track", "package"} <= called
    assert called <= targets
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [c.rpartition(" ")[2] for c in classifiers if re.search(r"Python :: 3\.\d+$", c)]
    assert re.search(r"python: \[(.*)\]", workflow)[1] == ", ".join(f'"{v}"' for v in named)  # type: ignore[index]
    assert not re.search(r"uses: \S+@(?!v\d+\.\d+\.\d+\n)", workflow)  # exact versions
