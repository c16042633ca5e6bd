"""What holds for the repository as a whole: directions of import, what is packaged and pinned, what is not said."""

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import tiny_run
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("bert_jax", "transformer_jax")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCKED = sorted((ROOT / "requirements").glob("*.txt"))
IGNORED = {"__pycache__", "build", "dist", "runs", "prepared", "exports"}

# A user has none of these, and a command that needs one is a defect.
NOT_FOR_USERS = ("torch", "tensorflow", "transformers")
HIDE = f"""
import sys
from importlib.machinery import PathFinder
class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {NOT_FOR_USERS!r} else super().find_spec(name, path, target)
sys.meta_path = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
"""


def files() -> list[Path]:
    """The files that git tracks; of a copy without git, all but what commands and tools make."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(part in IGNORED or part.startswith(".venv") for part in path.relative_to(ROOT).parts)
    ]


def imported(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, anywhere in it; relative imports are made absolute."""
    package = path.relative_to(ROOT).parent.parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            names |= {(base + (node.module or "")).rstrip(".")}
            names |= {f"{base}{node.module}.{alias.name}" if node.module else base + alias.name for alias in node.names}
    return names


def pins(path: Path) -> dict[str, str]:
    """Name and version of each line of a requirements file."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def python(code: str, *arguments: str, cwd: Path) -> str:
    """Run code in a fresh interpreter, on one device, which does not find what users do not have."""
    command = [sys.executable, "-c", HIDE + code, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_core_imports_neither_bert_jax_nor_translation():
    core = [p for p in (ROOT / "transformer_jax").rglob("*.py") if "translation" not in p.relative_to(ROOT).parts]
    assert len(core) > 10
    for path in core:
        wrong = [name for name in imported(path) if name.startswith(("bert_jax", "transformer_jax.translation"))]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_bert_jax_does_not_import_translation():
    for path in (ROOT / "bert_jax").rglob("*.py"):
        assert not any(name.startswith("transformer_jax.translation") for name in imported(path)), path


def test_imports_are_found_wherever_they_stand(tmp_path, monkeypatch):
    """The two tests above see an import inside a function, a relative one, and `from package import module`."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "transformer_jax" / "inner" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "def f():\n    from bert_jax import task\nfrom . import one\nfrom ..translation import two\n", encoding="utf-8"
    )
    assert {"bert_jax.task", "transformer_jax.inner.one", "transformer_jax.translation.two"} <= imported(path)


def test_no_file_is_a_drawer():
    drawers = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not [p for p in files() if p.stem.lower() in drawers or p.parent.name.lower() in drawers]


def test_no_tracked_file_names_a_machine_path_or_a_package_host():
    folders = "|".join(("wo" + "rk", "ro" + "ot"))
    hosts = "|".join(
        (
            "py" + r"pi\.org",
            "python" + "hosted",
            r"registry\." + "npm" + "js",
            r"deb\." + "debian",
            r"download\.py" + "torch",
        )
    )
    forbidden = re.compile(rf"(?:^|[^A-Za-z0-9_.])/(?:{folders})/|{hosts}", re.MULTILINE)
    assert forbidden.search("see /" + "root/x") and forbidden.search("https://" + "py" + "pi.org")
    found = []
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # compressed text, images
        found += [f"{path.relative_to(ROOT)}: {match[0]!r}" for match in forbidden.finditer(text)]
    assert not found


def test_the_wheel_holds_the_two_packages_and_nothing_else(tmp_path):
    """`data`, `launch` and `tests` are folders of the repository and not packages."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "launch", "data", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.gz"))
    (source / "data" / "stray.py").write_text("", encoding="utf-8")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info}
    expected = {str(p.relative_to(ROOT)) for p in files() if p.relative_to(ROOT).parts[0] in PACKAGES}
    assert expected <= set(names)
    assert f"{info}/licenses/LICENSE" in names
    assert "bert-jax = bert_jax.main:main" in entry_points
    assert "transformer-jax = transformer_jax.translation.main:main" in entry_points
    needed = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    assert not [r for r in needed if r.name in NOT_FOR_USERS and not r.marker]


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.name)
def test_requirements_are_pinned_and_hashed_without_urls(path):
    text = path.read_text(encoding="utf-8")
    assert "://" not in text
    entries = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    assert entries
    for entry in entries:
        markers = r' ; sys_platform == "linux"| ; platform_machine != "aarch64"'
        pattern = rf"[a-z0-9-]+==[0-9][\w.+]*({markers})?\s+(--hash=sha256:[0-9a-f]{{64}}\s*)+"
        assert re.fullmatch(pattern, entry), entry[:100]


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_the_locks_fit_the_project_and_each_other(version):
    """After a change of pyproject.toml, requirements/lock.py has to be run."""
    short = version.replace(".", "")
    users = pins(ROOT / "requirements" / f"py{short}.txt")
    development = pins(ROOT / "requirements" / f"dev-py{short}.txt")
    for line in PROJECT["dependencies"]:
        requirement = Requirement(line)
        found = users[re.sub(r"[-_.]+", "-", requirement.name).lower()]
        assert requirement.specifier.contains(found), f"{line} is pinned to {found}"
    assert users.items() <= development.items()
    assert not set(NOT_FOR_USERS) & set(users)
    assert {"transformers", "pytest", "hypothesis", "ruff", "mypy"} <= set(development)
    assert not any(name == "torch" or name.startswith("nvidia-") for name in development)


def test_changelog_and_project_name_the_same_version():
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == PROJECT["version"]


@pytest.mark.torch
def test_the_hidden_libraries_are_hidden(tmp_path):
    """Here they are installed; where they are not, the tests below say as much without hiding anything."""
    pytest.importorskip("torch")
    python(
        """
import importlib.util
assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("jax") is not None
""",
        cwd=tmp_path,
    )


@pytest.mark.slow
def test_everything_imports_without_torch_and_tensorflow(tmp_path):
    found = python(
        """
import importlib, pkgutil
for package in ("bert_jax", "transformer_jax"):
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        importlib.import_module(module.name)
        print(module.name)
""",
        cwd=tmp_path,
    )
    assert len(found.splitlines()) > 20


@pytest.mark.parametrize(
    ("module", "program", "least"),
    [("bert_jax.main", "bert-jax", 8), ("transformer_jax.translation.main", "transformer-jax", 7)],
)
def test_every_command_says_how_it_is_used(tmp_path, module, program, least):
    """And none of them takes a library to say it, so that help comes at once."""
    python(
        """
import contextlib, importlib, io
name, program, least = sys.argv[1:]
main = importlib.import_module(name)
commands = next(a for a in main._parser()._actions if a.choices).choices
assert len(commands) >= int(least)
for command in [None, *commands]:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            main.main([command, "--help"] if command else ["--help"])
    except SystemExit as e:
        assert e.code == 0, command
    assert f"usage: {program}" in out.getvalue(), command
    assert len(out.getvalue().splitlines()) < 40, command
heavy = {"jax", "flax", "tokenizers", "sentencepiece", "sacrebleu", "pyarrow", "tensorflow_datasets"} & set(sys.modules)
assert not heavy, heavy
""",
        module,
        program,
        str(least),
        cwd=tmp_path,
    )


@pytest.mark.slow
def test_every_command_runs_without_torch_and_tensorflow(tmp_path):
    """From text to a folder for other programs and back, on a corpus of a few lines."""
    lines = [" ".join(f"word{i * j % 41}" for j in range(1, 6)) + "." for i in range(400)]
    text = "\n".join(line + ("\n" if i % 8 == 7 else "") for i, line in enumerate(lines))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "recipe.toml").write_text(
        'name = "few"\nheldout = 0.2\n[[sources]]\nname = "few"\nfiles = ["text.txt"]\n', encoding="utf-8"
    )
    settings = tiny_run.config(tmp_path, data_recipe="recipe.toml", tokenizer_vocab_size=120, train_steps=3)
    tiny_run.write_run_file(tmp_path / "few.toml", settings)
    python(
        """
from bert_jax import main
for line in sys.argv[1].splitlines():
    print(line, flush=True)
    assert main.main(line.split()) == 0, line
loaded = [name for name in ("torch", "tensorflow", "transformers") if name in sys.modules]
assert not loaded, loaded
""",
        """prepare few.toml
pretrain few.toml
evaluate run
fill-mask run word1[MASK]
export run folder
import folder again
fill-mask again word1[MASK]
report run
verify run""",
        cwd=tmp_path,
    )
