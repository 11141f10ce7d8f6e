"""The pages are true: their programs run as they stand, their sessions print what they show, their links exist."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import PAGES, ROOT, Block, blocks, compare, file_of, run_session
from machines import machines

from horovod.common.environment import VARIABLES
from horovod.runner.options import make_parser
from horovod.runner.tunables import TUNABLES

LANGUAGES = {"python", "yaml", "console", "sh", "text"}
# Commands that pages name and tests do not run from there; where they are run.
RUN_ELSEWHERE = {
    ".ci/run": "by the continuous integration",
    "pip install .": "test_packaging.py",
}
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)]*)?\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_pages_are_found() -> None:
    names = {name_of(page) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/index.md", "docs/errors.md"} <= names


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_program_and_session_of_a_page_runs_as_shown(page: Path, tmp_path: Path) -> None:
    if page.name.startswith("pytorch"):
        pytest.importorskip("lightning", reason="its programs need torch and Lightning")
    if page.name.startswith("tensorflow"):
        pytest.importorskip("tensorflow", reason="its programs need TensorFlow")
    if page.name == "clusters.md":
        folder = tmp_path / "machines"
        folder.mkdir()
        with machines(2, folder) as cluster:
            run_page(page, tmp_path, lambda command: cluster["h1"].command(command, tmp_path))
    else:
        run_page(page, tmp_path, list)


def run_page(page: Path, tmp_path: Path, there: Callable[[list[str]], list[str]]) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: a block needs one of the languages {sorted(LANGUAGES)}"
        named = file_of(block)
        if block.language in ("python", "yaml"):
            assert named, f"{block}: the first line must be a comment with a file name"
            (tmp_path / named[0]).write_text(named[1])
        elif block.language == "console":
            run_session(block, tmp_path, there)


def commands(page: Path) -> list[tuple[Block, str]]:
    return [(b, line) for b in blocks(page) if b.language == "sh" for line in b.text.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_longer_command_exists(page: Path) -> None:
    for block, line in commands(page):
        command = line.partition("#")[0].strip()
        if command.split()[0] == "make":
            # make itself tells whether it knows the target.
            dry = subprocess.run(
                ["bash", "-c", command.replace("make", "make --dry-run", 1)], cwd=ROOT, capture_output=True, check=False
            )
            assert dry.returncode == 0, f"{block}: {command}: {dry.stderr.decode()}"
        else:
            assert command in RUN_ELSEWHERE, f"{block}: {command}: who runs this? Make it a console block."


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name_of(page)}: {target}"


def test_the_example_of_the_readme_has_ten_lines_or_so() -> None:
    (example,) = (block for block in blocks(ROOT / "README.md") if block.language == "python")
    code = [line for line in example.text.splitlines() if line.strip() and not line.startswith(("#", "import"))]
    assert len(code) <= 10


def test_all_environment_variables_are_documented() -> None:
    text = (ROOT / "docs/environment.md").read_text()
    documented = set(re.findall(r"`(HOROVOD_\w+)`", text))
    read = set(VARIABLES) | {"HOROVOD_GRACE_SECONDS"}
    # What horovodrun sets and passes on without any reader.
    passed_on = {t.variable for t in TUNABLES if not t.later}
    assert documented == read | passed_on | {"HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"}


def test_the_defaults_are_those_documented() -> None:
    rows = re.findall(r"^\| `(HOROVOD_\w+)` \| (\S+) \|", (ROOT / "docs/environment.md").read_text(), re.MULTILINE)
    shown = {name: text for name, text in rows if name in VARIABLES and text != "|"}
    assert len(shown) > 6
    for name, text in shown.items():
        kind, default = VARIABLES[name]
        # init takes 30 s if none of its two names is given.
        assert kind.parse(text) == (30.0 if name == "HOROVOD_START_TIMEOUT" else default), name


def test_all_options_of_horovodrun_are_documented() -> None:
    documented = set(re.findall(r"`(--?[A-Za-z][\w-]*)[` ]", (ROOT / "docs/horovodrun.md").read_text()))
    exist: set[str] = set()
    for action in make_parser()._actions:
        if action.help != "==SUPPRESS==":
            exist |= set(action.option_strings)
    assert exist - documented == set()
    assert documented - exist == set()


def test_comparing_finds_what_is_missing_and_what_is_too_much() -> None:
    assert compare(["a", "b"], ["b", "a"]) == ""
    assert compare(["pid ..."], ["pid 17"]) == ""
    assert compare(["a", "..."], ["a", "b", "c"]) == ""
    assert "not printed: 'a'" in compare(["a"], ["b"])
    assert "not printed: 'a'" in compare(["a", "a"], ["a"])
    assert "not expected: ['b']" in compare(["a"], ["a", "b"])
