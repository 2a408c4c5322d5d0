"""The compiled kernel, an optional extension: without a compiler the install works, and plain PyTorch takes the steps.

It is no Python module but a library for ctypes: without Python's headers, and the same for every version of Python.
"""

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class build_library(build_ext):  # noqa: N801, setuptools' own style
    """Builds under the plain name that the package looks for."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class wheel_for_platform(bdist_wheel):  # noqa: N801
    """Names the platform and no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": build_library, "bdist_wheel": wheel_for_platform},
    ext_modules=[
        Extension(
            "adafactor._cpu",
            ["src/adafactor/csrc/adafactor.cpp"],
            depends=["src/adafactor/csrc/adafactor.cpp", "setup.py"],
            language="c++",
            optional=True,
            # No flag for one machine or for looser arithmetic: sums and products are the same everywhere.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-fvisibility=hidden",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-Wno-psabi",
            ],
        )
    ],
)
