"""Every check of the project, one session a job; plain ``nox`` runs all of them.

Tests never see the packages in the work tree: a session installs the wheel that ``wheel`` built, changes to a
temporary folder, and ``tests/conftest.py`` refuses packages that were not imported from site-packages.
"""

import json
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = [
    *("lint", "typing", "wheel", "tests", "coverage", "conformance", "docs", "examples", "template", "meta"),
]

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
REPORTS = ROOT / "reports"
COVERAGE = REPORTS / "coverage"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")

EXTRAS = PYPROJECT["project"]["optional-dependencies"]

PACKAGES = (
    "specsampling",
    "specsampling_jax",
    "specsampling_numpy",
    "specsampling_onnxruntime",
    "specsampling_torch",
    "specsampling_conformance",
)

# What the tests of a framework install, and which tests they run. The core's own run once more with each,
# because verification and sampling are the same code in every array namespace.
FRAMEWORKS = {
    "numpy": ((), ("specsampling", "specsampling_numpy", "specsampling_conformance", "benchmarks")),
    "torch": (
        ("torch", "transformers", "accelerate"),  # the last for models over several processes
        (
            *("specsampling", "specsampling_numpy", "specsampling_torch"),
            "specsampling_conformance/test_audit_transformers.py",
        ),
    ),
    "jax": (("jax", "equinox"), ("specsampling", "specsampling_jax")),  # the page of JAX wraps a module of the latter
    "onnxruntime": (
        # What makes other people's graphs for the tests, besides what reads them.
        ("onnx", "onnxruntime", "onnxruntime-genai", "onnxscript", "torch", "transformers"),
        ("specsampling_onnxruntime",),
    ),
}

# Backends that the conformance suite certifies: those with an entry point.
BACKENDS = ("numpy", "torch", "jax", "onnxruntime")

# Projects of third parties, complete, in conformance/template.
TEMPLATES = ("smallest", "recurrent")

# The arrays of the tests are tiny and pytest has a worker for each core: more threads only get in each other's way.
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def by_name(names: Iterable[str]) -> list[object]:
    """Return parameters for sessions that read ``tests(numpy)`` instead of ``tests(name='numpy')``."""
    return [nox.param(name, id=name) for name in names]


def install(session: nox.Session, *requirements: str, groups: tuple[str, ...] = ()) -> None:
    """Install requirements and dependency groups, at the pinned versions where there is a pin."""
    wanted = [*requirements, *nox.project.dependency_groups(PYPROJECT, *groups)]
    # To compile all of PyTorch takes longer than to install it, and few of its modules are ever imported.
    session.install("--no-compile", "--constraint", str(CONSTRAINTS), *wanted)


def install_wheel(session: nox.Session, *requirements: str, extras: str = "", groups: tuple[str, ...] = ()) -> None:
    """Install the wheel under test with what its tests need, and leave the work tree."""
    (built,) = DIST.glob("*.whl")
    install(session, f"{built}[{extras}]" if extras else str(built), *requirements, groups=groups)
    # A reused environment holds an older wheel of the same version, which pip would keep.
    session.install("--force-reinstall", "--no-deps", str(built))
    session.chdir(session.create_tmp())


def pytest(session: nox.Session, *arguments: str, **environment: str) -> None:
    """Run pytest on the installed packages with the project's settings."""
    session.run(
        "pytest",
        *("--config-file", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)),
        *arguments,
        *session.posargs,
        env={**SINGLE_THREAD, "SPECSAMPLING_TEST_INSTALLED": "1", **environment},
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check style (ruff), formatting (ruff) and spelling (codespell)."""
    install(session, groups=("lint",))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell", ".")


@nox.session
def typing(session: nox.Session) -> None:
    """Check types with mypy (strict) and pyright; no framework is installed."""
    install(session, *PYPROJECT["project"]["dependencies"], groups=("typing",))
    session.run("mypy")
    session.run("pyright", "--pythonpath", shutil.which("python", path=session.bin) or "python")


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the sdist and, from it, the wheel that other sessions test; look inside and run the README's command."""
    install(session, groups=("package",))
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(COVERAGE, ignore_errors=True)  # that of an older wheel
    session.run("python", "-m", "build", "--outdir", str(DIST), str(ROOT), silent=True)
    (built,) = DIST.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
    expected = [f"{package}/py.typed" for package in PACKAGES]
    expected += [f"specsampling/_bundled/{pair}/model.safetensors" for pair in ("target", "draft")]
    missing = [name for name in expected if name not in names]
    strangers = sorted(
        {name.split("/")[0] for name in names} - {*PACKAGES, f"{'-'.join(built.name.split('-')[:2])}.dist-info"}
    )
    if missing or strangers:
        session.error(f"{built.name} lacks {missing} and has {strangers} that do not belong there")
    install_wheel(session)
    session.run("specsampling", "generate", "ROMEO:", "--max-new-tokens", "64", "--seed", "0")


@nox.session(requires=["wheel"])
@nox.parametrize("framework", by_name(FRAMEWORKS))
def tests(session: nox.Session, framework: str) -> None:
    """Run the tests with one framework installed, recording coverage; arguments after -- go to pytest.

    What has passed for the same wheel without a framework is left out where there is one.
    """
    requirements, folders = FRAMEWORKS[framework]
    install_wheel(session, *requirements, extras="conformance", groups=("test",))
    COVERAGE.mkdir(parents=True, exist_ok=True)
    pytest(
        session,
        *("--cov", "--cov-config", str(ROOT / "pyproject.toml"), "--cov-report=", "--cov-fail-under=0"),
        # Here what tests of one file share takes longer than they do.
        *("--numprocesses", "auto", "--dist", "loadfile" if framework in ("jax", "onnxruntime") else "worksteal"),
        *(str(ROOT / "tests" / folder) for folder in folders),
        COVERAGE_FILE=str(COVERAGE / f".coverage.{framework}"),
        **{f"SPECSAMPLING_TEST_{'PASSED' if framework == 'numpy' else 'LEAVE_OUT'}": str(COVERAGE / "passed.txt")},
    )


@nox.session(requires=["wheel"])
@nox.parametrize("backend", by_name(BACKENDS))
def conformance(session: nox.Session, backend: str) -> None:
    """Certify a backend with the suite's PR tier; the reports are in reports/. Arguments after -- go to the suite."""
    extras = ",".join(["conformance", *(name for name in [backend] if name in EXTRAS)])
    install_wheel(session, extras=extras)
    REPORTS.mkdir(exist_ok=True)
    report = REPORTS / f"conformance-{backend}"
    session.run(
        *("python", "-m", "specsampling_conformance", "--backend", backend, "--tier", "pr"),
        *("--json", f"{report}.json", "--html", f"{report}.html"),
        *session.posargs,
        env=SINGLE_THREAD,
    )


@nox.session(requires=["wheel"])
def meta(session: nox.Session) -> None:
    """Test the suite itself: every planted fault must be killed and every control pass; writes docs/fault-matrix.md."""
    install_wheel(session, extras="conformance")
    page = ROOT / "docs" / "fault-matrix.md"
    session.run(
        "python", "-m", "specsampling_conformance.meta", "--write", str(page), *session.posargs, env=SINGLE_THREAD
    )


@nox.session(requires=["wheel"])
@nox.parametrize("project", by_name(TEMPLATES))
def template(session: nox.Session, project: str) -> None:
    """Build a template project from a copy, install it beside the wheel, run its tests and certify it."""
    install_wheel(session, extras="conformance", groups=("package",))
    copy = Path.cwd() / project  # in the session's temporary folder
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "conformance" / "template" / project, copy)
    session.run("python", "-m", "build", "--wheel", str(copy), silent=True)
    (built,) = copy.glob("dist/*.whl")
    session.install("--force-reinstall", "--no-deps", str(built))
    session.run("python", "-m", "pip", "check")
    (copy / f"specsampling_{project}.py").unlink()  # from here on only the wheel can be imported
    session.chdir(copy)
    session.run("pytest", "--strict-markers", *session.posargs, env=SINGLE_THREAD)
    report = REPORTS / f"template-{project}.json"
    REPORTS.mkdir(exist_ok=True)
    session.run(
        *("python", "-m", "specsampling_conformance", "--backend", project, "--json", str(report)),
        *(["--checkpoint", "demo"] if (copy / "demo").exists() else []),
        env=SINGLE_THREAD,
    )
    level = json.loads(report.read_text(encoding="utf-8"))["level"]
    if level != "exact":
        session.error(f"the template {project!r} must reach the level exact, got {level}")


@nox.session
def coverage(session: nox.Session) -> None:
    """Add up the coverage of the tests sessions that ran; less than every branch of core and NumPy backend fails."""
    install(session, groups=("coverage",))
    recorded = sorted(COVERAGE.glob(".coverage.*"))
    if not recorded:
        session.error("no coverage recorded: run `nox -s tests coverage`")
    together = str(COVERAGE / "together")
    session.run("coverage", "combine", "--keep", "--data-file", together, *map(str, recorded), silent=True)
    session.run("coverage", "report", "--data-file", together)


@nox.session(requires=["wheel"])
def docs(session: nox.Session) -> None:
    """Build the site into docs/_build/html with every warning an error, and run each example in it."""
    install_wheel(session, "array-api-strict", extras="conformance", groups=("docs",))
    site = ROOT / "docs" / "_build" / "html"
    shutil.rmtree(ROOT / "docs" / "api", ignore_errors=True)  # pages of names that are gone
    session.run("sphinx-build", "-n", "-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"), str(site))
    documented = ("specsampling", "specsampling_numpy", "specsampling_conformance")  # whatever needs no framework
    pytest(session, "--doctest-modules", "--pyargs", *documented)
    tests = ROOT / "tests" / "docs"
    pytest(session, str(tests), "--ignore", str(tests / "test_examples.py"), SPECSAMPLING_SITE=str(site))


@nox.session(requires=["wheel"])
def examples(session: nox.Session) -> None:
    """Run docs/examples and the docstrings of adapters with every framework, and hold the site to what adapters say."""
    adapters = [name for name in BACKENDS if name in EXTRAS]
    install_wheel(session, "array-api-strict", extras=",".join(["conformance", *adapters]), groups=("docs",))
    pytest(session, "--doctest-modules", "--pyargs", *(f"specsampling_{name}" for name in adapters))
    tests = ("test_examples.py", "test_pages.py", "test_signatures.py", "test_capabilities.py")
    pytest(session, *(str(ROOT / "tests" / "docs" / test) for test in tests))
