"""The set-up: which Python is taken, what the constraint files pin, what no file may contain."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FIND_PYTHON = REPOSITORY / ".ci" / "find_python.sh"
DOORS = REPOSITORY / "constraints-doors.txt"
CONSTRAINTS = sorted((REPOSITORY / "constraints").glob("*.txt"))
SYSTEM_TOOLS = ("cat", "grep", "ls", "sh", "sort")

SUITABLE = "cpython 3 12 final complete"
REFUSED = {
    "is 3.11": "cpython 3 11 final complete",
    "is 2.7": "cpython 2 7 final complete",
    "not a final release": "cpython 3 15 alpha complete",
    "not a final release of CPython": "pypy 3 12 final complete",
    "apt-get install python3.12-venv": "cpython 3 12 final incomplete",
}


def fake_python(path: Path, reply: str | None) -> Path:
    """An executable that answers `reply`, or fails as a pyenv shim without a selected version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "exit 127" if reply is None else f"echo '{reply}'"
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder whose `bin` is all of PATH and whose `pyenv` holds all other Pythons: none yet."""
    (tmp_path / "bin").mkdir()
    for tool in SYSTEM_TOOLS:
        found = next(
            place for place in (Path("/bin") / tool, Path("/usr/bin") / tool) if place.exists()
        )
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def find_python(bare: Path, *candidates: str) -> subprocess.CompletedProcess[str]:
    """Runs the finder where nothing but `bare` can be found."""
    return subprocess.run(
        [bare / "bin" / "sh", FIND_PYTHON, *candidates],
        env={"PATH": str(bare / "bin"), "PYENV_ROOT": str(bare / "pyenv"), "HOME": str(bare)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_first_suitable_python_is_taken(bare: Path) -> None:
    fake_python(bare / "bin" / "python3.13", None)
    fake_python(bare / "bin" / "python3.12", "cpython 3 11 final complete")
    expected = fake_python(bare / "bin" / "python3", SUITABLE)
    fake_python(bare / "bin" / "python", SUITABLE)
    assert find_python(bare).stdout.strip() == str(expected)


def test_pyenv_is_searched_newest_first(bare: Path) -> None:
    fake_python(bare / "bin" / "python3", None)
    for version in ("3.9.18", "3.12.1", "3.12.10"):
        reply = f"cpython {version.replace('.', ' ', 1).split('.')[0]} final complete"
        fake_python(bare / "pyenv" / "versions" / version / "bin" / "python", reply)
    fake_python(bare / "pyenv" / "versions" / "3.13.0" / "bin" / "python", None)
    found = find_python(bare).stdout.strip()
    assert found == str(bare / "pyenv" / "versions" / "3.12.10" / "bin" / "python")


def test_named_python_is_the_only_candidate(bare: Path) -> None:
    fake_python(bare / "bin" / "python3.13", SUITABLE)
    named = fake_python(bare / "a folder" / "python", SUITABLE)
    assert find_python(bare, str(named)).stdout.strip() == str(named)
    assert find_python(bare, str(bare / "nowhere")).returncode == 1


@pytest.mark.parametrize("reason", REFUSED)
def test_unsuitable_python_is_named_with_the_reason(bare: Path, reason: str) -> None:
    fake_python(bare / "bin" / "python3", REFUSED[reason])
    result = find_python(bare)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.search(rf"^  python3: .*{re.escape(reason)}", result.stderr, re.MULTILINE)


def test_no_python_says_what_was_tried(bare: Path) -> None:
    result = find_python(bare)
    assert (result.returncode, result.stdout) == (1, "")
    for name in ("python3.14", "python3.13", "python3.12", "python3", "python"):
        assert f"  {name}: not on PATH\n" in result.stderr
    assert "3.12 or newer" in result.stderr and "PYTHON=" in result.stderr


def test_real_python_is_accepted(bare: Path) -> None:
    assert find_python(bare, sys.executable).stdout.strip() == sys.executable


def pins_of(path: Path) -> dict[str, str]:
    """Package and version of each line; a line that is no exact pin is an error."""
    pins = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", line)
            assert match, f"{path.name}: `{line}` is not of the form name==version"
            pins[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return pins


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_pin_what_the_project_asks_for(path: Path) -> None:
    pins = pins_of(path)
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.match(r"[A-Za-z0-9_-]+", item)[0] for group in groups for item in group}  # type: ignore[index]
    wanted = {name.replace("_", "-").lower() for name in names} - {"codec-jax"}
    assert wanted <= pins.keys()
    assert "codec-jax" not in pins
    assert pins["jax"] == pins["jaxlib"]


def test_constraints_differ_in_jax_and_flax() -> None:
    oldest, newest = (
        pins_of(REPOSITORY / "constraints" / f"jax-{name}.txt") for name in ("0.11.2", "newest")
    )
    assert oldest["jax"] == "0.11.2" and oldest["flax"] == "0.12.10"
    assert oldest.keys() == newest.keys()
    different = {name for name in oldest if oldest[name] != newest[name]}
    assert all(name in ("flax", "jaxlib") or name.startswith("jax") for name in different)


def test_the_doors_have_pins_of_their_own() -> None:
    """No other set-up knows the decoders that others wrote; what is in both is the same."""
    doors, oldest = (
        pins_of(path) for path in (DOORS, REPOSITORY / "constraints" / "jax-0.11.2.txt")
    )
    foreign = {"google-tunix": "0.1.7", "gemma": "4.0.1", "sentencepiece": "0.2.1"}
    assert foreign.items() <= doors.items()
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    for path in CONSTRAINTS:
        assert not foreign.keys() & pins_of(path).keys()
    assert not any(name in project for name in foreign)
    assert {name: doors[name] for name in doors.keys() & oldest.keys()}.items() <= oldest.items()
    assert {"jax", "jaxlib", "flax", "pytest", "hypothesis"} <= doors.keys() & oldest.keys()


def test_the_doors_are_a_step_of_ci_and_no_part_of_make_test() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert "\nstep 'Decoders of others' make test-doors\n" in script
    commands = dry_run("test-doors", "DOORS_VENV=.venv-dry-run").stdout
    install = " ".join(commands.replace("\\\n", " ").split())
    assert "--no-deps -r constraints-doors.txt -e ." in install
    assert ".venv-dry-run/bin/python -m pytest" in commands and "tests/doors" in commands
    collected = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-o",
            "addopts=",
            "tests/doors/..",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert collected.returncode == 0, collected.stdout[-2000:]
    assert "test_setup.py" in collected.stdout and "doors/" not in collected.stdout


def test_a_test_of_the_doors_never_skips() -> None:
    for path in (REPOSITORY / "tests" / "doors").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "skip" not in text and "ImportError" not in text, path.name


def committed_files() -> list[Path]:
    """The files that git has or would take; without git, those that an archive would hold."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        paths = [REPOSITORY / name for name in listing.stdout.split("\0") if name]
        return [path for path in paths if path.is_file()]
    hidden = re.compile(r"\.venv.*|\.git|\.\w+_cache|\.hypothesis|__pycache__|build|dist")
    return [
        path
        for path in REPOSITORY.rglob("*")
        if path.is_file()
        and not any(hidden.fullmatch(part) for part in path.relative_to(REPOSITORY).parts)
    ]


REGISTRY_HOSTS = "|".join(
    re.escape(".".join(parts))
    for parts in (("pypi", "org"), ("files", "pythonhosted", "org"), ("test", "pypi", "org"))
)
# Assembled, so that this file does not contain what it looks for.
FORBIDDEN = re.compile(
    rf"{REGISTRY_HOSTS}|--(?:extra-)?index-url|(?<![\w.~*/-])/(?:home|Users)/[a-z]\w*/"
    r"|(?<![\w.~*/-])/(?:root|work/(?:main|shared))(?=/|\b)"
)


def forbidden_in(text: str) -> list[str]:
    """The registry hosts and the paths of somebody's machine that a text holds."""
    return FORBIDDEN.findall(text)


def test_files_name_no_registry_and_no_machine() -> None:
    found = {}
    for path in committed_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if hits := forbidden_in(text):
            found[str(path.relative_to(REPOSITORY))] = hits
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "https://" + "pypi" + ".org/simple",
        "pip install --index" + "-url x",
        "/" + "home/somebody/code",
        "'/" + "root/.pyenv'",
        "see /" + "work/shared/page.md",
    ],
)
def test_forbidden_texts_are_found(text: str) -> None:
    assert forbidden_in(text)


@pytest.mark.parametrize("text", ["~/.pyenv/versions", "https://example.org/root/", "a/root/b"])
def test_harmless_texts_pass(text: str) -> None:
    assert not forbidden_in(text)


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What make would do."""
    # This test may itself run below make, whose flags would reach the inner one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "-n", *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("target", ["demo", "test"])
def test_makefile_has_the_command(target: str) -> None:
    result = dry_run(target, "VENV=.venv-dry-run")
    module = {"demo": "experiments.generate", "test": "pytest"}[target]
    assert result.returncode == 0, result.stderr
    assert f".venv-dry-run/bin/python -m {module}" in result.stdout
    assert "constraints/jax-0.11.2.txt" in result.stdout
    assert ("dev" in result.stdout.split("-m pip install")[-1]) == (target == "test")


def test_ci_script_stops_at_the_first_failure() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
