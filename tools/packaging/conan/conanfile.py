"""Tessera for Conan 2. Uses no remote: libtorch, gloo's headers, libcurl, xxHash, Boost and nlohmann-json are the
system's, installed by tools/setup.sh.

    conan create tools/packaging/conan -o 'tessera/*:libtorch=/path/to/libtorch'
    conan export-pkg tools/packaging/conan -o ...     # packs the files of `make build`, without building again
"""

import os

from conan import ConanFile
from conan.tools.files import copy, load
from conan.tools.system.package_manager import Apt

REQUIRED_CONAN_VERSION = ">=2.0"


class TesseraConan(ConanFile):
    name = "tessera"
    description = "OSS, ShardedDataParallel and FullyShardedDataParallel for libtorch"
    license = "Apache-2.0"
    topics = ("libtorch", "distributed-training", "zero", "fsdp")
    package_type = "static-library"
    settings = "os", "arch", "compiler", "build_type"
    # libtorch: its folder, with include/ and lib/. If empty, CMake searches for it (CMAKE_PREFIX_PATH), because Conan's
    # copy of the tree has no .deps/.
    options = {"libtorch": ["", "ANY"], "cuda": [True, False]}
    default_options = {"libtorch": "", "cuda": False}

    @property
    def _tree(self):
        return os.path.join(self.recipe_folder, "..", "..", "..")

    def set_version(self):
        text = load(self, os.path.join(self._tree, "CMakeLists.txt"))
        self.version = text.partition("project(tessera VERSION ")[2].split()[0]

    def export_sources(self):
        for pattern in ("*CMakeLists.txt", "LICENSE", "*.md", "*.svg", "*.html", "*.h", "*.cpp", "*.cmake", "*.cmake.in"):
            copy(self, pattern, self._tree, self.export_sources_folder,
                 excludes=("build*", ".deps*", "out*", "tests*", "bench*", "examples*", "tools/packaging*"))

    def system_requirements(self):
        Apt(self).install(["libcurl4-openssl-dev", "libgloo-dev", "libxxhash-dev", "libboost-program-options-dev", "nlohmann-json3-dev"])

    def layout(self):
        # In the tree, where export-pkg expects the files of `make build`.
        self.folders.root = "../../.."
        self.folders.build = "build/release"
        self.folders.generators = "build/conan"

    def build(self):
        arguments = f"-DCMAKE_BUILD_TYPE={self.settings.build_type} -DTESSERA_BUILD_EXAMPLES=OFF"
        arguments += f" -DTESSERA_CUDA={'ON' if self.options.cuda else 'OFF'}"
        if self.options.libtorch:
            arguments += f' "-DCMAKE_PREFIX_PATH={self.options.libtorch}"'
        self.run(f'cmake -S "{self.source_folder}" -B "{self.build_folder}" -G Ninja {arguments}')
        self.run(f'cmake --build "{self.build_folder}" --target tessera_all')

    def package(self):
        for component in ("development", "tools"):
            self.run(f'cmake --install "{self.build_folder}" --prefix "{self.package_folder}" --component {component}')
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        # The package's own find_package(tessera) finds libtorch and names the targets.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "tessera")]
