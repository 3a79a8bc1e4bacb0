"""Packs configs/, which lies beside the package in a checkout, into the wheel as rlx/configs. The rest: pyproject.toml."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["rlx", "rlx.*"]),
        "rlx.configs",
        *(f"rlx.configs.{group}" for group in find_namespace_packages("configs")),
    ],
    package_dir={"rlx.configs": "configs"},
    package_data={"": ["*.yaml", "*.md"], "rlx": ["py.typed"]},
)
