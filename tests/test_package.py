"""The wheel and the sdist: what is in them, and that they work where nothing of the checkout is in reach."""

from __future__ import annotations

import configparser
import email
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "liger_registry": ROOT / "liger_registry",
    "liger_registry_cuda": ROOT / "backends/cuda/liger_registry_cuda",
    "liger_registry_rocm": ROOT / "backends/rocm/liger_registry_rocm",
    "liger_registry_tunings": ROOT / "tuning_cache/liger_registry_tunings",
}
ENTRY_POINTS = {
    "console_scripts": {"liger-tune": "liger_registry.cli:main"},
    "liger_registry.kernels": {
        "ops": "liger_registry.ops:register",
        "portable": "liger_registry.portable:register",
        "cuda": "liger_registry_cuda:register",
        "rocm": "liger_registry_rocm:register",
    },
    "liger_registry.adapters": {"engine": "liger_registry.transformers.engine.builtin:register"},
    "liger_registry.tunings": {"shipped": "liger_registry_tunings"},
}


def run(*command: str | Path, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def sources() -> set[str]:
    """What belongs into the wheel: all files of the four packages, by their path in it."""
    return {
        f"{name}/{path.relative_to(root).as_posix()}"
        for name, root in PACKAGES.items()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and an sdist of the checkout, and a wheel of that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", out, ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation")
    run(*pip, "--no-cache-dir", "-w", out / "from-sdist", sdist)
    (from_sdist,) = (out / "from-sdist").glob("*.whl")
    return {"wheel": wheel, "sdist": sdist, "wheel of the sdist": from_sdist}


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def info(wheel: Path, file: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        top = (name for name in archive.namelist() if name.partition("/")[0].endswith(".dist-info"))
        (name,) = (name for name in top if name.partition("/")[2] == file)
        return archive.read(name).decode()


def test_the_wheel_holds_the_four_packages_and_nothing_else(built):
    inside = {name for name in names(built["wheel"]) if not name.partition("/")[0].endswith(".dist-info")}
    assert inside == sources()


def test_the_wheel_is_typed_and_has_tables(built):
    inside = names(built["wheel"])
    assert {f"{package}/py.typed" for package in PACKAGES} <= inside
    assert any(name.startswith("liger_registry_tunings/") and name.endswith(".json") for name in inside)


def test_the_wheel_declares_its_entry_points(built):
    parser = configparser.ConfigParser(delimiters="=")
    parser.optionxform = str
    parser.read_string(info(built["wheel"], "entry_points.txt"))
    assert {section: dict(parser[section]) for section in parser.sections()} == ENTRY_POINTS


def test_the_metadata_names_licence_python_and_where_triton_is_needed(built):
    metadata = email.message_from_string(info(built["wheel"], "METADATA"))
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    (triton,) = (line for line in metadata.get_all("Requires-Dist") if line.startswith("triton"))
    assert "sys_platform == 'linux'" in triton
    assert "Version 2.0, January 2004" in info(built["wheel"], "licenses/LICENSE")


def test_the_wheel_ships_the_drop_in_and_installs_nothing_by_its_name(built):
    inside = names(built["wheel"])
    site = "liger_registry/drop_in/site"
    assert f"{site}/liger_kernel/__init__.py" in inside
    assert f"{site}/liger_kernel-0.8.5+liger.registry.dist-info/METADATA" in inside
    assert not [name for name in inside if name.startswith("liger_kernel")]
    with tarfile.open(built["sdist"]) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in inside if name.startswith(site)} <= files


def test_the_sdist_gives_the_same_wheel(built):
    assert names(built["wheel of the sdist"]) == names(built["wheel"])


def test_the_sdist_holds_what_is_needed_to_test_it(built):
    with tarfile.open(built["sdist"]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt"} <= inside
    assert {"tests/conftest.py", "tests/test_package.py", "tests/interpreter/conftest.py"} <= inside
    assert not [name for name in inside if name.split("/")[0] in (".git", ".design", ".venv", "dist")]


@pytest.fixture(scope="module", params=["wheel", "wheel of the sdist"])
def installed(request: pytest.FixtureRequest, built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel installed, which reads its dependencies from where these tests run."""
    directory = tmp_path_factory.mktemp("venv")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(directory)
    bin_directory = directory / "bin"
    pip = (sys.executable, "-m", "pip", "--python", bin_directory / "python")
    run(*pip, "install", "-q", "--no-deps", "--no-index", built[request.param])
    (site,) = directory.glob("lib/python*/site-packages")
    # The .pth files over there are not read, so the checkout's editable install stays hidden.
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return bin_directory


@pytest.fixture
def outside(tmp_path, monkeypatch) -> Path:
    """A working directory and an environment from which the checkout is out of reach."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("outside")
def test_the_command_is_installed(installed):
    assert "warmup" in run(installed / "liger-tune", "--help")


@pytest.mark.usefixtures("outside")
def test_a_command_finds_the_drop_in(installed):
    code = "import liger_kernel as m, importlib.metadata as d; print(m.__file__, d.version('liger_kernel'))"
    found = run(installed / "liger-tune", "exec", "--", installed / "python", "-c", code).split()
    assert Path(found[0]).is_relative_to(installed.parent)
    assert found[1] == "0.8.5+liger.registry"
    assert "None" in run(installed / "python", "-c", "import importlib.util as u; print(u.find_spec('liger_kernel'))")


@pytest.mark.usefixtures("outside")
def test_the_packages_come_from_the_installation(installed):
    code = f"import importlib; [print(importlib.import_module(name).__file__) for name in {list(PACKAGES)}]"
    for file in run(installed / "python", "-I", "-c", code).splitlines():
        assert Path(file).is_relative_to(installed.parent), file


@pytest.mark.usefixtures("outside")
def test_the_entry_points_load(installed):
    code = """
from importlib.metadata import entry_points
for group in ("liger_registry.kernels", "liger_registry.adapters", "liger_registry.tunings"):
    for point in entry_points(group=group):
        point.load()
        print(group, point.name, point.dist.name)
"""
    found = set(run(installed / "python", "-I", "-W", "error", "-c", code).splitlines())
    assert {
        f"{group} {name} liger-registry" for group in list(ENTRY_POINTS)[1:] for name in ENTRY_POINTS[group]
    } == found


@pytest.mark.usefixtures("outside")
def test_the_tables_are_found(installed):
    code = """
import json, pathlib, importlib.resources
root = importlib.resources.files("liger_registry_tunings")
with importlib.resources.as_file(root) as directory:
    for path in pathlib.Path(directory).glob("**/*.json"):
        json.loads(path.read_text())
        print(path.relative_to(directory).as_posix())
"""
    found = set(run(installed / "python", "-I", "-c", code).splitlines())
    assert found == {name.partition("/")[2] for name in sources() if name.endswith(".json")}
    assert found


@pytest.mark.usefixtures("outside")
def test_the_version_is_the_same_everywhere(installed):
    code = (
        "import liger_registry, importlib.metadata as m; print(liger_registry.__version__, m.version('liger-registry'))"
    )
    version, of_distribution = run(installed / "python", "-I", "-c", code).split()
    assert version == of_distribution
    assert f'"{version}"' in (ROOT / "liger_registry/_version.py").read_text()


def test_the_constraints_pin_versions_alone():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        requirement = line.partition("#")[0]
        assert not requirement.strip() or "==" in requirement, line
        assert not set("/@") & set(requirement), line
