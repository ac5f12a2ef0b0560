"""Where the packages lie: `passes/` and `codegen/` stand at the top level and are installed under `zgraph.`.

Everything else is in pyproject.toml; this is code only because subpackages are found, not listed.
"""

from setuptools import find_packages, setup

ROOTS = {"zgraph": "zgraph", "zgraph.passes": "passes", "zgraph.codegen": "codegen"}

setup(
    package_dir=ROOTS,
    packages=[
        package
        for name, folder in ROOTS.items()
        for package in (name, *(f"{name}.{inner}" for inner in find_packages(folder)))
    ],
    package_data={"": ["py.typed", "*.cpp", "*.html", "*.css", "*.js"]},
)
