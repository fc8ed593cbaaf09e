"""What the documents say is true: commands parse, options exist and take their values, links and tests are there."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from dqn import config
from dqn.__main__ import config_of, parse

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for folder in (".", "docs", "runs", "benchmarks", "benchmarks/reference")
    for path in (ROOT / folder).glob("*.md")
)
TEXT = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}


def code_lines(text: str) -> list[str]:
    """Every command of the code blocks without a language, its comment cut off."""
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.strip()]


COMMANDS = [(name, line) for name, text in TEXT.items() for line in code_lines(text)]
DQN = [(name, line) for name, line in COMMANDS if "python -m dqn " in line]
MAKE = [(name, line) for name, line in COMMANDS if line.startswith("make ")]


def test_there_are_commands_to_check():
    assert len(DQN) >= 3 and len(MAKE) >= 10
    assert "make train" in [line for _, line in MAKE] and "make test" in [line for _, line in MAKE]


@pytest.mark.parametrize(("name", "line"), DQN)
def test_commands_of_the_program_parse(name, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(re.split(r"[;|&]", line.split("python -m dqn ")[1])[0])
    options = parse(words)
    if options.command in ("train", "plan"):
        config_of(options)


@pytest.mark.parametrize(("name", "line"), MAKE)
def test_verbs_and_variables_of_make_exist(name, line):
    words = shlex.split(line)
    variables = {word.split("=")[0] for word in words[1:] if "=" in word}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{variable}\s*\?=", makefile, flags=re.MULTILINE) for variable in variables)
    done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in re.findall(r"python -m dqn (.*)", done.stdout):
        options = parse(shlex.split(command))
        if options.command in ("train", "plan"):
            config_of(options)


@pytest.mark.parametrize("name", TEXT)
def test_config_values_that_the_text_names_exist(name):
    sections = {leaf.split(".")[0] for leaf in config.LEAVES if "." in leaf}
    for span in re.findall(r"`([^`\n]+)`", TEXT[name]):
        for option, value in re.findall(r"--(\w+\.\w+) ([^\s\"]+)", span):
            config.check(option, value if config.LEAVES[option].type is str else yaml_value(value))
        for word in re.findall(r"^(\w+)\.(\w+)\b", span):
            if word[0] in sections and not span.endswith((".py", ".csv")):
                assert ".".join(word) in config.LEAVES, span


def yaml_value(text: str):
    import yaml

    return yaml.safe_load(text)


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", TEXT)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[name]):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        full = (ROOT / name).parent / path if path else ROOT / name
        assert full.exists(), target
        if anchor:
            assert anchor in anchors(full.read_text(encoding="utf-8")), target


def test_every_file_of_the_package_is_in_the_readme():
    table = TEXT["README.md"].split("## What each file does")[1].split("## ")[0]
    for path in (ROOT / "dqn").rglob("*.py"):
        if path.name != "__init__.py":
            assert f"`{path.relative_to(ROOT / 'dqn').as_posix()}`" in table, path


def test_the_worked_example_is_the_source():
    (diff,) = re.findall(r"^```diff\n(.*?)^```", TEXT["README.md"], flags=re.MULTILINE | re.DOTALL)
    for part in re.split(r"^ # (?=dqn/)", diff, flags=re.MULTILINE)[1:]:
        source = (ROOT / part.split(":")[0]).read_text(encoding="utf-8").splitlines()
        for line in part.splitlines()[1:]:
            if line[:1] in ("+", " "):
                assert line[1:] in source, line


def test_every_test_that_the_ledger_names_exists():
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", TEXT["docs/fidelity.md"])
    assert len(named) >= 30
    for file, function in named:
        path = ROOT / "tests" / file
        assert path.exists() and re.search(rf"^def {function}\b", path.read_text(), flags=re.MULTILINE), (
            file,
            function,
        )
