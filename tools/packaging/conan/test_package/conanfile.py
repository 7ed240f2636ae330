"""Builds and runs tests/consumer's smallest program against the package."""

import os

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain


class TesseraTest(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        self.folders.build = os.environ.get("TESSERA_TEST_BUILD", "build")
        self.folders.generators = self.folders.build

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False  # otherwise it writes one beside this file, into the tree
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build(target="ranks")

    def test(self):
        self.run(os.path.join(self.build_folder, "ranks"))
