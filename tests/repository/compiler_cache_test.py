"""A source that was compiled in one clone is not compiled again in another.

Copies the sources into two folders, compiles a product source and a test source in both, plain and with
AddressSanitizer, with an empty compiler cache, and asks ccache: the second folder must have hits alone.
Usage: compiler_cache_test.py SOURCE_FOLDER. Exits with 77 (skipped) if there is no ccache."""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

OBJECTS = ["base/CMakeFiles/treadle_base.dir/status.cc.o", "tests/repository/CMakeFiles/repository_test.dir/secrets_test.cc.o"]
PRESETS = {"release": "build", "asan": "build/asan"}


def run(command, folder, environment):
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} in {folder}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def statistics(environment):
    lines = run(["ccache", "--print-stats"], "/", environment).splitlines()
    count = dict((name, int(value)) for name, value in (line.split() for line in lines))
    return count["direct_cache_hit"] + count["preprocessed_cache_hit"], count["cache_miss"]


def main():
    source = pathlib.Path(sys.argv[1]).resolve()
    if not shutil.which("ccache"):
        print("SKIPPED: ccache is not installed")
        return 77
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {"CCACHE_DIR": f"{scratch}/cache"}
        for preset, build in PRESETS.items():
            for name, expected in (("first", (0, 2)), ("a_folder_of_another_length", (2, 0))):
                folder = pathlib.Path(scratch) / name
                if not folder.exists():
                    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("build", ".git", "__pycache__"))
                run(["cmake", "--preset", preset, "-DTREADLE_CUDA=OFF", "-DTREADLE_XGRAMMAR=OFF",
                     "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON"], folder, environment)
                run(["ccache", "--zero-stats"], "/", environment)
                run(["ninja", "-C", build, *OBJECTS], folder, environment)
                found = statistics(environment)
                print(f"{preset}, {name}: {found[0]} hits, {found[1]} misses")
                if found != expected:
                    print(f"expected {expected[0]} hits and {expected[1]} misses")
                    return 1
    return 0


sys.exit(main())
